"""Values of a program as an experiment: what a run's config says of them, and whether they are those of a folder."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fednormec.config.assemble import PARTICIPATIONS, Experiment
from fednormec.config.schema import Config, Section, check, choose
from fednormec.config.settings import PYTHON, RunSettings
from fednormec.core.algorithm import Algorithm
from fednormec.core.fingerprint import fingerprint
from fednormec.core.participation import Participation, full
from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.errors import UserError, note, visible
from fednormec.privacy.asked import Privacy

LARGEST = 2**63  # TOML's whole numbers have 64 bits
VERSION = "{}.{}".format(*sys.version_info)


class Values(NamedTuple):
    """Values that a run is made of; its other settings are plain numbers.

    Attributes:
        participation: None: every client in every round, or that of the folder that is resumed.
        privacy: None: no noise, or that of the folder that is resumed.
        x0: where to start; None: where the problem does.
    """

    problem: Problem
    algorithm: Algorithm
    participation: Participation | None = None
    privacy: Privacy | None = None
    x0: Tensor | None = None


def require_kinds(values: Values) -> None:
    """Raises UserError if one of the values is of another kind, such as two of them in each other's place."""
    kinds: dict[str, tuple[type, str]] = {
        "algorithm": (Algorithm, "a method, such as fn.fed_normec(fn.gd(0.1))"),
        "participation": (Participation, "a rule, such as fn.poisson(0.2)"),
        "privacy": (Privacy, "what to keep to, such as fn.Privacy(epsilon=4)"),
        "x0": (Tensor, "a flat vector of torch"),
    }
    if not hasattr(values.problem, "grad") or isinstance(values.problem, type | Tensor):
        raise UserError(f"problem is a problem, such as fn.NeuralProblem(...), not {_briefly(values.problem)}.")
    for name, (kind, words) in kinds.items():
        value = getattr(values, name)
        if not isinstance(value, kind) and (value is not None or name == "algorithm"):
            raise UserError(f"{name} is {words}, not {_briefly(value)}.")


def begun(values: Values, run: Section, settings: Mapping[str, Section] | None = None) -> Experiment:
    """Returns the experiment of a new run; raises UserError if its config could not hold what was asked.

    Args:
        values: what the run is made of.
        run: settings of [run] that are given, as numbers.
        settings: further entries of [problem] and [method], by which readers tell runs apart.
    """
    require_kinds(values)
    problem, algorithm, rule, privacy, x0 = values
    x = problem.init(generator(0, "init"))
    given = {"dtype": str(x.dtype).removeprefix("torch."), "device": str(x.device), **run}
    resolved = check("fn.train", {key: plain(value) for key, value in given.items() if value is not None}, RunSettings)
    if not -LARGEST <= resolved["seed"] < LARGEST:
        raise UserError(f"seed must fit 64 bits in a run folder, not {resolved['seed']}.")
    own, more = full() if rule is None else rule, settings or {}
    config: Config = {
        "problem": {"name": type(problem).__name__, **more.get("problem", {}), **_sizes(problem)},
        "local": {"name": algorithm.local.name},
        "method": {"name": algorithm.name, **more.get("method", {"bound": algorithm.bound.name})},
        "participation": _described(own, problem.num_clients),
    }
    if algorithm.optimizer.name != "sgd":
        config["server"] = {"name": algorithm.optimizer.name}
    if privacy is not None:
        privacy = Privacy(**{key: plain(value) for key, value in asdict(privacy).items()})
        config["privacy"] = asdict(privacy)
    config[PYTHON] = _identity(problem, algorithm, own)
    config["run"] = resolved
    return Experiment(problem, algorithm, own, privacy, RunSettings(**resolved), config, (), x0=x0)


def known_again(config: Config, values: Values, rounds: int | None = None) -> Experiment:
    """Returns the experiment of a run that is resumed; raises UserError if the values are not those that it began with.

    Args:
        config: the config of its folder.
        values: what the program gives.
        rounds: number of rounds, if the program gives it.
    """
    require_kinds(values)
    problem, algorithm, _, _, x0 = values
    run = RunSettings(**check("[run]", config.get("run", {}), RunSettings))
    if rounds not in (None, run.rounds):
        raise UserError(f"the run was planned for {run.rounds} rounds, and its noise with it, not for {rounds}: leave "
                        "rounds out, or start a new run.")  # fmt: skip
    rule = _participation(config, values)
    now, before = _identity(problem, algorithm, rule), config.get(PYTHON, {})
    sizes = {key: config.get("problem", {}).get(key) for key in _sizes(problem)}
    for what, is_now, was in _differences(now | _sizes(problem), before | sizes):
        raise UserError(f"the {what} is not the one that the run began with: {is_now}, not {was}. Give the same "
                        f"{what}, or start a new run.")  # fmt: skip
    if before.get("version") != VERSION:
        note(f"Python is {VERSION}, not {before.get('version')}: whether the method's functions are the same was not "
             "looked at.")  # fmt: skip
    elif now["code"] != before.get("code"):
        raise UserError("the method is not the one that the run began with: a function of it, or a number in one, is "
                        "another. Give the same method, or start a new run.")  # fmt: skip
    return Experiment(problem, algorithm, rule, _privacy(config, values.privacy), run, config, (), x0=x0)


