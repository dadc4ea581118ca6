"""Builds the objects of a run from a config: problem, algorithm, participation, noise."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from fednormec.algorithms.faults import FAULTS, Faults, faulty
from fednormec.algorithms.methods import METHODS
from fednormec.algorithms.optimizers import OPTIMIZERS, ema, scheduled, tail
from fednormec.algorithms.scaling import scaled
from fednormec.config.datasets import Loaded, federated_data
from fednormec.config.own import SECONDS, Loading, check_digests, is_own, require_agreed, within
from fednormec.config.schema import Call, Config, Section, check, choose
from fednormec.config.settings import (
    DEFAULT_NAMES,
    MODEL_SETTINGS,
    PYTHON,
    SECTIONS,
    SERVER_SETTINGS,
    GivenConstants,
    ModelSettings,
    RunSettings,
    ServerSettings,
)
from fednormec.config.usual import with_usual
from fednormec.core.algorithm import Algorithm, ServerOptimizer
from fednormec.core.local import LocalUpdate, gd, ig, sgd
from fednormec.core.participation import Participation, fixed_size, full, poisson
from fednormec.core.problem import Problem
from fednormec.core.randomness import generator
from fednormec.core.records import dp_sgd
from fednormec.core.schedules import schedule
from fednormec.data import (
    Examples,
    FederatedData,
    Kind,
)
from fednormec.data.features import FEATURES, Extractor, require_numbers, with_features
from fednormec.data.names import CLASS_NAMES
from fednormec.data.sources import Shapes
from fednormec.engine.planning import evaluation_interval
from fednormec.errors import UserError, known, require_room
from fednormec.privacy.asked import Privacy
from fednormec.problems.adapters import add_adapters
from fednormec.problems.logistic import Logistic
from fednormec.problems.losses import loss_named
from fednormec.problems.models import MODELS, TOKEN_MODELS, reset
from fednormec.problems.neural import NeuralProblem
from fednormec.problems.quadratic import Quadratic, random_quadratic

Table = Mapping[str, Callable[..., Any]]
LOCALS: Table = {"gd": gd, "ig": ig, "sgd": sgd, "dp_sgd": dp_sgd}
PARTICIPATIONS: Table = {"full": full, "poisson": poisson, "fixed_size": fixed_size}


class Experiment(NamedTuple):
    """Objects that a run needs.

    Attributes:
        run: settings of [run].
        config: the config with every default spelled out.
        unused: sections of the config that the run did without.
        data: digest of the data, where code of the user's loaded them.
        x0: where to start; None: where the problem does.
        shapes: shapes of what the model takes and puts out; None if there is no model but a vector.
    """

    problem: Problem
    algorithm: Algorithm
    participation: Participation
    privacy: Privacy | None
    run: RunSettings
    config: Config
    unused: tuple[str, ...]
    data: str | None = None
    x0: torch.Tensor | None = None
    shapes: Shapes | None = None


class Rules(NamedTuple):
    """Part of a config that needs no problem: the method, who takes part, what is kept private, for how long."""

    algorithm: Algorithm
    participation: Participation
    privacy: Privacy | None
    run: RunSettings
    config: Config


def assemble(config: Config, data: FederatedData | None = None, folder: Path = Path()) -> Experiment:
    """Checks the whole config and builds what it describes; nothing is written.

    Args:
        config: the sections of the config.
        data: data of one party among others who have theirs elsewhere, in place of what [data] says.
        folder: what files of the user's own code are relative to.
    """
    config = with_usual(config)
    algorithm, participation, privacy, run, resolved = rules(config)
    load, loaded, seen = Loading(folder), list[Loaded](), list[FederatedData]()

    def from_settings() -> FederatedData:
        if data is None:
            loaded.append(federated_data(config, resolved, run.seed, load))
        found = loaded[0].data if data is None else data
        seen.append(found)
        if "features" in config:
            seen.append(with_features(found, extractor_of(config, resolved, load)))
        require_numbers(seen[-1].kind)
        return seen[-1]

    table = problems(config, resolved, run, from_settings, load)
    problem: Problem = _choose(config, resolved, "problem", table)()
    if load.files:
        resolved["code"] = dict(load.files)
    if "code" in config:
        require_agreed(load.files, check_digests(config["code"]))
    for name, size in {"clients": problem.num_clients, "dim": problem.dim}.items():
        given = resolved.get("constants", {}).get(name)
        if given not in (None, size):
            raise UserError(f"constants.{name} = {given}, but the problem has {size}: leave it out.")
    if "faults" in config:
        resolved["faults"] = check("[faults]", config["faults"], Faults)
        algorithm = _with_faults(algorithm, Faults(**resolved["faults"]), problem.num_clients, run.seed)
    in_order = {name: resolved[name] for name in SECTIONS if name in resolved}
    unused = tuple(name for name in config if name not in resolved)
    digest = loaded[0].digest if loaded else None
    shapes = _shapes(resolved, *seen) if seen else None
    return Experiment(
        problem, algorithm, participation, privacy, run, in_order, unused, digest, shapes=shapes
    )  # fmt: skip


def _shapes(resolved: Config, examples: FederatedData, inputs: FederatedData | None = None) -> Shapes:
    """Returns the shapes of what a model takes and puts out; `inputs` are what [features] made of the examples."""
    about, data = resolved.get("data", {}), inputs or examples
    own: Sequence[Any] | None = about.get("labels")
    names = CLASS_NAMES.get(str(about.get("source")), ()) if own is None else tuple(map(str, own))
    if resolved["problem"]["name"] == "logistic":
        found = Shapes(data.input_shape, data.target_shape, 1, data.kind)
    else:
        found = data.shapes._replace(classes=names if len(names) == data.outputs else None)
    return found if inputs is None else found._replace(before=(examples.input_shape, examples.kind.inputs))


def rules(config: Config) -> Rules:
    """Checks and builds everything but the problem, for questions that can be answered without one."""
    if PYTHON in config:
        raise UserError("[python] says that problem and method came from Python, which no config can give: train them "
                        "there (fn.train), or go on there with fn.resume(folder, problem, algorithm).")  # fmt: skip
    resolved: Config = {}
    resolved["run"] = check("[run]", config.get("run", {}), RunSettings)
    run = RunSettings(**resolved["run"])
    algorithm = _algorithm(config, resolved, run)
    participation = _choose(config, resolved, "participation", PARTICIPATIONS)()
    _require_full_where_named(resolved)
    privacy = None
    if "privacy" in config:
        privacy = Privacy(**check("[privacy]", config["privacy"], Privacy))
        resolved["privacy"] = asdict(privacy)  # the protocol decides some
    if "constants" in config:
        resolved["constants"] = check("[constants]", config["constants"], GivenConstants)
        GivenConstants(**resolved["constants"])
    return Rules(algorithm, participation, privacy, run, resolved)


def evaluate_every(experiment: Experiment) -> int:
    """Returns the number of rounds between evaluations: as asked, or as the engine's rule says."""
    problem, algorithm, participation, privacy, run, *_ = experiment
    if run.evaluate_every is not None:
        return run.evaluate_every
    return evaluation_interval(problem, algorithm, participation, run.rounds, privacy is not None)


