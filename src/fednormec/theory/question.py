"""Question of a config to the theory: the problem's constants, the method's settings, the noise of each round."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fednormec.config.assemble import Experiment, Rules, assemble, rules
from fednormec.config.schema import Config
from fednormec.config.settings import GivenConstants
from fednormec.core.local import Moment
from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.engine.planning import planned_for_clients, require_bounded
from fednormec.errors import UserError
from fednormec.privacy.asked import Privacy
from fednormec.privacy.mechanism import Plan, least_survivors, plan
from fednormec.theory.corrected import Promise, promise
from fednormec.theory.planner import NoiseAt
from fednormec.theory.setting import (
    Constants,
    Local,
    Noise,
    Settings,
    constants_of,
    covered_rate,
    knows_constants,
    round_noise,
)
from fednormec.theory.watch import gradient_norms, tiles

COVERED = ("fed_normec", "alpha_normec")
MOST_ROUNDS = 10**7
PUBLIC = ("clients", "dim")
REQUIRED = ("smoothness", "gap", "gradient_norm", "client_norm", *PUBLIC)
FOR_LOCAL: dict[Local, tuple[str, ...]] = {
    "one_step": (),
    "gd": ("heterogeneity",),
    "ig": ("component_norm", "component_heterogeneity"),
}


class Question(NamedTuple):
    """Question of a config to the theory.

    Attributes:
        rules: what the config says without its problem.
        constants: what is known about the problem.
        given: names of the constants that the config gives.
        from_data: whether constants look at the clients' data, and are not private.
        local: local operator, as the theorems know it.
        rate: probability p that a client sends.
        rounds: number of rounds that the budget allows.
        start_error: max_i ||P_i(x^0)|| where it was computed.
        agreed: agreed(privacy, rounds) -> the plan that keeps to a privacy; None without.
    """

    rules: Rules
    constants: Constants
    given: frozenset[str]
    from_data: bool
    local: Local
    rate: float
    rounds: int
    start_error: float | None
    agreed: Callable[[Privacy | None, int], Plan | None]

    @property
    def noise_at(self) -> NoiseAt:
        """Noise of a round when so many are planned, with the config's own privacy."""
        return self.noise_with(self.rules.privacy)

    def noise_with(self, privacy: Privacy | None) -> NoiseAt:
        """Returns the noise of a round as a function of the number of rounds planned, with another privacy."""

        def noise_at(rounds: int) -> Noise:
            agreed = self.agreed(privacy, rounds)
            mechanism = None if agreed is None else agreed.mechanism
            return round_noise(self.constants.clients, self.constants.dim, self.rate, mechanism)

        return cache(noise_at)


def ask(config: Config) -> Question:
    """Returns the question of a config. Its problem is built only where a constant has to be computed from it."""
    said = rules(config)
    if said.run.rounds > MOST_ROUNDS:
        raise UserError(f"the theory follows every round: ask for at most {MOST_ROUNDS:,}, not {said.run.rounds:,}.")
    given = GivenConstants(**said.config.get("constants", {})).known
    local = local_of(said.config, None)
    if all(name in given for name in (*REQUIRED, *FOR_LOCAL[local])):
        return _question(said, Constants(**given), given, False, local, None, None)
    return ask_about(assemble(config))


def ask_about(experiment: Experiment, known: Constants | None = None) -> Question:
    """Returns the question of an experiment whose problem has been built.

    `known` are its constants, where somebody has computed them before.
    """
    e = experiment
    said = Rules(e.algorithm, e.participation, e.privacy, e.run, e.config)
    given = GivenConstants(**e.config.get("constants", {})).known
    local = local_of(e.config, e.problem.client_sizes)
    _rate(said, e.problem.num_clients)
    x0 = e.problem.init(generator(e.run.seed, "init"))
    missing = [name for name in (*REQUIRED, *FOR_LOCAL[local]) if name not in given and name not in PUBLIC]
    constants = _constants(e.problem, x0, local, given, missing) if known is None else known
    start = _start_error(e, x0) if missing and known is None else None
    return _question(said, constants, given, bool(missing), local, start, e.problem)


def promise_of(experiment: Experiment, known: Constants | None = None) -> tuple[Promise, bool]:
    """Returns what an experiment's settings guarantee, and whether its constants look at data.

    Raises UserError, which says why, if no theorem covers it, before anything is computed.
    """
    require_covered(experiment)
    question = ask_about(experiment, known)
    return own_promise(question), question.from_data


def require_covered(experiment: Experiment) -> None:
    """Raises UserError if no theorem covers what an experiment does."""
    if "faults" in experiment.config:
        raise UserError("no theorem covers [faults]: clients that do not send their own update.")
    local = local_of(experiment.config, experiment.problem.client_sizes)
    settings_of(experiment.config, local, experiment.run.rounds)


