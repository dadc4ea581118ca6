"""From a config to the objects of a run: problem, algorithm, participation, noise."""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fednormec.algorithms.base import Algorithm
from fednormec.algorithms.named import METHODS
from fednormec.config import (
    DEFAULT_NAMES,
    SECTIONS,
    Call,
    Config,
    DataSettings,
    RunSettings,
    check,
    choose,
    known,
)
from fednormec.data import (
    Examples,
    FederatedData,
    NpzData,
    by_ids,
    digits,
    dirichlet,
    federate,
    iid,
    read_folder,
    read_npz,
    shards,
    split,
)
from fednormec.engine import Round, evaluation_interval, simulate
from fednormec.errors import UserError
from fednormec.local import gd, ig, sgd
from fednormec.models import MODELS, reset
from fednormec.participation import Participation, fixed_size, full, poisson
from fednormec.privacy.mechanism import Plan, Privacy
from fednormec.problems.base import Problem
from fednormec.problems.logistic import Logistic
from fednormec.problems.neural import NeuralProblem
from fednormec.problems.quadratic import Quadratic, random_quadratic
from fednormec.randomness import generator
from fednormec.theory.setting import GivenConstants

Parts = list[np.ndarray]
Table = Mapping[str, Callable[..., Any]]
LOCALS: Table = {"gd": gd, "ig": ig, "sgd": sgd}
PARTICIPATIONS: Table = {"full": full, "poisson": poisson, "fixed_size": fixed_size}


class Experiment(NamedTuple):
    """Everything a run needs, its config with every default spelled out, and the sections it did without."""

    problem: Problem
    algorithm: Algorithm
    participation: Participation
    privacy: Privacy | None
    run: RunSettings
    config: Config
    unused: tuple[str, ...]


class Rules(NamedTuple):
    """What a config says without its problem: the method, who takes part, what is kept private, for how long."""

    algorithm: Algorithm
    participation: Participation
    privacy: Privacy | None
    run: RunSettings
    config: Config


def assemble(config: Config) -> Experiment:
    """Checks the whole config and builds what it describes; nothing is written."""
    algorithm, participation, privacy, run, resolved = rules(config)
    problem = _problem(config, resolved, run)
    for name, size in {"clients": problem.num_clients, "dim": problem.dim}.items():
        given = resolved.get("constants", {}).get(name)
        if given not in (None, size):
            raise UserError(f"constants.{name} = {given}, but the problem has {size}: leave it out.")
    in_order = {name: resolved[name] for name in SECTIONS if name in resolved}
    unused = tuple(name for name in config if name not in resolved)
    return Experiment(problem, algorithm, participation, privacy, run, in_order, unused)


def rules(config: Config) -> Rules:
    """Checks everything but the problem, for questions that can be answered without one."""
    resolved: Config = {}
    resolved["run"] = check("[run]", config.get("run", {}), RunSettings)
    run = RunSettings(**resolved["run"])
    algorithm = _algorithm(config, resolved)
    participation = _choose(config, resolved, "participation", PARTICIPATIONS)()
    _require_full_where_named(resolved)
    privacy = None
    if "privacy" in config:
        resolved["privacy"] = check("[privacy]", config["privacy"], Privacy)
        privacy = Privacy(**resolved["privacy"])
    if "constants" in config:
        resolved["constants"] = check("[constants]", config["constants"], GivenConstants)
        GivenConstants(**resolved["constants"])
    return Rules(algorithm, participation, privacy, run, resolved)


def start(experiment: Experiment, before_release: Callable[[int, Plan], None]) -> Iterator[Round]:
    """The rounds of an experiment; what does not fit together is said here, before the first."""
    run = experiment.run
    every = evaluation_interval(run.rounds) if run.evaluate_every is None else run.evaluate_every
    return simulate(
        experiment.problem, experiment.algorithm, experiment.participation, experiment.privacy, rounds=run.rounds,
        seed=run.seed, evaluate_every=every, workers=run.workers, chunk_size=run.chunk_size,
        before_release=before_release,
    )  # fmt: skip


def _choose(config: Config, resolved: Config, section: str, table: Table, given: int = 0) -> Call:
    settings = config.get(section, {})
    call = choose(section, settings, table, given)
    resolved[section] = {"name": settings.get("name", DEFAULT_NAMES[section]), **call.arguments}
    return call


def _algorithm(config: Config, resolved: Config) -> Algorithm:
    name = str(config.get("method", {}).get("name", DEFAULT_NAMES["method"]))
    known("method", name, METHODS)
    takes_local = METHODS[name].takes_local
    table: Table = {key: method.build for key, method in METHODS.items()}
    method = _choose(config, resolved, "method", table, given=1 if takes_local else 0)
    algorithm: Algorithm = method(_choose(config, resolved, "local", LOCALS)()) if takes_local else method()
    return algorithm


def _require_full_where_named(resolved: Config) -> None:
    if resolved["method"]["name"] == "alpha_normec" and resolved["participation"]["name"] != "full":
        raise UserError("alpha_normec is the method with every client in every round: use full participation, or "
                        "fed_normec with the local operator gd and one step.")  # fmt: skip