def plain(value: Any) -> Any:
    """Returns a number of numpy or torch as Python's own; anything else as it is."""
    scalar = isinstance(value, np.generic) or (isinstance(value, Tensor | np.ndarray) and value.ndim == 0)
    return value.item() if scalar else value


def _briefly(value: object) -> str:
    """Returns a value as an error names it: a number or a text as it is, of anything else its type."""
    short = value is None or isinstance(value, bool | int | float | str)
    return visible(repr(value), 40) if short else f"of type {type(value).__name__}"


def _sizes(problem: Problem) -> Section:
    return {"clients": int(problem.num_clients), "dim": int(problem.dim)}


def _identity(problem: Problem, algorithm: Algorithm, participation: Participation) -> Section:
    """Returns what [python] holds: what tells the values apart from others, nothing of it from the clients' data."""
    ours = _ours(participation, problem.num_clients) is not None
    return {
        "version": VERSION,
        "problem": type(problem).__name__,
        "method": algorithm.name,
        "radius": float(algorithm.bound.radius),
        "memory_slots": algorithm.memory_slots,
        "message_slots": algorithm.message_slots,
        "code": fingerprint(algorithm),
        **({} if ours else {"participation": fingerprint(participation)}),
    }


def _differences(now: Section, before: Section) -> Iterator[tuple[str, str, str]]:
    """Yields what differs, how it is now, and how it was."""
    said = {
        "problem": ("problem", "it is a {}"),
        "clients": ("problem", "it has {} clients"),
        "dim": ("problem", "it has {} parameters"),
        "method": ("method", "it is called {!r}"),
        "radius": ("method", "the radius of its bound is {}"),
        "memory_slots": ("method", "it has {} memory slots"),
        "message_slots": ("method", "it has {} message slots"),
    }
    for key, (what, words) in said.items():
        if now[key] != before.get(key):
            yield what, words.format(now[key]), f"{before.get(key)!r}" if key == "method" else f"{before.get(key)}"


# participation and privacy, which a config can hold


def _described(participation: Participation, clients: int) -> Section:
    """Returns the section [participation]: name and arguments of ours, name and facts of another."""
    facts = {"name": participation.name, "rate": float(participation.rate(clients)), "idle": participation.idle}
    return _ours(participation, clients) or facts


def _ours(participation: Participation, clients: int) -> Section | None:
    """Returns the section by which one of our own constructors makes the same rule; None if none does."""
    rate, least, idle = plain(participation.rate(clients)), participation.least(clients), participation.idle
    tried: dict[str, Section] = {
        "full": {}, "poisson": {"p": rate, "idle": idle}, "fixed_size": {"m": least, "idle": idle},
    }  # fmt: skip
    for name, arguments in tried.items():
        with suppress(UserError):
            if fingerprint(PARTICIPATIONS[name](**arguments)) == fingerprint(participation):
                return {"name": name, **arguments}
    return None


def _participation(config: Config, values: Values) -> Participation:
    """Returns the rule of a folder's config, or the program's own, which must be the same."""
    section, given, clients = config.get("participation", {}), values.participation, values.problem.num_clients
    own = config.get(PYTHON, {}).get("participation")
    if given is None:
        if own is not None:
            raise UserError(f"the participation {section.get('name')!r} is a rule of your own, which the folder cannot "
                            "hold: give it to fn.resume, too.")  # fmt: skip
        rule: Participation = choose("participation", section, PARTICIPATIONS)()
        return rule
    same = _described(given, clients) == section
    if not same or (own is not None and config[PYTHON].get("version") == VERSION and own != fingerprint(given)):
        raise UserError(f"the run began with the participation {section.get('name')!r} and other settings or another "
                        f"function than {given.name}: leave participation out, or start a new run.")  # fmt: skip
    return given


def _privacy(config: Config, given: Privacy | None) -> Privacy | None:
    """Returns the privacy of a folder's config; raises UserError if the program gives another."""
    kept = Privacy(**check("[privacy]", config["privacy"], Privacy)) if "privacy" in config else None
    if given is None or given == kept:
        return kept
    if kept is None:
        raise UserError("the run began without privacy, and what was released cannot be made private: leave privacy "
                        "out, or start a new run.")  # fmt: skip
    other = next(key for key, value in asdict(kept).items() if value != getattr(given, key))
    raise UserError(f"the run began with privacy.{other} = {getattr(kept, other)}, not {getattr(given, other)}: leave "
                    "privacy out, or start a new run.")  # fmt: skip
