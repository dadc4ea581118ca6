"""Agreement of a federation before it begins: federation.toml, of which every party has a copy."""

import hashlib
import ipaddress
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fednormec.config.assemble import Experiment, assemble
from fednormec.config.forms import KEYS as OF_FORMS
from fednormec.config.forms import read_agreed
from fednormec.config.schema import Config, Section, check, dump, read
from fednormec.config.settings import DATA_SETTINGS, DEALING, RunSettings
from fednormec.core.algorithm import Algorithm
from fednormec.core.bounds import Bound
from fednormec.core.problem import ByClient, Metrics, Problem
from fednormec.core.randomness import generator
from fednormec.core.records import Grouped, Recorded, apart_from_data, bounded_sum, examples_of, record_sizes
from fednormec.data import Examples, FederatedData, Kind, hold_out
from fednormec.data.sources import Inputs
from fednormec.engine.planning import planned, with_record_noise
from fednormec.errors import UserError, at_least_one, known, positive, require_room
from fednormec.privacy.mechanism import Mechanism
from fednormec.privacy.records import AnyPlan, RecordPlan, for_clients, for_records

NAME, KEYS = "federation.toml", "keys"
AGREED = ("data", "features", "problem", "model", "local", "method", "server", "participation", "privacy", "code")
AGREED_OF_RUN = ("rounds", "seed", "dtype")
HELD_OUT = 0.2
PART = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = rf"(?=.{{1,253}}$){PART}(\.{PART})*\.?"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
Reports = Callable[[Tensor, str], list[float]]  # clients' figures of a model, by the figure's name


@dataclass(frozen=True)
class FederationSettings:
    """Settings of [federation]: who takes part, and what nobody can tell from data that are not here.

    Attributes:
        clients: their names; the order numbers them.
        inputs: the shape of one example; none for a text.
        classes: number of classes; left out where targets are values.
        targets: the shape of one example's target; none for one class or value.
        tokens: whether inputs are whole numbers that name something, such as words.
        texts: whether inputs are texts, of which [features] makes numbers where they are.
        address: where the server is found, host:port.
        deadline: seconds after which a client that has not answered does not take part in a round.
        test: a .npz with x and y, or a table, beside this file, public, for the server to evaluate with.
        report: whether each client tells the server, when the model is evaluated, how good it is on examples of the
            client's own that it holds out. These figures are exact, and no ε covers them.
        held_out: share of its examples that a client holds out, and never trains on, where it reports; None: 0.2.
        keys: public keys of the clients, in their order, where messages leave them in secure aggregation only: each
            knows by them whose masks and signatures it sees. `fednormec federation` writes them.
    """

    clients: Sequence[str]
    inputs: Sequence[int]
    classes: int | None = None
    targets: Sequence[int] = ()
    tokens: bool = False
    texts: bool = False
    address: str = "localhost:9443"
    deadline: float = 600.0
    test: str | None = None
    report: bool = False
    held_out: float | None = None
    keys: Sequence[str] = ()

    def __post_init__(self) -> None:
        require_names(self.clients)
        if self.classes is not None:
            at_least_one("[federation] classes", self.classes)
        for name, shape in (("inputs", self.inputs), ("targets", self.targets)):
            for length in shape:
                at_least_one(f"[federation] {name}", length)
            require_room("one example", 8 * math.prod(shape), f"check [federation] {name}")
        if self.texts and (self.tokens or self.inputs):
            raise UserError("[federation] texts = true says all about inputs: leave tokens out, and let inputs = [].")
        positive("[federation] deadline", self.deadline)
        split_address(self.address)
        if self.held_out is not None and not self.report:
            raise UserError("[federation] held_out is for clients that report: set report = true, or leave it out.")
        if not 0 < self.share < 1:
            raise UserError(f"[federation] held_out must be above 0 and below 1, not {self.share:g}.")

    @property
    def share(self) -> float:
        """Share of its examples that a client which reports holds out."""
        return HELD_OUT if self.held_out is None else self.held_out

    @property
    def kind(self) -> Kind:
        """Kind of what examples are made of."""
        inputs: Inputs = "texts" if self.texts else "tokens" if self.tokens else "numbers"
        return Kind(inputs, "values" if self.classes is None else "classes")

    @property
    def nobody(self) -> Examples:
        """One example that is nobody's, in the shape that all have."""
        x = np.array([""], object) if self.texts else np.zeros((1, *self.inputs))
        return Examples(x, np.zeros((1, *self.targets), np.int64), self.kind)


