"""Client that computes what clients in process compute, on a block of one row, and remembers before it answers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fednormec.config.forms import read_agreed, require_persons
from fednormec.config.own import SECONDS_TO_LOAD, is_own, own
from fednormec.config.schema import Config
from fednormec.core.algorithm import Server
from fednormec.core.bounds import Adding
from fednormec.core.local import Moment
from fednormec.core.randomness import generator
from fednormec.data import Examples, FederatedData
from fednormec.data.sources import given_data
from fednormec.engine.clients import computed, summed
from fednormec.errors import BoundBroken, UserError, positive
from fednormec.federation.agreement import Federation, encoding, federation_settings
from fednormec.federation.client_state import Kept, Store
from fednormec.federation.messages import (
    DONE,
    LENGTH,
    LOST,
    MOST_SAID,
    REFUSED,
    REPORT,
    STAGES,
    Refused,
    Reply,
    Report,
    Request,
    kind_of,
    read_request,
    reply_bytes,
    report_bytes,
)
from fednormec.federation.record_releases import RecordReleases
from fednormec.federation.releases import Releases
from fednormec.federation.stages import Prepare, Prepared, Summing
from fednormec.privacy.mechanism import Mechanism
from fednormec.privacy.records import for_clients

Answer = Callable[[Request], Reply]
ABOUT_ONE = 512  # bytes that a stage of secure aggregation says about one client, at most
MOST_TRAININGS = 100  # whose memories a client keeps: a server makes up their names


def client_of(
    federation: Federation, client: int, folder: Path, tell: Callable[[str], None], budget: float | None = None
) -> Callable[[bytes], bytes]:
    """Returns the client of this number: a function from the bytes of a request to those of its answer.

    Args:
        federation: the federation as this client knows it.
        client: its number.
        folder: where its memory is stored.
        tell: called with what its owner should know.
        budget: the ε that all that leaves its data may come to; None: what the agreement promises.
    """
    answer, (like, memory) = answering(federation, client, folder, tell, budget), _model_and_memory(federation)
    released, summing = releases_of(federation, folder, budget), None
    if together(federation):
        prepare = preparing(federation, client, folder, tell, budget)
        summing = Summing(federation, client, folder, prepare, released, tell)

    def train(data: bytes) -> bytes:
        try:
            reply = answer(read_request(data, len(like), memory, like.dtype))
        except Refused as why:
            reply = Reply(0, b"", REFUSED, str(why))
        if reply.status != "done":
            tell(f"a request was not answered: {reply.why or 'the memory it speaks of is not here'}")
        return reply_bytes(reply)

    def report(data: bytes) -> bytes:
        try:
            found = reported(federation, read_request(data, len(like), 0, like.dtype))
        except Refused as why:
            found = Report(b"", REFUSED, str(why))
        if found.status == REFUSED:
            tell(f"nothing was reported: {found.why}")
        return report_bytes(found)

    def answered(data: bytes) -> bytes:
        try:
            kind = kind_of(data)
        except Refused as why:
            tell(f"a request was not answered: {why}")
            return reply_bytes(Reply(0, b"", REFUSED, str(why)))
        if kind in STAGES:
            return train(data) if summing is None else summing.answer(data)
        return report(data) if kind == REPORT else train(data)

    return answered


def longest_request(federation: Federation) -> int:
    """Returns how many bytes a request has, at most."""
    like, memory = _model_and_memory(federation)
    about_all = ABOUT_ONE * len(federation.settings.clients) if together(federation) else 0
    return (len(like) + memory) * like.element_size() + LENGTH.size + MOST_SAID + about_all


def longest_answer(federation: Federation) -> int:
    """Returns how many bytes an answer of a client has, at most."""
    problem, algorithm, *_ = federation.experiment
    about_all = ABOUT_ONE * len(federation.settings.clients) if together(federation) else 0
    return 8 * algorithm.message_width(problem.dim) + MOST_SAID + about_all


def _model_and_memory(federation: Federation) -> tuple[torch.Tensor, int]:
    """Returns a model, and the number of numbers in the server's memory that come with one in a request."""
    problem, algorithm, *_ = federation.experiment
    x = problem.init(generator(0, "init"))
    return x, len(algorithm.init(x).memory) if algorithm.reads_memory else 0


def stores_of(federation: Federation, folder: Path) -> Callable[[str], Store]:
    """Returns a function that gives the store of a client's memory in the training of a name."""
    problem, algorithm, *_ = federation.experiment
    x = problem.init(generator(0, "init"))
    width, size = algorithm.memory_slots * len(x), algorithm.message_width(len(x))
    return lambda run: Store(folder, run, width, size, x.dtype)


