"""A thousand rounds of secure aggregation in which something always goes wrong: every sum, count and memory is right.

    python tests/slow/soak_secagg.py [--rounds 1000] [--clients 10] [--seed SEED]

A server and clients in this process, with the bytes of a network between them. In each attempt at a sum one client of
ten, at a stage drawn anew, is gone from then on, answers too late, is restarted (what its process had in memory is
lost), sends an answer that is cut or garbled, has its last answer come a second time, or is asked the same twice, at
once or later. After every round all that must hold is checked; `Checks` says what. Ends with a line that says what
held and 0, or with what broke and 1. `make soak-secagg` takes some minutes.

The seed repeats what goes wrong; keys and noise come from the operating system and are others each time. A masked word
is garbled in its highest bit, which shows in the sum: nobody can see a lower one, as with a client that lies.
"""

import argparse
import hashlib
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from masked import Summed, settings

from fednormec.config.schema import Config
from fednormec.engine.round import Round
from fednormec.engine.together import STAGES
from fednormec.federation.messages import DONE, REFUSED, read_stage_reply, unframed
from fednormec.privacy.ledger import Ledger, read_ledger
from fednormec.privacy.mechanism import Mechanism, Plan
from fednormec.secagg.ciphers import SIGNATURE

KINDS = ("gone", "late", "restarted", "cut", "garbled", "twice", "repeated", "repeated later")
SHARE = 0.1  # of the clients, in each attempt
FEATURES, CLASSES, EXAMPLES = 30, 10, 8  # a linear model of 310 parameters
BETA, NOISE_STD, SURVIVE = 0.3, 0.05, 0.7
NEAR, DEVIATIONS = 0.01, 5.0  # how near the noise's std is to what it should be, at least if there are enough numbers
ALLOWED_MB, WARM_UP, EVERY = 20.0, 100, 50
DRAWN = list[np.ndarray]()  # noise that was drawn since a client was last asked


class Broken(Exception):
    """Something that must hold does not."""


class Trouble(NamedTuple):
    """What goes wrong with one client in an attempt, and at which stage."""

    stage: str
    kind: str


class Shaky(Summed):
    """Server and clients between whom something goes wrong in every tenth place.

    Attributes:
        attempts: number of attempts so far that came to masked vectors: those that are paid for.
        trouble: what goes wrong in this attempt, by client.
        troubles: number of troubles of each kind that came about.
        left: number of masked vectors that have left each client.
        noises: in the last attempt, the noise in the masked vector that left a client.
    """

    def __init__(self, asked: Config, folder: Path, owned: Sequence[tuple[Any, Any]], drawn: random.Random) -> None:
        self.attempts, self.troubles, self.left = 0, Counter[str](), Counter[int]()
        self.noises = dict[int, np.ndarray]()
        self._random, self.trouble, self._digests = drawn, dict[int, Trouble](), set[bytes]()
        self._asked: dict[int, list[tuple[str, bytes, bytes]]] = {}  # stage, request and answer, in this attempt
        self._last = dict[int, bytes]()  # answer of each client
        super().__init__(asked, folder, owned=owned)
        self.before, self.between = self._arrives, self._returns

    def carry(self, bodies: Mapping[int, bytes]) -> dict[int, bytes]:
        kinds = {unframed(body)[0]["kind"] for body in bodies.values()}
        self.attempts += "masked" in kinds
        if STAGES[0] in kinds:
            self.noises, self._asked, self.trouble = {}, {i: [] for i in bodies}, {}
            for client in bodies:
                if self._random.random() < SHARE:
                    self.trouble[client] = Trouble(self._random.choice(STAGES), self._random.choice(KINDS))
        return super().carry(bodies)

    def started(self, client: int, budget: float | None = None) -> Any:
        answering = super().started(client, budget)

        def answer(data: bytes) -> bytes:
            DRAWN.clear()
            said: bytes = answering(data)
            if DRAWN and read_stage_reply(said).status == DONE:
                self._has_left(client, DRAWN[-1])
            return said

        return answer

    def _has_left(self, client: int, noise: np.ndarray) -> None:
        digest = hashlib.sha256(noise.tobytes()).digest()[:8]
        require(client not in self.noises, f"two masked vectors left client {client} in one attempt")
        require(digest not in self._digests, f"client {client} drew noise that was drawn before")
        self._digests.add(digest)
        self.noises[client] = noise
        self.left[client] += 1

    def _arrives(self, client: int, stage: str) -> bool:
        at, kind = self.trouble.get(client, ("", ""))
        if kind == "gone" and STAGES.index(stage) >= STAGES.index(at):
            self.troubles[kind] += at == stage
            return False
        if stage == at and kind == "restarted":
            self.troubles[kind] += 1
            self.clients[client] = self.started(client)
        if stage == at and kind == "repeated later" and self._asked[client]:
            self.troubles[kind] += 1
            before, asked, answer = self._random.choice(self._asked[client])
            again = self.clients[client](asked)
            refused = read_stage_reply(again).status == REFUSED
            require(again == answer or refused or before == STAGES[0], f"{before}, asked later, has another answer")
        return True

    def _returns(self, client: int, stage: str, asked: bytes, answer: bytes) -> bytes | None:
        self._asked[client].append((stage, asked, answer))
        last, self._last[client] = self._last.get(client), answer
        at, kind = self.trouble.get(client, ("", ""))
        if stage != at or kind in ("gone", "restarted", "repeated later"):
            return answer
        self.troubles[kind] += 1
        if kind == "repeated":
            require(self.clients[client](asked) == answer, f"{stage}, asked twice, has another answer")
            return answer
        if kind == "cut":
            return answer[: self._random.randrange(len(answer))]
        if kind == "garbled":
            return self._garbled(stage, answer)
        return None if kind == "late" else last

    def _garbled(self, stage: str, answer: bytes) -> bytes:
        """Returns an answer with another byte in it; of masked words the highest bit of one."""
        garbled, words = bytearray(answer), range(0)
        if stage == "masked" and len(answer) > 4 * self.dim + SIGNATURE:
            words = range(len(answer) - SIGNATURE - 4 * self.dim, len(answer) - SIGNATURE)
            if self._random.random() < 0.5:
                garbled[words[4 * self._random.randrange(self.dim) + 3]] ^= 0x80
                return bytes(garbled)
        place = self._random.choice([place for place in range(len(answer)) if place not in words])
        garbled[place] ^= self._random.randrange(1, 256)
        return bytes(garbled)


