"""A federation in this process whose messages leave clients in secure aggregation only: every byte as on a network."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from federated import CLASSES, FEATURES, NAMES, config, data

import fednormec as fn
from fednormec.config.schema import Config, dump, read
from fednormec.data import Examples
from fednormec.engine.round import Resumed
from fednormec.federation.agreement import for_client, for_server
from fednormec.federation.client import client_of, together
from fednormec.federation.client_state import Store
from fednormec.federation.messages import Refused, Reply, Request, read_reply, request_bytes, unframed
from fednormec.federation.provision import make
from fednormec.federation.stages import SecureWire, keys_of
from fednormec.federation.wire import Wire
from fednormec.runs import checkpoint as checkpoints

SECAGG = {"noise_std": 0.01, "trust": "secagg", "min_survivors": 3}


def settings(
    folder: Path, names: Sequence[str] = NAMES, features: int = FEATURES, classes: int = CLASSES, **sections: Any
) -> Config:
    """A federation with keys for all, in a folder of its own."""
    asked = config(privacy=SECAGG, participation={"name": "full"}) | sections
    with (folder / "asked.toml").open("w") as file:
        file.write(dump({name: section for name, section in asked.items() if name != "federation"}))
    made = make(folder / "fed", names, [features], classes, "localhost:1", folder / "asked.toml")
    return read(made / "federation.toml")


class Summed:
    """Server and clients; tests put what goes wrong into `between`, which sees a client, the stage, what it is asked
    and what it answers, and returns what arrives, or None. `owned` has each client's x and y."""

    def __init__(self, asked: Config, folder: Path, run: str = "a", owned: Sequence[tuple[Any, Any]] = ()) -> None:
        self.asked, self.folder, self.run, self.owned = asked, folder, run, owned or data()
        self.server = for_server(asked, folder)
        self.names, self.dim = tuple(self.server.settings.clients), self.server.experiment.problem.dim
        assert together(self.server)
        self.said, self.told = list[str](), list[str]()
        self.calls = list[tuple[int, str]]()
        self.between: Callable[[int, str, bytes, bytes], bytes | None] = lambda client, stage, asked, answer: answer
        self.before: Callable[[int, str], bool] = lambda client, stage: True
        self.clients: list[Callable[[bytes], bytes]] = []
        for i in range(len(self.names)):
            self.clients.append(self.started(i))

    def home(self, client: int) -> Path:
        return self.folder / "fed" / "clients" / self.names[client]

    def started(self, client: int, budget: float | None = None) -> Callable[[bytes], bytes]:
        found = for_client(self.asked, self.names[client], Examples(*self.owned[client]))
        return client_of(found, client, self.home(client), self.told.append, budget)

    def carry(self, bodies: Mapping[int, bytes]) -> dict[int, bytes]:
        arrived = dict[int, bytes]()
        for client, body in bodies.items():
            stage = str(unframed(body)[0]["kind"])
            self.calls.append((client, stage))
            if not self.before(client, stage):
                continue
            answer = self.between(client, stage, body, self.clients[client](body))
            if answer is not None:
                arrived[client] = answer
        return arrived

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Reply | Refused]:
        size, x = self.server.experiment.algorithm.message_width(self.dim), torch.float64
        found = self.carry({client: request_bytes(request) for client, request in requests.items()})
        return {client: read_reply(data, size, x) for client, data in found.items()}

    def place(self) -> SecureWire:
        wire = Wire(self.names, lambda: self.run, self.server.agreed, self.ask, self.said.append)
        return SecureWire(wire, self.carry, keys_of(self.server))

    def rounds(
        self, resume: checkpoints.Checkpoint | None = None, pay: Any = lambda number, plan: None
    ) -> Iterator[Any]:
        experiment = self.server.experiment
        return fn.simulate(
            experiment.problem, experiment.algorithm, experiment.participation, experiment.privacy,
            rounds=experiment.run.rounds, seed=experiment.run.seed, on=self.place(), before_release=pay,
            resume=None if resume is None else Resumed(resume),
        )  # fmt: skip

    def message(self, client: int) -> torch.Tensor:
        """The last message of a client before noise, as its own disk has it."""
        return self.store(client).load().message

    def store(self, client: int) -> Store:
        algorithm = self.server.experiment.algorithm
        width = algorithm.memory_slots * self.dim
        return Store(self.home(client), self.run, width, algorithm.message_width(self.dim), torch.float64)
