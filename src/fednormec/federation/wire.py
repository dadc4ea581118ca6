"""Server's side of a federation's round: who is asked, what is taken, what counts."""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednormec.core.algorithm import Server
from fednormec.core.local import Moment
from fednormec.core.participation import Cohort
from fednormec.core.vectors import norm_error, row_norms
from fednormec.engine.clients import FREE, Clients, Exchanged, Job, Paying
from fednormec.engine.memories import Memories
from fednormec.errors import UserError
from fednormec.federation.messages import LOST, MISSED, REFUSED, Refused, Reply, Request
from fednormec.privacy.mechanism import Mechanism

Ask = Callable[[Mapping[int, Request]], Mapping[int, Reply | Refused]]
Tell = Callable[[str], None]
Wait = Callable[[Set[int], int], None]
Notice = Callable[[int, str, str], None]
UNLUCKY = 1e-15  # probability that an honest noisy message is refused for its length


class Wire(NamedTuple):
    """Place where the clients that `ask` reaches compute.

    Args:
        names: names of the clients.
        run: called for the name of the training when it begins.
        agreed: digest of what all must agree on.
        ask: sends each client its request and returns what was answered in time.
        tell: called with what the server's operator should know.
        wait: returns when so many of these clients are there.
        notice: called with a client, MISSED, REFUSED or LOST, and why, each time; `tell` hears the first of the last
            two kinds.
    """

    names: tuple[str, ...]
    run: Callable[[], str]
    agreed: str
    ask: Ask
    tell: Tell
    wait: Wait = lambda some, count: None
    notice: Notice = lambda client, kind, why: None

    def check(self, job: Job) -> None:
        """Raises UserError if the federation has another number of clients than the job."""
        if len(self.names) != job.problem.num_clients:
            raise UserError(f"the federation has {len(self.names)} clients, not {job.problem.num_clients}.")

    @contextmanager
    def clients(self, job: Job) -> Iterator[Clients]:
        """Opens the clients of a job."""
        yield Remote(self, self.run(), job)