@dataclass(frozen=True)
class Federation:
    """Federation as one party knows it.

    Attributes:
        settings: settings of [federation].
        experiment: the experiment with the data that this party has.
        agreed: digest of what all must agree on.
        terms: what that is: values by section.key.
        report: computes a client's figure of a model on the examples that it holds out; None: it holds none out.
    """

    settings: FederationSettings
    experiment: Experiment
    agreed: str
    terms: dict[str, Any]
    report: Callable[[Tensor], ByClient] | None = None

    @cached_property
    def plan(self) -> AnyPlan | None:
        """Plan that every party computes for itself: how much noise, for how many rounds; None without privacy.

        Of records each client plans for its own, by their number, and the server knows no more than what all promise.
        """
        problem, algorithm, participation, privacy, run, *_ = self.experiment
        if privacy is None:
            return None
        return planned(problem, algorithm, participation, privacy, run.rounds)

    @property
    def mechanism(self) -> Mechanism | None:
        """Mechanism that protects clients; None where they are not protected by themselves."""
        plan = for_clients(self.plan)
        return None if plan is None else plan.mechanism

    @property
    def records(self) -> RecordPlan | None:
        """Plan that protects records; None where they are not protected by themselves."""
        return for_records(self.plan)

    @cached_property
    def algorithm(self) -> Algorithm:
        """Method as clients run it: local steps with the noise that protects records, messages on a grid."""
        algorithm, mechanism = self.experiment.algorithm, self.mechanism
        if self.plan is not None:
            algorithm = with_record_noise(algorithm, self.plan)
        return algorithm.on_grid(None if mechanism is None else mechanism.grid)


def for_server(config: Config, folder: Path, reports: Reports | None = None) -> Federation:
    """Returns the federation as its server knows it: the test set, no client's data.

    Args:
        config: the sections of federation.toml.
        folder: where it lies.
        reports: asks clients for their figures of a model, where they report; None: nobody is asked.
    """
    settings = federation_settings(config)
    test = None
    if settings.test is not None:
        where = str(folder / settings.test)
        test = read_agreed(where, encoding(config), settings.kind, settings.classes, owned=False)
    data = FederatedData((settings.nobody,), test, ("nobody",), settings.classes)
    return _federation(config, settings, data, None, folder, reports)


def for_client(config: Config, name: str, own: Examples, folder: Path = Path()) -> Federation:
    """Returns the federation as one client knows it: its own data.

    Args:
        config: the sections of federation.toml.
        name: name of the client.
        own: its examples.
        folder: where its copy of federation.toml lies, and code that all agreed on beside it.
    """
    settings = federation_settings(config)
    if name not in settings.clients:
        raise UserError(f"{name} is none of the clients in {NAME}: {', '.join(settings.clients)}.")
    if own.x.shape[1:] != tuple(settings.inputs):
        raise UserError(f"the federation agreed on examples of shape {tuple(settings.inputs)}, these data have "
                        f"{own.x.shape[1:]}.")  # fmt: skip
    if own.y.shape[1:] != tuple(settings.targets):
        raise UserError(f"the federation agreed on targets of shape {tuple(settings.targets)}, these data have "
                        f"{own.y.shape[1:]}.")  # fmt: skip
    client = list(settings.clients).index(name)
    seed = check("[run]", config.get("run", {}), RunSettings)["seed"]
    train, aside = _split(own, settings, seed, client)
    owners = None if aside is None else np.zeros(len(aside), np.int64)
    data = FederatedData((train,), aside, (name,), settings.classes, aside is not None, owners)
    return _federation(config, settings, data, client, folder)


def _split(own: Examples, settings: FederationSettings, seed: int, client: int) -> tuple[Examples, Examples | None]:
    """Returns what a client trains on, and what it holds out to report on: the same whenever it joins."""
    if not settings.report:
        return own, None
    kept, aside = hold_out(np.arange(len(own)), settings.share, generator(seed, "split", client), own.person)
    return own.take(kept), own.take(aside) if len(aside) else None


def read_federation(folder: Path) -> Config:
    """Returns the sections of federation.toml; raises UserError if [federation] is missing."""
    config = read(folder / NAME)
    if "federation" not in config:
        raise UserError(f"{folder / NAME} has no section [federation]; fednormec federation init writes one.")
    return config


