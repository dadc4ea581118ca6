"""Who takes part, and with which key: `fednormec federation add`, `remove`, `request`, `sign`, `renew` and `revoke`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.federation import Folder, require_h11
from fednormec.errors import UserError, visible

Runs = Annotated[
    list[str] | None, typer.Option(help="Run folder of an earlier training that is not in DIR; may be repeated.")
]
ADD_HELP = """Put one more client on the roster. It is then another federation, which begins a new run.

All clients need the new federation.toml. What trainings so far have spent is spent: it is read from their ledgers and
added to what the new agreement will spend. Name those outside DIR with --run.

\b
Examples:
  fednormec federation add fed west                           its key is made here, in fed/clients/west
  fednormec federation add fed west --request west.csr        of a key that west made: fednormec federation request west
"""


def add(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The client's name.")],
    request: Annotated[str | None, typer.Option(help="A signing request of a key that it made itself.")] = None,
    run: Runs = None,
) -> None:
    require_h11()
    from fednormec.federation.provision import add as put

    made = put(Path(folder), name, None if request is None else Path(request))
    _say_what_to_send(Path(folder), name, made)
    _say_what_is_agreed(Path(folder), run)


REMOVE_HELP = """Take a client off the roster. It is then another federation, which begins a new run.

All clients need the new federation.toml. What trainings so far have spent is spent, as with `add`. To shut out a stolen
key and go on with the run, take `revoke`.

\b
Example:
  fednormec federation remove fed west
"""


def remove(folder: Folder, name: Annotated[str, typer.Argument(help="The client's name.")], run: Runs = None) -> None:
    require_h11()
    from fednormec.federation.provision import remove as take_off

    take_off(Path(folder), name)
    print(visible(f"{name} is off the roster"))
    _say_what_is_agreed(Path(folder), run)


REQUEST_HELP = """Make your own key, and a signing request. The key never leaves you.

The folder NAME gets client.key and client.csr. Send client.csr to the federation's operator, who answers with the files
for that folder.

\b
Example:
  fednormec federation request west
"""


def request(name: Annotated[str, typer.Argument(help="The client's name; a folder of that name is made.")]) -> None:
    require_h11()
    from fednormec.federation.agreement import require_names
    from fednormec.federation.keys import make_request

    require_names([name])
    folder = Path(name)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be made: {error.strerror or error}.") from error
    print(visible(f"{make_request(folder, name)}: send it to the federation's operator"))
    print(visible(f"{folder}: keep it; the files that come back belong into it"))


SIGN_HELP = """Put the key of a signing request on the roster. It replaces the one that its client had.

\b
Example:
  fednormec federation sign fed north.csr
"""


def sign(
    folder: Folder, file: Annotated[str, typer.Argument(metavar="REQUEST", help="The client's signing request.")]
) -> None:
    require_h11()
    from fednormec.federation.agreement import read_federation
    from fednormec.federation.provision import needs_keys
    from fednormec.federation.provision import sign as signed

    made = signed(Path(folder), Path(file))
    _say_what_to_send(Path(folder), made.name, made)
    if needs_keys(read_federation(Path(folder))):
        _say_what_is_agreed(Path(folder), None)


RENEW_HELP = """Make new certificates for the keys that there are. They hold for a year.

Restart `serve` to show the new one. Clients need theirs before the old one expires; keys and settings stay.

\b
Examples:
  fednormec federation renew fed
  fednormec federation renew fed --address fl.example.org     the server has one more name
"""


def renew(
    folder: Folder,
    address: Annotated[
        list[str] | None, typer.Option(help="A name or address of the server's, besides those it has; may be repeated.")
    ] = None,
) -> None:
    require_h11()
    from fednormec.federation.provision import renew as made_anew

    server, *clients = made_anew(Path(folder), address or ())
    print(visible(f"{server}: restart serve to use it"))
    for file in clients:
        print(visible(f"{file}: for {file.parent.name}"))


REVOKE_HELP = """Shut out a client's key at once, also with a server that runs. Its place on the roster stays empty.

It can come back with a new key: fednormec federation sign.

\b
Example:
  fednormec federation revoke fed west
"""


def revoke(folder: Folder, name: Annotated[str, typer.Argument(help="The client's name.")]) -> None:
    require_h11()
    from fednormec.federation.provision import revoke as shut_out

    shut_out(Path(folder), name)
    print(visible(f"{name} is shut out; a server that runs notices within seconds"))


def _say_what_is_agreed(folder: Path, runs: list[str] | None) -> None:
    """Print who needs the new agreement, how it begins, and what it costs beside what was spent."""
    from fednormec.federation.agreement import listed, read_federation
    from fednormec.federation.bookkeeping import spent_and_to_come

    names = listed(read_federation(folder)["federation"]["clients"])
    print(visible(f"{folder / 'federation.toml'}: send it to {names}; it begins a new run: serve --out NEW"))
    for said in spent_and_to_come(folder, [Path(run) for run in runs or ()]):
        print(visible(said))


def _say_what_to_send(folder: Path, name: str, made: Path) -> None:
    from fednormec.federation.provision import has_key

    if has_key(made):
        print(visible(f"{made}: for {name}; send it there by a way that both trust, and delete it here"))
    else:
        print(visible(f"{made}: for {name}; its files belong beside the key that {name} made"))


COMMANDS: dict[Callable[..., None], str] = {
    add: ADD_HELP,
    remove: REMOVE_HELP,
    request: REQUEST_HELP,
    sign: SIGN_HELP,
    renew: RENEW_HELP,
    revoke: REVOKE_HELP,
}