class Remote:
    """Clients of a federation.

    What is remembered of each here is the last round of it that counts: in which the server took its message, or heard
    that its memory moved. A client computes from its memory after that round, so that an answer that was late, lost or
    refused leaves nothing behind on either side.
    """

    def __init__(self, wire: Wire, run: str, job: Job) -> None:
        self._wire, self._run, self._algorithm, self._size = wire, run, job.algorithm, job.work().message_width
        mechanism = job.mechanism
        self.noisy = mechanism is not None and mechanism.trust == "local"
        self._longest = longest(job.algorithm.bound.radius, self._size, mechanism if self.noisy else None)
        self.memories = Memories((len(wire.names), 1), torch.float64)
        self.needed = 1  # clients without whom no round begins
        self._grid = job.algorithm.bound.grid if mechanism is not None and mechanism.trust == "central" else None
        self._aside: set[int] = set()
        self._told: set[tuple[int, str]] = set()

    def ready(self) -> None:
        """Returns when enough clients are there that can take part: a round without would be paid for in vain."""
        left = len(self._wire.names) - len(self._aside)
        if left < self.needed:
            who = "no client has" if not left else f"only {left} of the {self.needed} clients that a sum needs have"
            raise UserError(f"{who} the memory that the server counts on: serve with --forget-memories to let all "
                            "memories start over.")  # fmt: skip
        self._wire.wait(set(range(len(self._wire.names))) - self._aside, self.needed)

    def exchange(
        self, server: Server, cohort: Cohort, moment: Moment, prime: bool = False, paying: Paying = FREE
    ) -> Exchanged:
        assert not prime, "a federation starts from zero"
        if self.noisy:
            paying.pay()
        counted, requests = self.memories.rows[:, 0], self._requests(server, cohort, moment)
        total = torch.zeros(self._size, dtype=torch.float64)
        heard = dict[int, bool]()  # who answered, and whether a message of it was added
        left_out, replies = 0, self._wire.ask(requests)
        for client, request in requests.items():  # in the order of the roster, whoever was first
            reply = replies.get(client)
            try:
                if reply is None:
                    self._wire.notice(client, MISSED, "")
                    continue
                if self._lost(client, reply, request):
                    continue
                message = taken(reply, request, self._size, self._longest)
            except Refused as why:
                self._say(client, REFUSED, f"sent what was refused: {why}")
                left_out += 1
                heard[client] = False
                continue
            if message is not None:
                total += message.double() if self._grid is None else self._grid.truncate_(message.double())
            counted[client] = moment.round
            heard[client] = request.sends
            left_out += isinstance(reply, Reply) and reply.left_out
        answered = Cohort(np.array(list(heard), np.int64), np.array(list(heard.values()), bool))
        return Exchanged(total, left_out, answered, len(cohort.computing) - len(heard))

    def _requests(self, server: Server, cohort: Cohort, moment: Moment) -> dict[int, Request]:
        """Returns what each client of a cohort is asked, but for those that are set aside."""
        counted = self.memories.rows[:, 0]
        return {
            client: self._request(server, moment.round, int(counted[client]), sends)
            for client, sends in zip(cohort.computing.tolist(), cohort.sending.tolist(), strict=True)
            if client not in self._aside
        }

    def _request(self, server: Server, round: int, base: int, sends: bool) -> Request:
        memory = server.memory if self._algorithm.reads_memory else None
        return Request(self._run, self._wire.agreed, round, base, sends, secrets.token_bytes(16), server.x, memory)

    def _lost(self, client: int, reply: Reply | Refused, request: Request) -> bool:
        """Returns whether the client has lost the memory that its last counted round left; it is then set aside.

        What it would send from zero would come on top of what it sent before. What it sent before stays, as of one that
        is gone.
        """
        if isinstance(reply, Refused) or reply.status != LOST or reply.nonce != request.nonce:
            return False
        self._aside.add(client)
        self._say(
            client,
            LOST,
            f"has lost its memory after round {request.base} (it has that after round {reply.round}) and is set aside; "
            "what it sent before stays. Serve with --forget-memories to let all memories start over, its too",
        )
        return True

    def _say(self, client: int, kind: str, what: str) -> None:
        self._wire.notice(client, kind, what)
        if (client, kind) not in self._told:  # the first of a kind; the records count them all
            self._told.add((client, kind))
            self._wire.tell(f"{self._wire.names[client]} {what}")


def taken(reply: Reply | Refused, request: Request, size: int, longest: float) -> Tensor | None:
    """Returns the message, or None if none was asked for; raises Refused if it is none that can be added."""
    if isinstance(reply, Refused):
        raise reply
    if reply.status == REFUSED:
        raise Refused(f"it says: {reply.why}")
    if not secrets.compare_digest(reply.nonce, request.nonce):
        raise Refused("it answers another request")
    if reply.round != request.round:
        raise Refused(f"it is of round {reply.round}, not {request.round}")
    if not request.sends:
        return None
    if reply.message is None:
        raise Refused("it has no message")
    if len(reply.message) != size or not bool(reply.message.isfinite().all()):
        raise Refused("its message is not a finite vector of the right size")
    norm = float(row_norms(reply.message[None].double())[0])
    if norm > longest * (1 + norm_error(reply.message.double())):
        raise Refused(f"its message is longer than {longest:.6g}")  # how long, is of its data
    return reply.message


def longest(radius: float, size: int, noise: Mechanism | None) -> float:
    """Returns how long a message can be: the radius, or more with a client's own noise in it.

    That is what an honest message with noise exceeds with probability 1e-15 (the norm of n standard normal numbers is
    above √n + t with probability e^(-t²/2) at most).
    """
    if noise is None:
        return radius
    scale = noise.noise_std * radius * (1 + noise.rounding)
    rounding = 1 + 1e-6  # a message is sent in the model's dtype
    return (radius + scale * (math.sqrt(size) + math.sqrt(-2 * math.log(UNLUCKY)))) * rounding
