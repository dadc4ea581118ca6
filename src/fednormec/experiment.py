"""From a config to the objects of a run: problem, algorithm, participation, noise."""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fednormec import kernels
from fednormec.algorithms.base import Algorithm
from fednormec.algorithms.named import METHODS
from fednormec.checkpoint import Checkpoint
from fednormec.config import (
    BUILT_IN,
    DATA_SETTINGS,
    DEFAULT_NAMES,
    SECTIONS,
    Call,
    Config,
    DataSettings,
    RunSettings,
    built_in_name,
    check,
    choose,
    known,
)
from fednormec.data import (
    Examples,
    FederatedData,
    by_ids,
    digits,
    dirichlet,
    federate,
    hold_out,
    iid,
    read_folder,
    read_npz,
    shards,
    split,
)
from fednormec.data.images import IMAGE_SETS, open_images
from fednormec.data.sources import Takeable
from fednormec.engine import Place, Round, evaluation_interval, pool_for, simulate
from fednormec.errors import UserError, at_least_one, require_room
from fednormec.faults import FAULTS, Faults, faulty
from fednormec.files import digest
from fednormec.local import gd, ig, sgd
from fednormec.models import MODELS, reset
from fednormec.participation import Participation, fixed_size, full, poisson
from fednormec.privacy.mechanism import Plan, Privacy
from fednormec.problems.base import Problem
from fednormec.problems.logistic import Logistic
from fednormec.problems.neural import NeuralProblem
from fednormec.problems.quadratic import Quadratic, random_quadratic
from fednormec.randomness import generator
from fednormec.ray_engine import Ray
from fednormec.theory.setting import GivenConstants
from fednormec.workers import Pool

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


def assemble(config: Config, data: FederatedData | None = None) -> Experiment:
    """Checks the whole config and builds what it describes; nothing is written. With `data`, those of one party among
    others who have theirs elsewhere, in place of what [data] says."""
    algorithm, participation, privacy, run, resolved = rules(config)
    problem = _problem(config, resolved, run, data)
    for name, size in {"clients": problem.num_clients, "dim": problem.dim}.items():
        given = resolved.get("constants", {}).get(name)
        if given not in (None, size):
            raise UserError(f"constants.{name} = {given}, but the problem has {size}: leave it out.")
    if "faults" in config:
        resolved["faults"] = check("[faults]", config["faults"], Faults)
        algorithm = _with_faults(algorithm, Faults(**resolved["faults"]), problem.num_clients, run.seed)
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


def start(
    experiment: Experiment,
    before_release: Callable[[int, Plan], None],
    folder: Path = Path(),
    resume: Checkpoint | None = None,
    released: int | None = None,
    on: Ray | Place | None = None,
) -> Iterator[Round]:
    """The rounds of an experiment; what does not fit together is said here, before the first. `folder`, where memories
    lie that are to lie in a file, need not be there before the first round."""
    run = experiment.run
    return simulate(
        experiment.problem, experiment.algorithm, experiment.participation, experiment.privacy, rounds=run.rounds,
        seed=run.seed, evaluate_every=evaluate_every(experiment), workers=run.workers, chunk_size=run.chunk_size,
        memories_in=folder if run.memories == "file" else None, before_release=before_release,
        resume=resume, released=released, on=on,
    )  # fmt: skip


def data_digest(experiment: Experiment) -> str | None:
    """That of the user's own file or folder, which may change between two runs; None for any other source."""
    source = str(experiment.config.get("data", {}).get("source", BUILT_IN[0]))
    return None if source in BUILT_IN else digest(Path(source))


def evaluate_every(experiment: Experiment) -> int:
    """As asked, or as the engine's rule says."""
    problem, algorithm, participation, privacy, run, _, _ = experiment
    if run.evaluate_every is not None:
        return run.evaluate_every
    return evaluation_interval(problem, algorithm, participation, run.rounds, privacy is not None)


def checkpoint_rounds(experiment: Experiment) -> int | None:
    """As asked; else, with secure noise, after every round: one that must be drawn again is one more release."""
    run, privacy = experiment.run, experiment.privacy
    if run.checkpoint_rounds is None and privacy is not None and privacy.randomness == "secure":
        return 1
    return run.checkpoint_rounds


def with_workers(experiment: Experiment, workers: int | None) -> Experiment:
    """With another number of workers than its config asks for, which changes no bit."""
    if workers is None:
        return experiment
    return experiment._replace(run=replace(experiment.run, workers=at_least_one("--workers", workers)))


def pool_of(experiment: Experiment) -> Pool:
    return pool_for(experiment.problem, experiment.run.workers, experiment.run.chunk_size)


