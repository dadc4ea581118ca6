"""Session of a client: `join` takes part in a federation with one's own data; `explain` says what that means."""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fednormec.data import Examples
from fednormec.errors import UserError, visible
from fednormec.federation.agreement import Federation, for_client, listed, read_federation, split_address
from fednormec.federation.client import client_of, counts_of, longest_request, own_data, record_releases_of, together
from fednormec.federation.disclosure import besides, promise
from fednormec.federation.ending import keep, longest_ending, require_new_file
from fednormec.federation.expiry import Expiring
from fednormec.federation.keys import for_joining
from fednormec.federation.log import Log, Unlogged
from fednormec.federation.node import Server, Taking, take_part
from fednormec.federation.stages import own_key
from fednormec.files import Lines, replace_text, require_locks
from fednormec.privacy.records import AnyPlan, RecordPlan
from fednormec.privacy.statement import state

STATEMENT = "statement.txt"


class Joining(NamedTuple):
    """Options of `join`.

    Attributes:
        data: where the data are, as in `own_data`.
        name: name of the client; by default the folder's.
        address: where the server is; by default what federation.toml says.
        not_private: whether to take part though clients are not protected.
        keep_model: file in which the trained model is stored at the end; by default nowhere.
        log_file: file to which all notes are added; by default none.
        log_json: whether its lines are JSON.
        budget: the ε that all that leaves the data may come to, under whatever agreements; None: what this one
            promises.
    """

    data: str
    name: str | None = None
    address: str | None = None
    not_private: bool = False
    keep_model: Path | None = None
    log_file: Path | None = None
    log_json: bool = False
    budget: float | None = None


class Member(NamedTuple):
    """Client that could connect: its settings and its data were read and fit together.

    Attributes:
        name: its name.
        own: its examples.
        federation: the federation as it knows it.
        address: where the server is.
    """

    name: str
    own: Examples
    federation: Federation
    address: str

    @property
    def number(self) -> int:
        """Number of the client."""
        return list(self.federation.settings.clients).index(self.name)

    @property
    def promise(self) -> str:
        """Promise to this client, in words."""
        settings = self.federation.settings
        return promise(self.federation.plan, settings.share if settings.report else None)


def member(folder: Path, how: Joining) -> Member:
    """Returns the client whose folder this is; raises UserError if anything that is on this machine does not fit."""
    name, config = how.name or folder.resolve().name, read_federation(folder)
    try:
        own = own_data(how.data, config)
    except UserError as error:
        raise Unlogged(str(error)) from error
    federation = for_client(config, name, own, folder)
    address = how.address or federation.settings.address
    split_address(address)
    if how.keep_model is not None:
        require_new_file(how.keep_model)
    return Member(name, own, federation, address)


def join(folder: Path, how: Joining, stop: Callable[[], bool]) -> None:
    """Takes part in a federation as the client whose folder this is, until it is over or `stop` says so."""
    with Log(how.log_file, how.log_json) as log:
        require_locks()
        mine = member(folder, how)
        require_consent(mine.federation.plan, how.not_private)
        expiring = Expiring.of_client(folder, log)
        secured = for_joining(folder)
        log(mine.promise)
        say_what_left(folder, mine, how, log)
        lock = Lines(folder / "lock", new=not (folder / "lock").exists())
        try:
            take_part(
                Server(mine.address, secured), _taking(folder, how, mine, stop, log)._replace(now_and_then=expiring)
            )
        finally:
            write_statement(folder, mine, how, log)
            lock.close()


def _taking(folder: Path, how: Joining, mine: Member, stop: Callable[[], bool], log: Log) -> Taking:
    federation = mine.federation

    def end(said: bytes) -> None:
        if how.keep_model is not None:
            log(keep(how.keep_model, said, federation))

    answer = client_of(federation, mine.number, folder, log.warn, how.budget)
    most = max(longest_request(federation), longest_ending(federation))
    return Taking(federation.agreed, federation.terms, answer, most, stop, log, end)


def say_what_left(folder: Path, mine: Member, how: Joining, log: Log) -> None:
    """Says what has left the client's data; raises UserError if the agreement asks for more than may leave."""
    for counted in counts_of(mine.federation, folder, how.budget):
        left_before = counted.before()  # raises UserError now if the count is damaged
        if not counted.has_budget:
            continue
        if (trouble := counted.trouble()) is not None:
            raise UserError(trouble)
        if left_before or how.budget is not None:
            log.warn(counted.said())


