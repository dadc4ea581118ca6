"""Sections of a config that set values rather than name a constructor, and the configs in the package."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from fednormec.core.schedules import Shape
from fednormec.errors import UserError, at_least_one, non_negative, positive

Keep = Literal["last", "average", "best"]
QUICKSTART = Path(__file__).with_name("quickstart.toml")
THEORY = Path(__file__).with_name("theory.toml")
PURPOSES = {
    "problem": "what is minimised: the clients' losses",
    "data": "where the examples come from, and which client has which",
    "features": "a public net whose features replace the inputs",
    "model": "the model that the problem neural trains",
    "local": "how a client computes its update",
    "method": "what clients send, and what the server makes of it",
    "server": "the server's optimiser, schedules, an average of models",
    "participation": "who takes part in a round",
    "privacy": "noise and its accounting; without it nothing is protected",
    "constants": "constants for the theory, each in place of the computed one",
    "faults": "clients that break on purpose, in simulations",
    "federation": "who takes part where clients are other people's machines",
    "run": "how long, from which seed, on what machine",
    "code": "digests of the files of your own code, written by the program",
    "python": "what a run from Python began with, written by the program",
}
PYTHON = "python"  # the section of a run whose problem and method are values of a program, which no config can give
MADE_BY = "made_by"  # its setting that names the function that made the problem
SECTIONS = tuple(PURPOSES)
SWEEP = "lists of values, SECTION.KEY = [...], for fednormec sweep"
DEFAULT_NAMES = {"problem": "neural", "model": "mlp", "local": "gd", "method": "fed_normec", "participation": "full",
                 "server": "sgd"}  # fmt: skip


@dataclass(frozen=True)
class DataSettings:
    """Settings of [data]; the partition's own settings stand beside them.

    Attributes:
        source: where the examples come from: a built-in set (digits, cifar10, fashion_mnist), a file, a folder, or a
            function of your own, file.py:function.
        partition: how the examples are dealt out to clients; None: by_ids where the data name their clients, else iid.
        pool: whether a source's training and test set are put together before `test_fraction` is set aside.
        test_fraction: fraction set aside for the test: of all examples together or, where the data name their clients,
            of each client's own. None: 0 if the source brings a test set, else 0.2, and 0.1 with `pool`.
        examples: number of examples that are drawn of what there is then to train on; None: all.
        test_examples: number of examples that are drawn of what there is then to test with; None: all.
        classes: number of classes, which is public; if left out, the largest label says it.
        inputs: kind of what is in x: "numbers"; "tokens", whole numbers that name something, such as words; or "texts",
            of which [features] makes numbers.
        targets: kind of what is in y: "classes" or "values"; by default what the loss compares with.
        test: public test set of a table or a folder of images, in the same form.
    """

    source: str = "digits"
    partition: str | None = None
    pool: bool = False
    test_fraction: float | None = None
    examples: int | None = None
    test_examples: int | None = None
    classes: int | None = None
    inputs: Literal["numbers", "tokens", "texts"] = "numbers"
    targets: Literal["classes", "values"] | None = None
    test: str | None = None


@dataclass(frozen=True)
class ModelSettings:
    """Settings of [model] that every model has, beside its own.

    Attributes:
        trainable: patterns of the names of parameters that are trained, such as "head.*"; the rest keeps its values and
            is in no message. None: all are trained, with LoRA the adapters alone.
        lora_rank: rank of low-rank adapters (LoRA), which are then trained in place of the layers that they are added
            to; they begin at nothing. Needs the package peft. None: no adapters.
        lora_layers: names of the layers that get an adapter (linear layers, convolutions, embeddings), in full or from
            any dot on: "query" is every layer of that name. None: all linear layers.
        lora_alpha: scale of the adapters, times the rank. None: the rank, which makes the scale 1.
    """

    trainable: Sequence[str] | None = None
    lora_rank: int | None = None
    lora_layers: Sequence[str] | None = None
    lora_alpha: float | None = None

    def __post_init__(self) -> None:
        for name in ("lora_layers", "lora_alpha"):
            if self.lora_rank is None and getattr(self, name) is not None:
                raise UserError(f"[model] {name} is for LoRA, which begins with its rank: set lora_rank, or leave "
                                f"{name} out.")  # fmt: skip
        if self.lora_rank is not None:
            at_least_one("[model] lora_rank", self.lora_rank)
        if self.lora_alpha is not None:
            positive("[model] lora_alpha", self.lora_alpha)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of [server] that every optimiser has, beside its own. None of them costs privacy.

    Attributes:
        schedule: shape of the server's step over the rounds; "cooldown" falls over the last quarter.
        warmup: number of first rounds over which the server's step grows from 0.
        local_schedule: shape of the local step over the rounds.
        beta_schedule: shape of beta over the rounds, for methods with error feedback or centred feedback.
        scaling: whether clients scale coordinates by public second moments before the bound and the server scales back
            after the noise, for averaging methods.
        average: which average of the models is kept and evaluated beside them: none, an exponential one ("ema"), or the
            plain one of the last rounds ("tail").
        average_decay: share of the average so far that "ema" keeps per round.
        average_share: share of the rounds, the last ones, that "tail" averages.
    """

    schedule: Shape = "constant"
    warmup: int = 0
    local_schedule: Shape = "constant"
    beta_schedule: Shape = "constant"
    scaling: bool = False
    average: Literal["none", "ema", "tail"] = "none"
    average_decay: float = 0.95
    average_share: float = 0.25

    def __post_init__(self) -> None:
        non_negative("[server] warmup", self.warmup)
        if not 0 <= self.average_decay < 1:
            raise UserError(f"[server] average_decay must lie in [0, 1), not {self.average_decay}.")
        if not 0 < self.average_share <= 1:
            raise UserError(f"[server] average_share must lie in (0, 1], not {self.average_share}.")