def _choose(config: Config, resolved: Config, section: str, table: Table, given: int = 0) -> Call:
    settings = config.get(section, {})
    call = choose(section, settings, table, given)
    resolved[section] = {"name": settings.get("name", DEFAULT_NAMES[section]), **call.arguments}
    return call


def _algorithm(config: Config, resolved: Config, run: RunSettings) -> Algorithm:
    name = str(config.get("method", {}).get("name", DEFAULT_NAMES["method"]))
    known("method", name, METHODS)
    takes_local = METHODS[name].takes_local
    table: Table = {key: method.build for key, method in METHODS.items()}
    method = _choose(config, resolved, "method", table, given=1 if takes_local else 0)
    optimizer, asked = _server(config, resolved)
    algorithm: Algorithm
    if takes_local:
        local: LocalUpdate = _choose(config, resolved, "local", LOCALS)()
        falls = asked.local_schedule != "constant"
        algorithm = method(local.scheduled(schedule(asked.local_schedule, run.rounds)) if falls else local)
    elif asked.local_schedule != "constant":
        raise UserError(f"{name} takes gradients and no local steps: leave server.local_schedule out.")
    else:
        algorithm = method()
    if asked.beta_schedule != "constant":
        if algorithm.with_beta is None:
            raise UserError(f"{name} has no beta to move: leave server.beta_schedule out.")
        algorithm = algorithm.with_beta(schedule(asked.beta_schedule, run.rounds))
    if asked.scaling:
        algorithm = scaled(algorithm)
    return algorithm.with_optimizer(_wrapped(optimizer, asked, run.rounds))