def write_statement(folder: Path, mine: Member, how: Joining, log: Log) -> None:
    """Writes what this client may say to those whose records it has, once any of them was computed on."""
    computed_on = record_releases_of(mine.federation, folder, how.budget)
    if computed_on is None or not computed_on.count():
        return
    plan, silo = mine.federation.records, list(mine.federation.settings.clients)
    assert plan is not None
    here = besides(mine.federation.plan, mine.federation.settings.report)
    said = state(plan, computed_on.count(), besides=here, one_program=False)
    lines = [
        f"Privacy statement of {mine.name} for the records in its data",
        f"federation of {len(silo)} clients, agreement {mine.federation.agreed}",
        "",
        said.text,
        "",
        f"All that was computed on these records, under this and other agreements: {computed_on.said()}.",
        "",
        "Name, date, signature: ______________________________",
    ]
    replace_text(folder / STATEMENT, "\n".join(lines) + "\n")
    log(f"{folder / STATEMENT}: what may be said of the records here")


def explain(folder: Path, how: Joining) -> str:
    """Returns what `join` would do, for a person to read before it connects: nothing is sent."""
    mine = member(folder, how)
    clients = mine.federation.settings.clients
    rows = [
        textwrap.fill(visible(text), 100, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14)
        for name, text in _explained(folder, how, mine)
    ]
    terms = [visible(f"  {key} = {value}", 200) for key, value in sorted(mine.federation.terms.items())]
    return "\n".join([
        f"{mine.name} would take part in a federation of {len(clients)} clients ({listed(clients)}).", *rows,
        "The settings that all agree on:", *terms, "Nothing was connected, nothing was sent.",
    ])  # fmt: skip


def _explained(folder: Path, how: Joining, mine: Member) -> Iterator[tuple[str, str]]:
    federation, settings, plan = mine.federation, mine.federation.settings, mine.federation.plan
    algorithm, problem, run = federation.experiment.algorithm, federation.experiment.problem, federation.experiment.run
    yield "connects to", f"{mine.address}, by HTTPS, if it shows a certificate of this federation; to nobody else"
    shape = " x ".join(map(str, mine.own.x.shape[1:])) or "one text"
    held = f", of which {settings.share:.0%} are held out to report on" if settings.report else ""
    yield "data", f"{how.data}: {len(mine.own):,} examples ({shape} each){held}. They stay on this machine"
    size = algorithm.message_width(problem.dim)
    yield "computes", (f"in up to {run.rounds} rounds, from the server's model of {problem.dim:,} numbers, by "
                       f"{algorithm.name}; with the program on this machine: the server sends no code")  # fmt: skip
    yield "sends", f"one message for each request, {size:,} numbers; {_noise(plan)}"
    yield "promise", mine.promise
    yield from () if plan is None else besides(plan, settings.report)
    for file, digest in federation.experiment.config.get("code", {}).items():
        yield "code", f"{file}, sha256 {digest}: part of what all agreed on; read it"
    kept = "" if how.keep_model is None else f"; at the end the trained model in {how.keep_model}"
    counts = "the number of its messages" if federation.records is None else (
        f"counts of its messages and of rounds on its records, and at the end {STATEMENT},"
    )  # fmt: skip
    yield "writes", f"its memory of the training and {counts} in {folder} (private){kept}"
    if together(federation):
        own_key(federation, mine.number, folder)  # raises UserError if it is not the one that all agreed on
    for counted in counts_of(federation, folder, how.budget):
        if counted.has_budget:
            yield "so far", counted.trouble() or counted.said()
    yield "agreement", federation.agreed


def _noise(plan: AnyPlan | None) -> str:
    if plan is None:
        return "exact, without noise"
    if isinstance(plan, RecordPlan):
        (silo,) = plan.silos
        return (f"what follows from {plan.steps} local steps, each on a batch of about {silo.rate * silo.records:,.3g} "
                f"of {silo.records:,} records, with noise of std {silo.sum.noise_std * silo.sum.radius:.3g} on every "
                f"number of the sum of their gradients, none of which is longer than {plan.tau:.3g}")  # fmt: skip
    m = plan.mechanism
    said = f"Gaussian noise{'' if m.grid is None else ' on a grid'} of std {m.noise_std * m.radius:.3g} in every number"
    if m.protocol:
        return (f"before noise it is no longer than {m.radius:.3g}; it adds {said}, and masks that only the sum over "
                f"{m.min_survivors} clients or more takes off")  # fmt: skip
    who = "it adds" if m.trust == "local" else "the server, which sees the exact message, adds to the sum"
    return f"before noise it is no longer than {m.radius:.3g}; {who} {said}"


def require_consent(plan: AnyPlan | None, not_private: bool) -> None:
    """Raises UserError if the plan protects nobody, unless `not_private` says that this is wanted."""
    if not_private:
        return
    if plan is None:
        raise UserError("federation.toml has no [privacy]: the server would see every client's exact messages. Give "
                        "--not-private if that is what all agreed on.")  # fmt: skip
    if plan.total_norm:
        raise UserError("federation.toml has noise by total norm, which protects nobody: set privacy.noise_scale = "
                        "'per_coordinate', or give --not-private to try things out.")  # fmt: skip
    if not plan.secure:
        raise UserError("federation.toml has seeded noise, which whoever knows the seed can take off again: set "
                        "privacy.randomness = 'secure', or give --not-private to try things out.")  # fmt: skip