@dataclass(frozen=True)
class RunSettings:
    """Settings of [run]: how long, from which seed, on what.

    Attributes:
        rounds: number of rounds.
        seed: seed of all randomness but secure noise.
        evaluate_every: number of rounds between evaluations of the model; None: 20 to 39 evaluations, fewer if
            they would take more than about 5 % of the time, but at least five.
        dtype: type of all numbers that are computed with.
        device: where to compute, as torch calls it, such as cpu or cuda.
        workers: number of threads; None: one per core.
        chunk_size: number of clients that a thread takes at a time; None: one tile.
        memories: where the clients' memories are stored: in memory, or in a file of the run folder, for more of them
            than the machine has memory for.
        checkpoint_rounds: number of rounds after which a checkpoint is written. By default, with secure randomness,
            that is every round, since a round that must be drawn again is one more release.
        checkpoint_seconds: a checkpoint is also written when this time has passed since the last (inf: never for that
            reason).
        keep_checkpoint: whether the last checkpoint stays when the run has finished. It holds the clients' memories.
        keep: which model is stored: that after the "last" round, the "average" that [server] keeps, or the "best" of
            all that were evaluated, by the first figure on the test set, averages included.
    """

    rounds: int = 100
    seed: int = 0
    evaluate_every: int | None = None
    dtype: Literal["float32", "float64"] = "float32"
    device: str = "cpu"
    workers: int | None = None
    chunk_size: int | None = None
    memories: Literal["ram", "file"] = "ram"
    checkpoint_rounds: int | None = None
    checkpoint_seconds: float = 30.0
    keep_checkpoint: bool = False
    keep: Keep = "last"

    def __post_init__(self) -> None:
        if self.checkpoint_rounds is not None:
            at_least_one("checkpoint_rounds", self.checkpoint_rounds)
        if not self.checkpoint_seconds >= 0:
            raise UserError(f"checkpoint_seconds must be zero or more, not {self.checkpoint_seconds}.")


DATA_SETTINGS = tuple(field.name for field in fields(DataSettings))
MODEL_SETTINGS = tuple(field.name for field in fields(ModelSettings))
SERVER_SETTINGS = tuple(field.name for field in fields(ServerSettings))
BESIDE: dict[str, type] = {"model": ModelSettings, "server": ServerSettings}  # beside those of what a section names
DEALING = ("clients", "concentration", "shards_per_client")  # settings of partitions, beside those of [data]


@dataclass(frozen=True)
class GivenConstants:
    """Constants that a config gives, each in place of the computed one. They hold near the start x^0.

    Attributes:
        smoothness: L, of every component f_{i,j} (with full local gradients: of every f_i).
        gap: f(x^0) - f^inf.
        gradient_norm: ||grad f(x^0)||, what a guarantee must be below to say anything; too large is not safe.
        client_norm: max_i ||grad f_i(x^0)||.
        clients: number of clients M; too many would not be safe.
        dim: number of parameters d.
        heterogeneity: f^inf - mean_i f_i^inf; matters with several local steps.
        component_norm: max_i mean_j ||grad f_{i,j}(x^0)||; matters with incremental gradients only.
        component_heterogeneity: f^inf - mean_i mean_j f_{i,j}^inf; matters with incremental gradients only.
    """

    smoothness: float | None = None
    gap: float | None = None
    gradient_norm: float | None = None
    client_norm: float | None = None
    clients: int | None = None
    dim: int | None = None
    heterogeneity: float | None = None
    component_norm: float | None = None
    component_heterogeneity: float | None = None

    def __post_init__(self) -> None:
        check_constants(self)

    @property
    def known(self) -> dict[str, Any]:
        """Constants that are given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def check_constants(constants: Any) -> None:
    """Raises UserError if a constant that is given (not None) is out of range, or two contradict each other."""
    checks: dict[Callable[..., float], tuple[str, ...]] = {
        positive: ("smoothness", "client_norm"),
        non_negative: ("gap", "gradient_norm", "heterogeneity", "component_norm", "component_heterogeneity"),
        at_least_one: ("clients", "dim"),
    }
    for check, names in checks.items():
        for name in names:
            value = getattr(constants, name)
            if value is not None:
                check(f"constants.{name}", value)
                if value > 1e100 or (check is positive and value < 1e-100):
                    raise UserError(f"constants.{name} must lie between 1e-100 and 1e100, not {value:g}: rescale.")
    mean, largest = constants.gradient_norm, constants.client_norm
    if mean is not None and largest is not None and mean > largest * (1 + 1e-6):
        raise UserError(
            f"constants.gradient_norm is the norm of a mean of gradients and cannot be larger than client_norm, the "
            f"largest of their norms, but {mean:g} > {largest:g}."
        )