def _server(config: Config, resolved: Config) -> tuple[ServerOptimizer, ServerSettings]:
    """Returns the optimiser that [server] names, and the settings beside its own."""
    given = config.get("server", {})
    own, beside = ({key: given[key] for key in given if (key in SERVER_SETTINGS) is shared} for shared in (False, True))
    asked = ServerSettings(**check("[server]", beside, ServerSettings))
    table: Table = {name: optimizer.build for name, optimizer in OPTIMIZERS.items()}
    optimizer: ServerOptimizer = _choose({"server": own}, resolved, "server", table)()
    resolved["server"] |= asdict(asked)
    return optimizer, asked


def _wrapped(optimizer: ServerOptimizer, asked: ServerSettings, rounds: int) -> ServerOptimizer:
    """Returns the optimiser with the schedule and the average that [server] asks for."""
    if asked.schedule != "constant" or asked.warmup:
        optimizer = scheduled(optimizer, schedule(asked.schedule, rounds, asked.warmup))
    if asked.average == "ema":
        return ema(optimizer, asked.average_decay)
    return tail(optimizer, rounds - math.ceil(asked.average_share * rounds)) if asked.average == "tail" else optimizer


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


def problems(
    config: Config, resolved: Config, run: RunSettings, data: Callable[[], FederatedData], load: Loading
) -> Table:
    """Returns the constructors that [problem] can name, for this config.

    Args:
        config: the sections of the config.
        resolved: what was resolved before.
        run: settings of [run].
        data: returns the clients' data.
        load: loads code of the user's.
    """
    dtype, device = getattr(torch, run.dtype), _device(run.device)

    def quadratic(
        clients: int = 20, dim: int = 20, parts: int = 1, heterogeneity: float = 1.0, condition: float = 10.0
    ) -> Problem:
        """Random quadratic losses, of which the theory knows every constant. [data] and [model] have no use.

        Args:
            clients: number of clients.
            dim: number of parameters.
            parts: number of components of each client's loss.
            heterogeneity: how far clients' minimisers and curvatures lie apart; 0: all clients have the same loss.
            condition: largest condition number of a curvature, at least 1.
        """
        with _sizes_from_the_config("problem"):
            problem = random_quadratic(
                clients, dim, parts=parts, heterogeneity=heterogeneity, condition=condition, seed=run.seed, dtype=dtype
            )
        return Quadratic(problem.curvatures.to(device), problem.minimisers.to(device))

    def logistic(regularizer: float = 0.0, positive: Sequence[int] = (1,), per_client: bool = False) -> Problem:
        """Logistic regression between two classes of the data, with a non-convex regulariser. [model] has no use.

        Args:
            regularizer: weight of the regulariser, the sum of w^2/(1 + w^2) over all coordinates; zero or positive.
            positive: labels of the positive class; all others are the negative one.
            per_client: whether to say how the accuracy is spread over the clients, on each one's own examples (those
                held out of them, where the data name their clients): not private, and it takes time.
        """
        all_data = data()
        pairs = [_two_classes(examples, positive, dtype, device) for examples in all_data.clients]
        if len(pairs) > 1 and len({sign for _, y in pairs for sign in y.tolist()}) < 2:
            raise UserError(f"positive = {list(positive)} puts every example into one class: name some of the labels.")
        test = None if all_data.test is None else _two_classes(all_data.test, positive, dtype, device)
        features, labels = [a for a, _ in pairs], [y for _, y in pairs]
        return Logistic(
            features, labels, regularizer=regularizer, test=test, held_out=all_data.held_out, per_client=per_client,
            owners=all_data.owners, persons=all_data.persons,
        )  # fmt: skip

    def neural(
        loss: str = "cross_entropy",
        metrics: Sequence[str] | None = None,
        vectorize: Literal["auto", "layers", "vmap", "loop"] = "auto",
        tile: int | None = None,
        statistics: Literal["batch", "training"] = "batch",
        loss_examples: int | None = None,
        per_client: bool = False,
    ) -> Problem:
        """Neural network: the model that [model] names, on the data.

        Args:
            loss: what is minimised: "cross_entropy", "binary_cross_entropy", "mse", "huber", or a function of your own,
                file.py:function, of outputs and targets, that returns the loss of each example.
            metrics: what is measured on the test set: "accuracy", "auc", "mae", "rmse", "top5", or functions of your
                own, file.py:function; None: what fits the loss.
            vectorize: how the gradients of several clients are computed: in one pass over all their examples
                ("layers"), in one vectorised call ("vmap"), one client after another ("loop"), or the first of these
                that fits ("auto").
            tile: number of clients that are computed at once; None: by the sizes of model and data.
            statistics: by what batch normalisation normalises in an evaluation: the statistics of the "batch" at hand,
                or those of the clients' "training" examples, which makes all figures not private.
            loss_examples: number of examples of each client, the first it has, that an evaluation looks at; None: all.
            per_client: whether to say how the first metric (or the loss) is spread over the clients, on each one's own
                examples (those held out of them, where the data name their clients): not private, and it takes time.
        """
        losses = load(loss, "problem.loss") if is_own(loss) else loss_named(loss)
        named = None if metrics is None else [load(m, "problem.metrics") if is_own(m) else m for m in metrics]
        all_data = data()
        model = model_of(config, resolved, all_data.shapes, run.seed, dtype, load)
        if all_data.kind.inputs == "tokens" and "vocabulary" in resolved["model"]:
            _require_vocabulary(all_data, resolved["model"]["vocabulary"] or all_data.outputs)
        with within("the model", SECONDS):
            return NeuralProblem(
                model, all_data.clients, all_data.test, losses, metrics=named, vectorize=vectorize, dtype=dtype,
                device=device, tile=tile, held_out=all_data.held_out, statistics=statistics,
                loss_examples=loss_examples, per_client=per_client, owners=all_data.owners,
                batch_size=resolved.get("local", {}).get("batch_size"), persons=all_data.persons,
            )  # fmt: skip

    return {"neural": neural, "logistic": logistic, "quadratic": quadratic}


