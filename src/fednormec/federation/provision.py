"""Folder of a federation: the settings, the server's certificate, and for each client a folder to hand over."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from fednormec.config.datasets import targets_of
from fednormec.config.schema import Config, Section, dump, read
from fednormec.errors import UserError
from fednormec.federation.agreement import (
    KEYS,
    LOOPBACK,
    NAME,
    for_server,
    read_federation,
    require_names,
    split_address,
)
from fednormec.federation.keys import CA, NODE_PUBLIC, make_client, make_server, public_key
from fednormec.files import replace_text

TEMPLATE = Path(__file__).with_name(NAME)
CLIENTS = "clients"
CLASSES = 10


def make(
    folder: Path,
    names: Sequence[str],
    inputs: Sequence[int],
    classes: int | None,
    address: str,
    config: Path | None,
    targets: Sequence[int] = (),
    tokens: bool = False,
    texts: bool = False,
) -> Path:
    """Makes the folder of a new federation; nothing is written over.

    Args:
        folder: the folder, which must be empty or missing.
        names: names of the clients.
        inputs: the shape of one example; none for a text.
        classes: number of classes; None: as the settings say, data.labels among them, or 10 where the loss compares
            with classes.
        address: where the server is found, host:port.
        config: the settings to begin with; by default the package's own.
        targets: the shape of one example's target.
        tokens: whether inputs are whole numbers that name something.
        texts: whether inputs are texts.
    """
    require_names(names)
    host, _ = split_address(address)
    asked = read(config or TEMPLATE)
    own: Section = {"clients": list(names), "inputs": list(inputs), "address": address}
    own |= {"targets": list(targets)} if targets else {}
    own |= {"tokens": True} if tokens else {}
    own |= {"texts": True} if texts else {}
    own |= {} if classes is None else {"classes": classes}
    asked["federation"] = asked.get("federation", {}) | own
    if targets_of(asked) == "classes":
        labels = asked.get("data", {}).get("labels")
        asked["federation"].setdefault("classes", len(labels) if isinstance(labels, list) else CLASSES)
    beside = folder if config is None else config.parent
    found = for_server(asked, beside)  # raises UserError now if something does not fit together
    found.plan  # noqa: B018  likewise if no noise keeps to [privacy]
    settings, code = found.settings, found.experiment.config.get("code", {})
    asked |= {"code": code} if code else {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: nothing was changed; choose a new folder.")
        (folder / KEYS).mkdir()
        make_server(folder, [host, *(name for name in LOOPBACK if name != host)])
        if settings.test is not None:
            shutil.copy(beside / settings.test, folder / Path(settings.test).name)
            asked["federation"]["test"] = Path(settings.test).name
        replace_text(folder / NAME, _text(asked))
        _copy_code(code, beside, folder)
        for name in names:
            _hand_over(folder, name, code)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror or error}.") from error
    return folder


def add(folder: Path, name: str, key: Path | None = None) -> Path | None:
    """Puts one more client on the roster; returns its folder, or None if it has a key pair already.

    That is another federation: all need the new federation.toml, and it begins a new run.

    Args:
        folder: folder of the federation.
        name: name of the client.
        key: public key of a pair that the client made itself; by default a pair is made here.
    """
    config = read_federation(folder)
    config["federation"]["clients"] = [*config["federation"]["clients"], name]
    for_server(config, folder)  # raises UserError now if something does not fit together
    for path in (folder / CLIENTS / name, folder / KEYS / f"{name}.pub"):
        if path.exists():
            raise UserError(f"{path} is there already: nothing was changed; remove it first.")
    if key is not None:
        public_key(key)
        shutil.copy(key, folder / KEYS / f"{name}.pub")
    replace_text(folder / NAME, _text(config))
    for client in (folder / CLIENTS).iterdir() if (folder / CLIENTS).is_dir() else ():
        shutil.copy(folder / NAME, client / NAME)
    return _hand_over(folder, name, config.get("code", {})) if key is None else None


def _copy_code(code: Section, of: Path, to: Path) -> None:
    """Copies the files of the user's own code that all agreed on; what is installed as a package stays there."""
    for name in code:
        if (of / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(of / name, to / name)


def _hand_over(folder: Path, name: str, code: Section) -> Path:
    """Makes what a client gets: the settings, the code, the authority, its key pair. The server keeps the public key.

    A client reads the code before it joins: nothing of it comes over the wire later.
    """
    client = folder / CLIENTS / name
    client.mkdir(parents=True, mode=0o700)
    make_client(client)
    shutil.copy(folder / CA, client / CA)
    shutil.copy(folder / NAME, client / NAME)
    _copy_code(code, folder, client)
    shutil.copy(client / NODE_PUBLIC, folder / KEYS / f"{name}.pub")
    return client


def _text(config: Config) -> str:
    return "# What this federation agreed on; every party has the same.\n" + dump(config)