class Checks:
    """All that must hold after a round, and at the end.

    The sum that was released is that of the messages of its members, as their disks have them, and of the noise that
    they drew: to the last unit. It has enough members. The server's memory is the mean of the clients' memories that
    count, and the noise so far. Payments are as many as attempts that came to masked vectors. No client
    has counted fewer messages than left it, or more than were paid for. At the end the noise has the std that was
    agreed on, and mean zero.
    """

    def __init__(self, network: Shaky, ledger: Ledger) -> None:
        plan = network.server.plan
        assert plan is not None and plan.mechanism.grid is not None
        self._network, self._ledger, self._floor = network, ledger, plan.mechanism.min_survivors
        self._unit = plan.mechanism.grid.unit
        self._std = plan.mechanism.noise_std * plan.mechanism.grid.steps  # of one client's noise, in units
        self._noise = torch.zeros(network.dim, dtype=torch.float64)
        self.used, self.numbers, self._sum, self._squares = 0, 0, 0.0, 0.0
        self.members = Counter[int]()

    def round(self, r: Round) -> None:
        network, clients = self._network, range(len(self._network.names))
        stored = [network.store(client).load() for client in clients]
        members = r.cohort.computing[r.cohort.sending].tolist()
        self.members[len(members)] += 1
        if members:
            require(len(members) >= self._floor, f"a sum over {len(members)} members was used")
            require(all(stored[i].round == r.number for i in members), "a member's disk has no message of this round")
            self._sum_is_right(r.released - sum(stored[i].message for i in members), members)
        else:
            require(not r.released.any(), "a sum without members was released")
        counted = r.memory[:, 0].int().tolist()
        wrong = [i for i in clients if (counted[i] == r.number) != (i in members)]
        require(not wrong, f"whose memories count does not fit who is in the sum: {wrong}")
        memories = [stored[client].after(counted[client]) for client in clients]
        lost = [client for client, memory in enumerate(memories) if memory is None]
        require(not lost, f"clients {lost} have no memory that the server counts on")
        expected = (sum(memories) + BETA * self._noise) / len(clients)  # type: ignore[arg-type]
        far = float((r.server.memory - expected).abs().max())
        require(far <= 1e-9 * max(1.0, float(expected.abs().max())), f"the server's memory is {far:.3g} off")
        self._counts_are_right(r.releases)

    def _sum_is_right(self, noise: torch.Tensor, members: Sequence[int]) -> None:
        units, drawn = (noise / self._unit).numpy(), sum(self._network.noises[i] for i in members)
        require(np.array_equal(units, drawn), "the sum is not that of the messages and of the noise that was drawn")
        scaled = units / (self._std * math.sqrt(len(members)))
        self.used, self.numbers = self.used + 1, self.numbers + len(scaled)
        self._sum, self._squares = self._sum + float(scaled.sum()), self._squares + float(scaled @ scaled)
        self._noise += noise

    def _counts_are_right(self, releases: int) -> None:
        network, paid = self._network, self._ledger.releases
        require(
            paid == releases == network.attempts, f"{paid} payments, {releases} releases, {network.attempts} attempts"
        )
        for client in range(len(network.names)):
            path = network.home(client) / "releases.json"
            found = json.loads(path.read_text()) if path.exists() else {}
            count, left = sum(one["releases"] for one in found.values()), network.left[client]
            require(left <= count <= paid, f"client {client} counts {count}: {left} left it, {paid} were paid for")

    @property
    def std(self) -> float:
        """Std of the noise in all sums, over what it should be."""
        return math.sqrt(self._squares / self.numbers)

    def end(self) -> None:
        require(self.numbers > 0, "no sum was used")
        near, mean = max(NEAR, DEVIATIONS / math.sqrt(2 * self.numbers)), self._sum / self.numbers
        require(abs(self.std - 1) <= near, f"the noise has {self.std:.4f} times the std that it should have")
        require(abs(mean) <= DEVIATIONS / math.sqrt(self.numbers), f"the noise has the mean {mean:.4g} stds")