def model_of(
    config: Config, resolved: Config, shapes: Shapes, seed: int, dtype: torch.dtype, load: Loading
) -> nn.Module:
    """Builds the model: ours begins with numbers drawn from the seed, the user's with those it was given.

    Args:
        config: the sections of the config.
        resolved: gets [model] with every default spelled out.
        shapes: what the model takes and puts out.
        seed: seed of its first numbers.
        dtype: type of numbers that it will be trained in.
        load: loads code of the user's.
    """
    if shapes.kind.targets == "classes" and shapes.outputs < 2:
        raise UserError(f"there must be at least 2 classes, got {shapes.outputs}: check the labels of the data.")
    given = config.get("model", {})
    of_all = check("[model]", {key: value for key, value in given.items() if key in MODEL_SETTINGS}, ModelSettings)
    asked = ModelSettings(**of_all)
    own = {key: value for key, value in given.items() if key not in MODEL_SETTINGS}
    model = _built(own, resolved, shapes, seed, dtype, load)
    _choose_trained(model, asked, seed)
    resolved["model"] |= {key: value for key, value in of_all.items() if value is not None}
    return model


def _built(
    settings: Section, resolved: Config, shapes: Shapes, seed: int, dtype: torch.dtype, load: Loading
) -> nn.Module:
    if is_own(settings.get("name")):
        name = settings["name"]
        code = load(name, "model.name")
        own = {key: value for key, value in settings.items() if key != "name"}
        arguments = check(f"[model] {name}", own, code.function, given=2, beside=("name", *MODEL_SETTINGS))
        resolved["model"] = {"name": name, **arguments}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(generator(seed, "init").integers(2**63)))
            made = code.once(SECONDS, shapes.inputs, shapes.outputs, **arguments)
        if not isinstance(made, nn.Module):
            raise UserError(f"model.name: {name} must return a torch.nn.Module, not {type(made).__name__}.")
        return made
    build = _choose({"model": settings}, resolved, "model", _models_for(shapes.kind, settings), given=2)
    with _sizes_from_the_config("model"):
        with torch.device("meta"):  # as large as it will be, without its numbers
            parameters = sum(p.numel() for p in build(shapes.inputs, shapes.outputs).parameters())
        require_room(f"training a model of {parameters:,} parameters", 12 * parameters * dtype.itemsize,
                     "take a smaller one")  # fmt: skip
        model: nn.Module = build(shapes.inputs, shapes.outputs)
    reset(model, generator(seed, "init"))
    return model


