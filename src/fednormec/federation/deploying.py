"""Files by which a federation runs as a service: units for systemd, and a Dockerfile."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fednormec.errors import UserError, known
from fednormec.federation.agreement import read_federation
from fednormec.federation.provision import CLIENTS

HERE = Path(__file__).parent
KINDS = ("systemd", "docker")
ELSEWHERE = Path("/srv/fednormec")  # where a client's folder is taken to lie on its own machine
DOCKERFILE = "Dockerfile"


def require_kinds(kinds: Sequence[str]) -> None:
    """Raises UserError if there is nothing to write of such a kind."""
    for kind in kinds:
        known("kind of service", kind, KINDS)


def write_services(folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Writes what runs the server and each client as a service; returns the files.

    Args:
        folder: folder of the federation.
        kinds: systemd, docker or both.
    """
    require_kinds(kinds)
    written = list[Path]()
    homes = [(folder, "")] + [
        (folder / CLIENTS / name, name) for name in read_federation(folder)["federation"]["clients"]
    ]
    for home, name in homes:
        for kind in dict.fromkeys(kinds):
            (home / kind).mkdir(exist_ok=True)
            written.append(_systemd(home, name) if kind == "systemd" else _docker(home))
    return written


def _systemd(home: Path, name: str) -> Path:
    """Writes the unit of the server, or of the client of this name."""
    role = "join" if name else "serve"
    where = ELSEWHERE / name if name else home.resolve()
    program = ELSEWHERE / "bin" / "fednormec" if name else _program()
    text = (HERE / f"{role}.service").read_text(encoding="utf-8")
    path = home / "systemd" / f"fednormec-{role}.service"
    path.write_text(text.format(folder=_path(where), program=_path(program), name=name), encoding="utf-8")
    return path


def _docker(home: Path) -> Path:
    path = home / "docker" / DOCKERFILE
    shutil.copyfile(HERE / DOCKERFILE, path)
    return path


def _program() -> Path:
    """Returns the command of this installation."""
    beside = Path(sys.executable).parent / "fednormec"
    return beside if beside.exists() else Path(shutil.which("fednormec") or beside)


def _path(path: Path) -> str:
    """Returns a path as units take it between quotes; raises UserError if it has a sign that they would misread.

    >>> _path(Path("/srv/50 % of it"))
    '/srv/50 %% of it'
    """
    if not set(str(path)).isdisjoint("\"'$\\\n\t"):
        raise UserError(
            f"systemd cannot be told of {path}: choose a folder without quotes, $, \\, tabs and line breaks."
        )
    return str(path).replace("%", "%%")