def choices(experiment: Experiment, on: Ray | Place | None = None) -> dict[str, Any]:
    """What a run chooses by rule where its config leaves it open; none of it changes more than rounding. How many
    workers Ray's cluster gives by itself is its own affair: None."""
    problem, algorithm, run = experiment.problem, experiment.algorithm, experiment.run
    pool = pool_of(experiment)
    numbers = problem.num_clients * algorithm.memory_slots * problem.dim
    return {
        "gradients": problem.way if isinstance(problem, NeuralProblem) else "formula",
        "kernels": kernels.library() is not None,
        "tile": problem.tile,
        "engine": "threads" if on is None else "ray" if isinstance(on, Ray) else "elsewhere",
        "workers": pool.workers if on is None else run.workers,
        "chunk_size": pool.chunk_size,
        "memories": run.memories,
        "memories_bytes": numbers * (4 if run.dtype == "float32" else 8),
        "evaluate_every": evaluate_every(experiment),
        "checkpoint_rounds": checkpoint_rounds(experiment),
        "checkpoint_seconds": run.checkpoint_seconds,
    }


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


def _with_faults(algorithm: Algorithm, faults: Faults, num_clients: int, seed: int) -> Algorithm:
    if faults.clients > num_clients:
        raise UserError(f"[faults] clients = {faults.clients}, but there are {num_clients} of them.")
    drawn = generator(seed, "faults").permutation(num_clients)[: faults.clients].tolist()
    local = faulty(algorithm.local, FAULTS[faults.kind], drawn)
    prime = None if algorithm.prime is None else algorithm.prime._replace(local=local)
    return algorithm._replace(local=local, prime=prime)


def _problem(config: Config, resolved: Config, run: RunSettings, own: FederatedData | None) -> Problem:
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
        data = _data(config, resolved, run.seed) if own is None else own
        pairs = [_two_classes(examples, positive, dtype, device) for examples in data.clients]
        if own is None and len({sign for _, y in pairs for sign in y.tolist()}) < 2:
            raise UserError(f"positive = {list(positive)} puts every example into one class: name some of the labels.")
        test = None if data.test is None else _two_classes(data.test, positive, dtype, device)
        features, labels = [a for a, _ in pairs], [y for _, y in pairs]
        return Logistic(features, labels, regularizer=regularizer, test=test, held_out=data.held_out)

    def neural(vectorize: Literal["auto", "layers", "vmap", "loop"] = "auto", tile: int | None = None) -> Problem:
        data = _data(config, resolved, run.seed) if own is None else own
        build = _choose(config, resolved, "model", MODELS, given=2)
        with _sizes_from_the_config("model"):
            with torch.device("meta"):  # as large as it will be, without its numbers
                parameters = sum(p.numel() for p in build(data.input_shape, data.num_classes).parameters())
            require_room(f"training a model of {parameters:,} parameters", 12 * parameters * dtype.itemsize,
                         "take a smaller one")  # fmt: skip
            model = build(data.input_shape, data.num_classes)
        reset(model, generator(run.seed, "init"))
        return NeuralProblem(
            model, data.clients, data.test, vectorize=vectorize, dtype=dtype, device=device, tile=tile,
            held_out=data.held_out,
        )  # fmt: skip

    table: Table = {"neural": neural, "logistic": logistic, "quadratic": quadratic}
    problem: Problem = _choose(config, resolved, "problem", table)()
    return problem


def _data(config: Config, resolved: Config, seed: int) -> FederatedData:
    given = config.get("data", {})
    asked = DataSettings(**check("[data]", {k: v for k, v in given.items() if k in DATA_SETTINGS}, DataSettings))
    source = built_in_name(asked.source)
    if source not in BUILT_IN and os.path.isdir(source):
        for key in given:
            if key in DATA_SETTINGS and key not in ("source", "classes"):
                raise UserError(f"[data] {key} is for data that are dealt out, but in the folder {source} each file is "
                                f"a client: leave {key} out.")  # fmt: skip
        settings = {k: v for k, v in given.items() if k not in ("source", "classes")}
        check("[data] from a folder, one file per client,", settings, lambda: None, beside=("source", "classes"))
        resolved["data"] = {"source": source, "classes": asked.classes}
        return read_folder(source, asked.classes)
    held = _held(source)
    partition = ("iid" if held.client_ids is None else "by_ids") if asked.partition is None else asked.partition
    known("partition", partition, PARTITIONS)
    if held.client_ids is not None:
        _require_own_data(partition, asked, private="privacy" in config)
    if asked.pool:
        held = _pooled(held, partition)
    fraction = _test_fraction(held, asked)
    settings = {k: v for k, v in given.items() if k not in DATA_SETTINGS}
    deal = Call(PARTITIONS[partition], check(f"[data] {partition}", settings, PARTITIONS[partition], 3, DATA_SETTINGS))
    asked = replace(asked, source=source, partition=partition, test_fraction=fraction)
    resolved["data"] = {**asdict(asked), **deal.arguments}
    return _dealt(held, deal, asked, seed)