def releases_of(federation: Federation, folder: Path, budget: float | None = None) -> Releases:
    """Returns the count of a client's messages; it has no budget where the client does not add the noise itself.

    Args:
        federation: the federation as this client knows it.
        folder: where the count is stored.
        budget: the ε that all that leaves its data may come to; None: what the agreement promises.
    """
    plan = for_clients(federation.plan)
    if budget is not None:
        positive("--budget", budget)
    if plan is not None and (plan.mechanism.trust == "local" or plan.mechanism.protocol):
        return Releases(folder, federation.agreed, plan, budget)
    if budget is not None and federation.records is None:
        raise UserError("--budget is for clients that add their own noise (privacy.trust = 'local' or 'secagg', or "
                        "privacy.unit = 'record'): here the server keeps the count, or nobody does.")  # fmt: skip
    return Releases(folder, federation.agreed)


def record_releases_of(federation: Federation, folder: Path, budget: float | None = None) -> RecordReleases | None:
    """Returns the count of the rounds that a client computed on its records; None where they are not protected.

    Args:
        federation: the federation as this client knows it.
        folder: where the count is stored.
        budget: the ε that all rounds may come to, where it is not that of messages; None: what the agreement promises.
    """
    if federation.records is None:
        return None
    of_messages = federation.mechanism is not None and releases_of(federation, folder).has_budget
    return RecordReleases(
        folder, federation.agreed, federation.records, None if of_messages else budget,
        beside=federation.mechanism is not None,
    )  # fmt: skip


def counts_of(
    federation: Federation, folder: Path, budget: float | None = None
) -> tuple[Releases | RecordReleases, ...]:
    """Returns the counts that a client keeps: of its messages, and of rounds on its records where they are protected.

    Args:
        federation: the federation as this client knows it.
        folder: where the counts are stored.
        budget: the ε that all that leaves its data may come to; None: what the agreement promises.
    """
    computed_on = record_releases_of(federation, folder, budget)
    messages = releases_of(federation, folder, budget if computed_on is None or not computed_on.limited else None)
    return (messages,) if computed_on is None else (messages, computed_on)


def answering(
    federation: Federation,
    client: int,
    folder: Path,
    tell: Callable[[str], None] = lambda said: None,
    budget: float | None = None,
) -> Answer:
    """Returns the function by which a client answers requests.

    A request is computed once: asked again, it gets the same answer. If the answer of a round did not count, the next
    request is computed from the memory before it. `tell` hears what is for the client's owner alone.
    """
    released, local = releases_of(federation, folder, budget), _local_noise(federation)
    alone, prepare = not together(federation), preparing(federation, client, folder, tell, budget)

    def answer(request: Request) -> Reply:
        if request.sends and not alone:
            return _refused(request, "a message leaves this client in secure aggregation only")
        found = prepare(request)
        if isinstance(found, Reply):
            return found
        kept = found.kept
        if request.sends and not kept.sent:
            if not released.reserve(request.run):
                return _refused(request, "all messages that the privacy budget pays for have been sent")
            kept = kept._replace(sent=1)
        found.keep(kept)
        if request.sends:
            released.may_leave()
        told = kept.left_out == 1 and local is None and alone  # what data did is for those alone who are trusted
        return Reply(request.round, request.nonce, DONE, "", kept.message if request.sends else None, told)

    return answer


def preparing(
    federation: Federation, client: int, folder: Path, tell: Callable[[str], None], budget: float | None = None
) -> Prepare:
    """Returns the function by which a client computes what is asked for, or what it stored when it was asked before.

    Nothing is stored by it, and nothing leaves.
    """
    store_of, local = stores_of(federation, folder), _local_noise(federation)
    computed_on = record_releases_of(federation, folder, budget)

    def prepare(request: Request) -> Prepared | Reply:
        if request.agreed != federation.agreed:
            return _refused(request, "the server has other settings than the federation.toml here")
        if not (request.run.isalnum() and request.run.isascii() and len(request.run) <= 64 and request.round):
            return _refused(request, "no training is called that, or has such a round")
        store = store_of(request.run)
        before = kept = store.load()
        if not kept.round and len(list(folder.glob("memory-*"))) >= MOST_TRAININGS:
            tell(f"{folder} has the memories of {MOST_TRAININGS} trainings: move away those that are over")
            return _refused(request, "there is no room for the memory of one more training")
        if (kept.round, kept.digest) != (request.round, request.digest):
            rows = kept.after(request.base)
            if rows is None:
                return Reply(kept.round, request.nonce, LOST)
            if computed_on is not None and not computed_on.reserve(request.digest):
                tell("the privacy budget of the records here is spent: nothing was computed")
                return _refused(request, "all rounds that the privacy budget of its records pays for were computed")
            try:
                kept = _computed(federation, client, request, rows, local)
            except BoundBroken:  # says by how much, which is a figure of the client's data
                if computed_on is not None:
                    computed_on.may_leave()  # the refusal does: asked again, it is computed and counted again
                tell("the method here made a message that is longer than its bound: it was not sent")
                return _refused(request, "the method here broke its bound")
            if kept.left_out:
                tell(f"what was computed in round {request.round} is not finite: it counts as a message of zeros")
        return Prepared(store, before, kept, computed_on)

    return prepare