def require(holds: bool, otherwise: str) -> None:
    """Raises Broken if something does not hold."""
    if not holds:
        raise Broken(otherwise)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def federation(folder: Path, rounds: int, clients: int, seed: int) -> Shaky:
    """Server and clients with keys and data of their own."""
    names = [f"client-{i}" for i in range(clients)]
    least = max(2, math.ceil(SURVIVE * clients - 1e-9))
    asked = settings(
        folder, names, FEATURES, CLASSES,
        method={"name": "fed_normec", "beta": BETA, "server_step": 0.5, "server_normalization": False},
        privacy={"noise_std": NOISE_STD, "trust": "secagg", "min_survivors": least},
        run={"rounds": 3 * rounds, "seed": 3, "dtype": "float64"},  # clients count attempts: the budget never ends
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    owned = [(rng.standard_normal((EXAMPLES, FEATURES)), rng.integers(0, CLASSES, EXAMPLES)) for _ in names]
    return Shaky(asked, folder, owned, random.Random(seed))


def soak(network: Shaky, rounds: int) -> str:
    """Returns what held; raises Broken if something did not."""
    plan = network.server.plan
    assert plan is not None
    ledger, begun, warm = Ledger(network.folder / "ledger.jsonl", plan), time.monotonic(), resident_mb()
    checks = Checks(network, ledger)

    def pay(number: int, plan: Plan) -> None:
        ledger.add(number)

    for r in network.rounds(pay=pay):
        checks.round(r)
        for heard in (network.said, network.told, network.calls):
            heard.clear()
        if r.number == min(WARM_UP, rounds // 2):
            warm = resident_mb()
        if r.number % EVERY == 0 or r.number == rounds:
            pace, troubles = r.number / (time.monotonic() - begun), network.troubles.total()
            print(f"round {r.number}: {network.attempts} attempts, {checks.used} sums, {troubles} troubles, "
                  f"{pace:.1f} rounds/s, {resident_mb():.0f} MB", flush=True)  # fmt: skip
        if r.number == rounds:
            break
    checks.end()
    grew = resident_mb() - warm
    require(grew < ALLOWED_MB, f"memory grew by {grew:.1f} MB")
    ledger.close()
    lines = read_ledger(network.folder / "ledger.jsonl").rounds
    require(lines == network.attempts, f"the ledger has {lines} lines for {network.attempts} attempts")
    kinds = ", ".join(f"{network.troubles[kind]} {kind}" for kind in KINDS)
    members = ", ".join(f"{count} with {size}" for size, count in sorted(checks.members.items()))
    print(f"troubles: {kinds}\nrounds by the number of members in the sum: {members}")
    return (f"{checks.used} sums to the last unit, {network.attempts} attempts and payments, {network.left.total()} "
            f"masked vectors with noise of their own and {checks.std:.4f} times its std, all counts and memories, "
            f"{grew:+.1f} MB:")  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, help="of what goes wrong; by default another each time")
    asked = parser.parse_args(words)
    if asked.rounds < 1 or asked.clients < 3:
        parser.error("it takes a round and three clients, at least")
    seed = random.randrange(10**9) if asked.seed is None else asked.seed
    print(f"--rounds {asked.rounds} --clients {asked.clients} --seed {seed}", flush=True)
    torch.set_num_threads(1)
    drawing = Mechanism.own_noise

    def noted(self: Mechanism, dim: int) -> np.ndarray:
        DRAWN.append(drawing(self, dim))
        return DRAWN[-1]

    Mechanism.own_noise = noted  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            network = federation(Path(folder), asked.rounds, asked.clients, seed)
            try:
                print(f"{asked.rounds:,} rounds: {soak(network, asked.rounds)} held")
            except Exception as error:
                if not isinstance(error, Broken):
                    traceback.print_exc()
                print(f"attempt {network.attempts}: {error}", network.trouble, *network.said[-5:], sep="\n  ")
                return 1
    finally:
        Mechanism.own_noise = drawing  # type: ignore[method-assign]
    return 0


if __name__ == "__main__":
    sys.exit(main())