def _problem(config: Config, resolved: Config, run: RunSettings) -> Problem:
    dtype, device = getattr(torch, run.dtype), _device(run.device)

    def quadratic(
        clients: int = 20, dim: int = 20, parts: int = 1, heterogeneity: float = 1.0, condition: float = 10.0
    ) -> Problem:
        with _sizes_from_the_config("problem"):
            problem = random_quadratic(
                clients, dim, parts=parts, heterogeneity=heterogeneity, condition=condition, seed=run.seed, dtype=dtype
            )
        return Quadratic(problem.curvatures.to(device), problem.minimisers.to(device))

    def logistic(regularizer: float = 0.0, positive: Sequence[int] = (1,)) -> Problem:
        data = _data(config, resolved, run.seed)
        pairs = [_two_classes(examples, positive, dtype, device) for examples in data.clients]
        if len({sign for _, y in pairs for sign in y.tolist()}) < 2:
            raise UserError(f"positive = {list(positive)} puts every example into one class: name some of the labels.")
        test = None if data.test is None else _two_classes(data.test, positive, dtype, device)
        return Logistic([a for a, _ in pairs], [y for _, y in pairs], regularizer=regularizer, test=test)

    def neural(vectorize: Literal["auto", "vmap", "loop"] = "auto", tile: int | None = None) -> Problem:
        data = _data(config, resolved, run.seed)
        build = _choose(config, resolved, "model", MODELS, given=2)
        with _sizes_from_the_config("model"):
            model = build(data.input_shape, data.num_classes)
        reset(model, generator(run.seed, "init"))
        return NeuralProblem(model, data.clients, data.test, vectorize=vectorize, dtype=dtype, device=device, tile=tile)

    table: Table = {"neural": neural, "logistic": logistic, "quadratic": quadratic}
    problem: Problem = _choose(config, resolved, "problem", table)()
    return problem


def _data(config: Config, resolved: Config, seed: int) -> FederatedData:
    given, common = config.get("data", {}), [field.name for field in fields(DataSettings)]
    asked = DataSettings(**check("[data]", {k: v for k, v in given.items() if k in common}, DataSettings))
    if asked.source != "digits" and os.path.isdir(asked.source):
        settings = {k: v for k, v in given.items() if k != "source"}
        check("[data] from a folder, one file per client,", settings, lambda: None, beside=("source",))
        resolved["data"] = {"source": asked.source}
        return read_folder(asked.source)
    held = NpzData(digits(), None, None) if asked.source == "digits" else _file(asked.source)
    partition = ("iid" if held.client_ids is None else "by_ids") if asked.partition is None else asked.partition
    fraction = (0.2 if held.test is None else 0.0) if asked.test_fraction is None else asked.test_fraction
    known("partition", partition, PARTITIONS)
    if held.test is not None and fraction:
        raise UserError(f"{asked.source} brings its own test set: leave test_fraction out.")
    settings = {k: v for k, v in given.items() if k not in common}
    deal = Call(PARTITIONS[partition], check(f"[data] {partition}", settings, PARTITIONS[partition], 3, common))
    resolved["data"] = {"source": asked.source, "partition": partition, "test_fraction": fraction, **deal.arguments}
    return _dealt(held, deal, fraction, seed)


def _dealt(held: NpzData, deal: Call, test_fraction: float, seed: int) -> FederatedData:
    """Sets a test set aside and deals the rest out to the clients, who keep the names that the data gave them."""
    kept, aside = split(len(held.train), test_fraction, generator(seed, "split"))
    train, ids = held.train.take(kept), None if held.client_ids is None else held.client_ids[kept]
    test = held.train.take(aside) if len(aside) else held.test
    parts = deal(train.y, ids, generator(seed, "partition"))
    names = [str(name) for name in np.unique(ids)] if deal.build is _deal_by_ids and ids is not None else None
    return federate(train, test, parts, names)


def _file(source: str) -> NpzData:
    if not Path(source).suffix and not os.path.exists(source):
        near = "did you mean 'digits'?" if difflib.get_close_matches(source, ["digits"]) else "check the path."
        raise UserError(f"there is no data set, file or folder '{source}'; {near}")
    return read_npz(source)


def _deal_iid(labels: np.ndarray, ids: np.ndarray | None, rng: np.random.Generator, clients: int = 20) -> Parts:
    return iid(len(labels), clients, rng)


def _deal_dirichlet(
    labels: np.ndarray, ids: np.ndarray | None, rng: np.random.Generator, clients: int = 20, concentration: float = 0.5
) -> Parts:
    return dirichlet(labels, clients, concentration, rng)


def _deal_shards(
    labels: np.ndarray, ids: np.ndarray | None, rng: np.random.Generator, clients: int = 20, shards_per_client: int = 2
) -> Parts:
    return shards(labels, clients, shards_per_client, rng)


def _deal_by_ids(labels: np.ndarray, ids: np.ndarray | None, rng: np.random.Generator) -> Parts:
    if ids is None:
        raise UserError("partition = 'by_ids' needs data that name a client for each example (the key 'client').")
    return by_ids(ids)


PARTITIONS: dict[str, Callable[..., Parts]] = {
    "iid": _deal_iid,
    "dirichlet": _deal_dirichlet,
    "shards": _deal_shards,
    "by_ids": _deal_by_ids,
}


def _two_classes(
    examples: Examples, positive: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat features and labels +1 for the classes in `positive`, -1 for all others."""
    features = torch.as_tensor(examples.x.reshape(len(examples), -1)).to(device, dtype)
    labels = np.where(np.isin(examples.y, positive), 1.0, -1.0)
    return features, torch.as_tensor(labels).to(device, dtype)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:  # from a missing module to an assertion; all mean the same
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise UserError(f"[run] device '{name}' cannot be used here: {reason}.") from error
    return device


@contextmanager
def _sizes_from_the_config(section: str) -> Iterator[None]:
    """numpy and torch raise one of these when a size is beyond the memory, or beyond any array."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"[{section}] cannot be made in the sizes asked for: {reason}.") from error
