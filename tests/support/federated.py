"""A federation in this process: its settings, its data, and all its clients with a wire between them and the server."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fednormec as fn
from fednormec.config.assemble import assemble
from fednormec.config.schema import Config
from fednormec.data import Examples, from_arrays
from fednormec.engine.round import Resumed, Round
from fednormec.federation.agreement import Federation, for_client, for_server
from fednormec.federation.client import Answer, answering
from fednormec.federation.client_state import Store
from fednormec.federation.messages import (
    Refused,
    Reply,
    Request,
    read_reply,
    read_request,
    reply_bytes,
    request_bytes,
)
from fednormec.federation.wire import Wire
from fednormec.runs import checkpoint as checkpoints

NAMES = ("north", "south", "east", "west")
FEATURES, CLASSES, ROUNDS = 5, 3, 6
DIM = (FEATURES + 1) * CLASSES
PRIVATE = {"noise_std": 0.7, "trust": "central"}
LOCAL = {"noise_std": 0.7, "trust": "local"}


def config(**sections: dict[str, Any]) -> Config:
    """A small federation in float64, with local work that draws its order from the client's number."""
    base: Config = {
        "model": {"name": "linear"},
        "local": {"name": "sgd", "step": 0.5, "steps": 3, "batch_size": 4},
        "method": {"name": "fed_normec", "beta": 0.3, "server_step": 0.5, "server_normalization": False},
        "participation": {"name": "poisson", "p": 0.7, "idle": "sleep"},
        "run": {"rounds": ROUNDS, "seed": 3, "dtype": "float64"},
        "federation": {"clients": list(NAMES), "inputs": [FEATURES], "classes": CLASSES, "deadline": 20.0},
    }
    return base | sections


def data() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((8 + i, FEATURES)), rng.integers(0, CLASSES, 8 + i)) for i in range(len(NAMES))]


def party(asked: Config, client: int) -> Federation:
    return for_client(asked, NAMES[client], Examples(*data()[client]))


class Network:
    """All clients of a federation in this process, and a wire between: every message is the bytes that a network would
    carry. Tests put what goes wrong into `between`, which sees each client's answer and returns what arrives, or
    None."""

    def __init__(self, asked: Config, folder: Path, run: str = "a") -> None:
        self.asked, self.folder, self.run = asked, folder, run
        self.server = for_server(asked, folder)
        self.clients: list[Answer] = []
        self.said: list[str] = []
        self.requests: list[dict[int, Request]] = []
        self.between: Callable[[int, Request, Reply], Reply | None] = lambda client, request, reply: reply
        for i, name in enumerate(NAMES):
            (folder / name).mkdir(exist_ok=True)
            self.clients.append(answering(party(asked, i), i, folder / name))

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Reply | Refused]:
        self.requests.append(dict(requests))
        answers: dict[int, Reply | Refused] = {}
        for client, request in requests.items():
            memory = 0 if request.memory is None else len(request.memory)
            arrived = read_request(request_bytes(request), len(request.x), memory, request.x.dtype)
            reply = self.between(client, request, self.clients[client](arrived))
            if reply is not None:
                size = self.server.experiment.algorithm.message_width(len(request.x))
                answers[client] = understood(reply_bytes(reply), size, request.x.dtype)
        return answers

    def rounds(self, resume: checkpoints.Checkpoint | None = None) -> Any:
        experiment = self.server.experiment
        place = Wire(NAMES, lambda: self.run, self.server.agreed, self.ask, self.said.append)
        return fn.simulate(
            experiment.problem, experiment.algorithm, experiment.participation, experiment.privacy,
            rounds=experiment.run.rounds, seed=experiment.run.seed, on=place,
            resume=None if resume is None else Resumed(resume),
        )  # fmt: skip

    def memory(self, client: int, round: int) -> torch.Tensor:
        """A client's memory after the last of its rounds that counted."""
        algorithm = self.server.experiment.algorithm
        store = Store(self.folder / NAMES[client], self.run, DIM, algorithm.message_width(DIM), torch.float64)
        found = store.load().after(round)
        assert found is not None
        return found


def understood(content: bytes, size: int, dtype: torch.dtype) -> Reply | Refused:
    try:
        return read_reply(content, size, dtype)
    except Refused as why:
        return why


def in_process(asked: Config) -> list[Round]:
    whole = assemble({k: v for k, v in asked.items() if k != "federation"}, from_arrays(data()))
    return [
        r._replace(server=r.server)
        for r in fn.simulate(
            whole.problem, whole.algorithm, whole.participation, whole.privacy, rounds=ROUNDS, seed=whole.run.seed
        )
    ]


def mean_of_memories(network: Network, r: Round) -> torch.Tensor:
    counted = r.memory[:, 0].int().tolist()
    return sum(network.memory(i, c) for i, c in enumerate(counted)) / len(NAMES)


def request_for(network: Network, round: int, base: int, x: float = 0.1, sends: bool = True) -> Request:
    model = torch.full((DIM,), x, dtype=torch.float64)
    return Request(network.run, network.server.agreed, round, base, sends, b"n" * 16, model)