def require_names(names: Sequence[str]) -> None:
    """Raises UserError if there is no client, or a name is not allowed or is there twice."""
    if not names:
        raise UserError("a federation needs at least one client.")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise UserError(f"a client's name is letters, digits, '.', '_' and '-', 64 at most, not '{name}'.")
    if len(set(names)) != len(names):
        raise UserError("two clients have the same name.")


def listed(names: Sequence[str], most: int = 10) -> str:
    """Returns the names of clients in a line, of many the first and the last.

    >>> listed(["north", "south"]), listed(["a", "b", "c", "d"], 3)
    ('north, south', 'a, b, … d')
    """
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[: most - 1])}, … {names[-1]}"


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port; raises UserError if it is no address."""
    if "://" in address:
        raise UserError(f"an address is host:port, without a scheme: {address.partition('://')[2] or 'host:9443'}.")
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"an address is host:port, such as fl.example.org:9443, not '{address}'.")
    return require_host(host.removeprefix("[").removesuffix("]")), int(port)


def require_host(host: str) -> str:
    """Returns the name or address of a host; raises UserError if it is none."""
    if not (_is_ip(host) or re.fullmatch(HOST, host)):
        raise UserError(f"'{host}' is no host's name: that takes letters without accents (a name with others in its "
                        "form that begins with xn--), digits, '-', and dots between its parts.")  # fmt: skip
    return host


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def encoding(config: Config) -> Section:
    """Returns how tables and images become numbers, as [data] says; what else it says is not for a federation."""
    found = {key: value for key, value in config.get("data", {}).items() if key in OF_FORMS}
    for key in config["data"] if found else ():
        known("setting in [data]", key, [*OF_FORMS, *DATA_SETTINGS, *DEALING])
    return found


def federation_settings(config: Config) -> FederationSettings:
    """Returns the settings of [federation], checked."""
    return FederationSettings(**check("[federation]", config["federation"], FederationSettings))


def _federation(
    config: Config,
    settings: FederationSettings,
    data: FederatedData,
    client: int | None,
    folder: Path,
    reports: Reports | None = None,
) -> Federation:
    if config.get("problem", {}).get("name") == "quadratic":
        raise UserError("a federation trains on clients' examples: choose the problem neural or logistic.")
    for section in ("constants", "faults"):
        if section in config:
            raise UserError(f"a federation has no use for [{section}]: leave it out.")
    if config.get("run", {}).get("checkpoint_rounds", 1) != 1:
        raise UserError("a federation keeps every round: leave run.checkpoint_rounds out.")
    given = {name: dict(section) for name, section in config.items() if name not in ("data", "federation")}
    given.setdefault("run", {})["checkpoint_rounds"] = 1
    if given.get("problem", {}).get("per_client") and not settings.report:
        raise UserError("problem.per_client looks at clients' data, which are with the clients: set [federation] "
                        "report = true to let them report.")  # fmt: skip
    if settings.report:
        given.setdefault("problem", {})["per_client"] = True
    private = given.get("privacy", {})
    if private.get("trust") == "secagg" and not private.setdefault("protocol", True):
        raise UserError("under trust = 'secagg' a federation runs the protocol: leave privacy.protocol out.")
    if private.get("trust") in ("local", "secagg") and private.setdefault("draws", "server") != "server":
        raise UserError(f"under trust = '{private['trust']}' nobody trusts the server, which draws who is asked: leave "
                        "privacy.draws out.")  # fmt: skip
    if "record" in private.get("unit", "") and not {"epsilon", "record_epsilon", "silo_epsilons"} & set(private):
        raise UserError("in a federation nobody but the client knows how many records it has: give an ε to keep to "
                        "(privacy.epsilon; with both units privacy.record_epsilon), from which its noise follows."
                        )  # fmt: skip
    experiment = assemble(given, data, folder)
    if experiment.algorithm.prime is not None:
        raise UserError("initial_memory = 'local_updates' is not for a federation: start from zero; warmup_rounds lets "
                        "the memories catch up.")  # fmt: skip
    about = check("[federation]", config["federation"], FederationSettings)
    resolved = experiment.config | {"federation": {key: value for key, value in about.items() if value is not None}}
    resolved |= {"data": encoding(config)} if encoding(config) else {}
    problem = _Party(experiment.problem, settings.clients, client, reports, "person" in encoding(config))
    names, shapes = tuple(map(str, encoding(config).get("labels", ()))), experiment.shapes
    if shapes is not None and len(names) == shapes.outputs:
        experiment = experiment._replace(shapes=shapes._replace(classes=names))
    report = problem.report if settings.report and data.owners is not None else None
    terms = _agreed(resolved)
    digest = hashlib.sha256(dump(terms).encode()).hexdigest()[:32]
    by_key = {f"{name}.{key}": value for name, section in terms.items() for key, value in section.items()}
    by_key = json.loads(json.dumps(by_key, default=str))  # as the other side will read them
    return Federation(settings, experiment._replace(problem=problem, config=resolved), digest, by_key, report)


def _agreed(config: Config) -> Config:
    """Returns what every party must have alike, every default spelled out."""
    parts: Config = {name: config[name] for name in AGREED if name in config}
    parts["run"] = {key: config["run"][key] for key in AGREED_OF_RUN}
    shapes = ("clients", "inputs", "classes", "targets", "tokens")
    parts["federation"] = {key: config["federation"].get(key) for key in shapes}
    if config["federation"].get("texts"):
        parts["federation"] |= {"texts": True}
    if config.get("privacy", {}).get("protocol"):
        parts["federation"] |= {"keys": config["federation"].get("keys")}
    if config["federation"].get("report"):
        parts["federation"] |= {"report": True, "held_out": config["federation"].get("held_out", HELD_OUT)}
        parts["run"]["evaluate_every"] = config["run"].get("evaluate_every")  # how often clients are asked
    return parts


class _Party:
    """Problem of many clients as one party knows it.

    Args:
        like: the same problem with the data that this party has: a client's own, and none for the server.
        names: names of the clients in the federation.
        client: number of the client; None for the server.
        reports: asks clients for their figures of a model.
        persons: whether all agreed that a record is all rows of a person.
    """

    def __init__(
        self, like: Problem, names: Sequence[str], client: int | None, reports: Reports | None, persons: bool
    ) -> None:
        self._like, self._num_clients, self._client, self._reports = like, len(names), client, reports
        self._persons = persons
        self.client_names = tuple(names)

    @property
    def dim(self) -> int:
        return self._like.dim

    @property
    def num_clients(self) -> int:
        return self._num_clients

    @property
    def tile(self) -> int:
        """Number of clients in a tile: a client on the wire is a block of one."""
        return 1

    @property
    def client_sizes(self) -> np.ndarray:
        """Numbers of examples, as if all clients had as many as are here: nobody knows better."""
        return np.full(self._num_clients, self._like.client_sizes[0])

    def init(self, rng: np.random.Generator) -> Tensor:
        return self._like.init(rng)

    def grad(self, x: Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> Tensor:
        assert all(ids == self._client), "these data are not here"
        return self._like.grad(x, np.zeros_like(ids), examples)

    # records, of the client whose data are here

    @property
    def grouped(self) -> bool:
        return self._persons or (isinstance(self._like, Grouped) and self._like.grouped)

    @property
    def record_sizes(self) -> np.ndarray:
        """Number of records of each client, 0 where nobody here knows it."""
        sizes = np.zeros(self._num_clients, np.int64)
        if self._client is not None:
            sizes[self._client] = record_sizes(self._like)[0]
        return sizes

    def require_records(self) -> None:
        if isinstance(self._like, Recorded):
            self._like.require_records()

    def examples_of(self, client: int, records: np.ndarray) -> np.ndarray:
        assert client == self._client, "these data are not here"
        return examples_of(self._like, 0, records)

    def record_sum(self, x: Tensor, client: int, records: np.ndarray, bound: Bound) -> Tensor:
        assert client == self._client, "these data are not here"
        return bounded_sum(self._like, x, 0, records, bound)

    def apart_from_data(self, x: Tensor) -> Tensor | None:
        return apart_from_data(self._like, x)

    def evaluate(self, x: Tensor) -> Metrics:
        """Returns the public figures and, apart from them, what clients report."""
        public, _, like = self._like.evaluate(x)
        if self._reports is None or like is None:
            return Metrics(public, {})
        found = ByClient.of(like.name, like.higher, self._reports(x, like.name), held_out=True)
        return Metrics(public, found.figures, found)

    def report(self, x: Tensor) -> ByClient:
        """Returns the figure of the client whose data are here, on the examples that it holds out."""
        found = self._like.evaluate(x).by_client
        assert found is not None and found.held_out, "nothing is held out here"
        return found

    def named(self, x: Tensor) -> dict[str, Tensor]:
        return self._like.named(x)

    def model(self, x: Tensor) -> object:
        return self._like.model(x)