def _choose_trained(model: nn.Module, settings: ModelSettings, seed: int) -> None:
    """Freezes what is not to be trained, and adds the adapters that are."""
    rank, layers, alpha = settings.lora_rank, settings.lora_layers, settings.lora_alpha
    if settings.trainable is not None or rank is not None:
        _freeze_but(model, settings.trainable or ())
    if rank is not None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        add_adapters(model, rank, layers, alpha, seed)
        for parameter in trained:
            parameter.requires_grad_()


def _freeze_but(model: nn.Module, trainable: Sequence[str]) -> None:
    """Leaves those parameters to be trained whose names fit one of the patterns."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in trainable:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise UserError(f"[model] trainable: no parameter's name fits '{pattern}'; there are: {some}.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trainable))


def extractor_of(config: Config, resolved: Config, load: Loading) -> Extractor:
    """Returns what computes the features that [features] names: one of ours, or a function of the user's own."""
    settings = config["features"]
    name = str(settings.get("name"))
    if not is_own(name):
        call = choose("features", settings, FEATURES)
        resolved["features"] = {"name": name, **call.arguments}
        found: Extractor = call()
        return found
    code = load(name, "features.name")
    own = {key: value for key, value in settings.items() if key != "name"}
    arguments = check(f"[features] {name}", own, code.function, given=1, beside=("name",))
    resolved["features"] = {"name": name, **arguments}
    key = repr((sorted(code.files.items()), sorted(arguments.items())))
    return Extractor(code.__name__, key, lambda: partial(code.once, SECONDS, **arguments))


def _models_for(kind: Kind, settings: Section) -> Table:
    """Returns the models that take such data; raises UserError if the config names one that takes others."""
    models, others = (TOKEN_MODELS, MODELS) if kind.inputs == "tokens" else (MODELS, TOKEN_MODELS)
    name = settings.get("name", DEFAULT_NAMES["model"])
    if name in others:
        raise UserError(f"the model {name} does not take {kind.inputs} (data.inputs): take {_or(models)}, or one "
                        "of your own.")  # fmt: skip
    return models


def _require_vocabulary(data: FederatedData, vocabulary: int) -> None:
    pairs = data.clients if data.test is None else (*data.clients, data.test)
    top = max(int(examples.x.max()) for examples in pairs)
    if top >= vocabulary:
        raise UserError(f"[model] vocabulary = {vocabulary}, but the data have tokens up to {top}: set it to "
                        f"{top + 1} or more.")  # fmt: skip


def _or(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"


def _two_classes(
    examples: Examples, positive: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns flat features, and labels: +1 for the classes in `positive`, -1 for all others."""
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
    """Raises UserError in place of the errors of numpy and torch for a size beyond the memory, or beyond any array."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"[{section}] cannot be made in the sizes asked for: {reason}.") from error