def together(federation: Federation) -> bool:
    """Returns whether messages leave clients in secure aggregation only."""
    return federation.mechanism is not None and federation.mechanism.protocol


def _local_noise(federation: Federation) -> Mechanism | None:
    """Returns the mechanism whose noise a client adds to its message itself; None where it adds none."""
    mechanism = federation.mechanism
    return mechanism if mechanism is not None and mechanism.trust == "local" else None


def reported(federation: Federation, request: Request) -> Report:
    """Returns how good a model is on the examples that this client holds out, if its own settings let it say so."""
    if not federation.settings.report:
        return Report(request.nonce, REFUSED, "the federation.toml here does not let a client report")
    if request.agreed != federation.agreed:
        return Report(request.nonce, REFUSED, "the server has other settings than the federation.toml here")
    if federation.report is None:
        return Report(request.nonce, REFUSED, "there are too few examples here to hold one out")
    found = federation.report(request.x)
    if not found.values:
        return Report(request.nonce, REFUSED, f"the {found.name} is not finite here")
    return Report(request.nonce, name=found.name, value=float(found.values[0]))


def _computed(
    federation: Federation, client: int, request: Request, rows: torch.Tensor, local: Mechanism | None
) -> Kept:
    problem, _, _, _, run, *_ = federation.experiment
    algorithm, mechanism = federation.algorithm, federation.mechanism
    grid = None if mechanism is None else mechanism.grid
    server = Server(request.x, request.x.new_empty(0) if request.memory is None else request.memory, request.round - 1)
    before, moment = rows.clone(), Moment(run.seed, request.round)
    messages, left_out = computed(problem, algorithm, server, rows[None], np.array([client]), moment)  # moves rows
    if mechanism is not None:
        summed(algorithm, messages, rows.new_ones(1), Adding(longest=mechanism.radius, grid=grid))
    message = messages.whole()[0]
    if grid is not None:  # of a copy: a method may hand out its memory as its message
        message = grid.truncate_(message.clone()[None])[0]
    if local is not None:
        draw = local.noise(len(message), 1, run.seed, request.round, client)
        message = (message.double() + torch.from_numpy(draw)).to(message.dtype)
    return Kept(request.round, request.base, 0, left_out, request.digest, rows, before, message)


def _refused(request: Request, why: str) -> Reply:
    return Reply(request.round, request.nonce, REFUSED, why)


def own_data(source: str, config: Config) -> Examples:
    """Returns a client's examples, which stay in this process.

    Args:
        source: a .npz file with x and y, a table, a folder of images, or a function that returns x and y,
            module:function or file.py:function.
        config: what the federation agreed on.
    """
    settings = federation_settings(config)
    kind = settings.kind
    if not is_own(source) or Path(source).is_file():
        return _finite(read_agreed(source, encoding(config), kind, settings.classes), source)
    code = own(source, "--data")
    found = given_data(code.once(SECONDS_TO_LOAD), source, kind)
    if isinstance(found, FederatedData):
        raise UserError(f"--data {source} must return one client's x and y, not those of several.")
    require_persons(found.train, encoding(config), source)
    return _finite(found.train, source)


def _finite(examples: Examples, source: str) -> Examples:
    """Returns the examples; raises UserError if a number among them is not finite."""
    for name, values in (("x", examples.x), ("y", examples.y)):
        if values.dtype.kind == "f":
            wrong = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
            if len(wrong):
                raise UserError(f"--data {source}: {len(wrong)} of {len(values)} examples have a number in {name} that "
                                f"is not finite, the first of them is number {wrong[0]}: mend them or leave them out."
                                )  # fmt: skip
    return examples