class Held(NamedTuple):
    """What a source holds, before it is dealt out; images become floats when they are taken."""

    train: Takeable
    test: Takeable | None
    client_ids: np.ndarray | None


def _held(source: str) -> Held:
    if source == "digits":
        return Held(digits(), None, None)
    if source in IMAGE_SETS:
        return Held(*open_images(IMAGE_SETS[source]), None)
    if not Path(source).suffix and not os.path.exists(source):
        near = difflib.get_close_matches(source.replace("-", "_"), BUILT_IN, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "check the path."
        raise UserError(f"there is no data set, file or folder '{source}'; {hint}")
    return Held(*read_npz(source))


def _require_own_data(partition: str, asked: DataSettings, private: bool) -> None:
    """Where the data name their clients, what one of them has may not decide what another trains on."""
    if partition == "by_ids":
        if asked.examples is not None:
            raise UserError(
                "[data] examples draws from all clients' examples together, so that one client's would decide what the "
                "others train on: leave it out where the data name their clients."
            )
    elif private:
        raise UserError(
            f"{asked.source} names a client for each example, but partition = '{partition}' deals the examples out to "
            "clients that are made up: ε would be for these and not for those who own the data. Take partition = "
            "'by_ids', or, if the examples have no owners, a file without the key 'client'."
        )


def _pooled(held: Held, partition: str) -> Held:
    if held.test is None:
        return held
    if partition == "by_ids":
        raise UserError("pool = true puts the test set among the clients' data, but no client owns it: leave pool out, "
                        "or choose another partition than by_ids.")  # fmt: skip
    return Held(held.train.joined(held.test), None, None)


def _test_fraction(held: Held, asked: DataSettings) -> float:
    if held.test is not None and asked.test_fraction:
        raise UserError(f"{asked.source} brings its own test set: leave test_fraction out, or set pool = true to put "
                        "both sets together first.")  # fmt: skip
    default = 0.0 if held.test is not None else 0.1 if asked.pool else 0.2
    return default if asked.test_fraction is None else asked.test_fraction


def _dealt(held: Held, deal: Call, asked: DataSettings, seed: int) -> FederatedData:
    """Sets a test set aside and deals the rest out to the clients. Clients that the data name keep their names and
    their own examples, and what is tested with, unless it came with the data, is held out of each client's own."""
    fraction = asked.test_fraction or 0.0
    if deal.build is _deal_by_ids:
        own, ids = deal(held.train.y, held.client_ids, generator(seed, "partition")), held.client_ids
        pairs = [hold_out(part, fraction, generator(seed, "split", i)) for i, part in enumerate(own)]
        parts, aside = [kept for kept, _ in pairs], np.concatenate([out for _, out in pairs])
        names = None if ids is None else [str(name) for name in np.unique(ids)]
    else:
        kept, aside = split(len(held.train), fraction, generator(seed, "split"))
        kept = _drawn("examples", kept, asked.examples, seed)
        parts = [kept[part] for part in deal(held.train.y[kept], None, generator(seed, "partition"))]
        names = None
    test = _test_set(held, aside, asked, seed)
    return federate(held.train, test, parts, names, asked.classes, held_out=names is not None and len(aside) > 0)


def _test_set(held: Held, aside: np.ndarray, asked: DataSettings, seed: int) -> Examples | None:
    whole = held.test if held.test is not None else held.train if len(aside) else None
    if whole is None:
        if asked.test_examples is not None:
            raise UserError("test_examples needs a test set: set test_fraction above 0 or leave test_examples out.")
        return None
    index = aside if held.test is None else np.arange(len(held.test))
    return whole.take(_drawn("test_examples", index, asked.test_examples, seed))


def _drawn(what: str, index: np.ndarray, count: int | None, seed: int) -> np.ndarray:
    """So many of these, drawn without regard to anything; all of them, untouched, where no number is asked for."""
    if count is None:
        return index
    if not 1 <= count <= len(index):
        raise UserError(f"[data] {what} must be from 1 to {len(index)}, as many as there are, not {count}.")
    return index[generator(seed, what).permutation(len(index))[:count]]


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