def own_promise(question: Question) -> Promise:
    """Returns what the config's own settings guarantee; raises UserError, which says why, if no theorem covers them."""
    settings = settings_of(question.rules.config, question.local, question.rounds)
    start = None if settings.memory == "local_updates" else question.start_error
    return promise(question.constants, settings, question.noise_at(settings.rounds), start)


def settings_of(config: Config, local: Local, rounds: int) -> Settings:
    """Returns the settings of a config with every default spelled out; raises UserError if no theorem covers them."""
    method = config["method"]
    if not method["server_normalization"]:
        raise UserError("no theorem covers server_normalization = false: the step's length must be known.")
    server = config.get("server", {})
    plain = {"name": "sgd", "schedule": "constant", "warmup": 0, "local_schedule": "constant",
             "beta_schedule": "constant", "scaling": False}  # fmt: skip
    if any(server.get(key, value) != value for key, value in plain.items()):
        raise UserError("no theorem covers an optimiser of the server or a schedule: leave [server] out.")
    return Settings(
        local, config["local"]["step"] if "local" in config else 1.0, method["alpha"], method["beta"],
        method["server_step"], rounds, method["warmup_rounds"], method["initial_memory"],
    )  # fmt: skip


def local_of(config: Config, sizes: np.ndarray | None) -> Local:
    """Returns which of the theorems' local operators a config has; raises UserError if it is none."""
    method = config["method"]
    if method["name"] not in COVERED:
        raise UserError(f"the theorems are about Fed-α-NormEC; they do not cover the method {method['name']}.")
    if "local" not in config:
        if method["batch_size"] is not None:
            raise UserError("no theorem covers mini-batch gradients: leave method.batch_size out.")
        return "one_step"
    local = config["local"]
    if local["name"] == "gd":
        return "one_step" if local["steps"] == 1 else "gd"
    if local["name"] == "sgd":
        raise UserError("no theorem covers random mini-batches (sgd): take local.name = 'gd' or 'ig'.")
    if local["name"] == "dp_sgd":
        raise UserError("no theorem covers local steps that bound each record (dp_sgd): take local.name = 'gd' or 'ig'."
                        )  # fmt: skip
    if local["order"] != "cyclic" or local["epochs"] != 1:
        raise UserError("the theorem of local ig covers one pass in cyclic order: leave local.order and epochs out.")
    b = local["batch_size"]
    if sizes is not None and any(size > b and size % b for size in sizes):
        raise UserError(f"local.batch_size = {b} does not divide every client's number of examples, and with unequal "
                        "batches no theorem covers local ig; 1 always does.")  # fmt: skip
    return "ig"


def _question(
    said: Rules,
    constants: Constants,
    given: Iterable[str],
    from_data: bool,
    local: Local,
    start_error: float | None,
    problem: Problem | None,
) -> Question:
    if said.privacy is not None:
        require_bounded(said.algorithm)

    @cache
    def agreed(privacy: Privacy | None, rounds: int) -> Plan | None:
        if privacy is None:
            return None
        if problem is not None and said.algorithm.prime is None:
            return planned_for_clients(problem, said.algorithm, said.participation, privacy, rounds)
        radius = said.algorithm.bound.radius
        return plan(privacy, constants.clients, said.participation, radius, constants.dim, rounds)

    first = agreed(said.privacy, said.run.rounds)
    rounds = said.run.rounds if first is None else first.rounds
    rate = _rate(said, constants.clients)
    return Question(said, constants, frozenset(given), from_data, local, rate, rounds, start_error, agreed)


def _rate(said: Rules, clients: int) -> float:
    floor = 1
    if said.privacy is not None:
        floor = max(said.privacy.min_cohort, least_survivors(said.privacy, clients, said.participation))
    return covered_rate(said.participation, clients, floor)


def _constants(problem: Problem, x0: Tensor, local: Local, given: dict[str, Any], missing: list[str]) -> Constants:
    """Returns the given constants, and the problem's own for those that are missing."""
    if missing and knows_constants(problem):
        return replace(constants_of(problem, x0, local), **given)
    unknown = [name for name in missing if name not in ("gradient_norm", "client_norm")]
    if unknown:
        raise UserError(
            f"this problem does not know its own constants: give {', '.join(unknown)} in [constants], or with "
            f"--set constants.{unknown[0]}=...; quadratic and logistic problems know theirs."
        )
    mean, largest = gradient_norms(problem, x0) if missing else (0.0, 0.0)
    sizes = {"clients": problem.num_clients, "dim": problem.dim}
    return Constants(**{**sizes, "gradient_norm": mean, "client_norm": largest, **given})


def _start_error(e: Experiment, x0: Tensor) -> float:
    """Computes max_i ||P_i(x^0)||, exactly."""
    moment = Moment(e.run.seed, 1)
    updates = (e.algorithm.local.run(e.problem, x0, ids, moment, None) for ids in tiles(e.problem))
    return float(max(rows.double().norm(dim=1).max().item() for rows in updates))
