"""Folder of a federation: the settings, the server's certificate, and for each client a folder to hand over."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from fednormec.config.datasets import targets_of
from fednormec.config.schema import Config, Section, dump, read
from fednormec.errors import UserError, known
from fednormec.federation.agreement import (
    KEYS,
    LOOPBACK,
    NAME,
    for_server,
    read_federation,
    require_host,
    require_names,
    split_address,
)
from fednormec.federation.fitting import fitted
from fednormec.federation.keys import (
    CA,
    CA_KEY,
    CLIENT_CERTIFICATE,
    CLIENT_KEY,
    SERVER_CERTIFICATE,
    Public,
    certified_hosts,
    fingerprint,
    for_roster,
    make_authority,
    make_request,
    make_server,
    private_key,
    public_bytes,
    public_key,
    read_request,
    sign_client,
)
from fednormec.files import replace_text

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
    trust: str | None = None,
) -> Path:
    """Makes the folder of a new federation; nothing is written over.

    Args:
        folder: the folder, which must be empty or missing.
        names: names of the clients.
        inputs: the shape of one example; none for a text.
        classes: number of classes; None: as the settings say, data.labels among them, or 10 where the loss compares
            with classes.
        address: where the server is found, host:port.
        config: the settings to begin with; None: the package's own, as `fitted` has them.
        targets: the shape of one example's target.
        tokens: whether inputs are whole numbers that name something.
        texts: whether inputs are texts.
        trust: whom clients trust, where the settings are the package's own: "local", "secagg", "central"; None: no
            privacy.
    """
    require_names(names)
    host, _ = split_address(address)
    own: Section = {"clients": list(names), "inputs": list(inputs), "address": address}
    own |= {"targets": list(targets)} if targets else {}
    own |= {"tokens": True} if tokens else {}
    own |= {"texts": True} if texts else {}
    own |= {} if classes is None else {"classes": classes}
    asked = fitted({"classes": CLASSES} | own, trust) if config is None else read(config)
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
        make_authority(folder)
        make_server(folder, [host, *(name for name in LOOPBACK if name != host)])
        if settings.test is not None:
            shutil.copy(beside / settings.test, folder / Path(settings.test).name)
            asked["federation"]["test"] = Path(settings.test).name
        replace_text(folder / NAME, _text(asked))
        _copy_code(code, beside, folder)
        for name in names:
            _hand_over(folder, name, code)
        if needs_keys(asked):
            _write_settings(folder, asked)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror or error}.") from error
    return folder


def add(folder: Path, name: str, request: Path | None = None) -> Path:
    """Puts one more client on the roster; returns its folder.

    That is another federation: all need the new federation.toml, and it begins a new run.

    Args:
        folder: folder of the federation.
        name: name of the client.
        request: signing request of a key that the client made itself; by default a key is made here.
    """
    config = read_federation(folder)
    config["federation"]["clients"] = [*config["federation"]["clients"], name]
    for_server(config, folder)  # raises UserError now if something does not fit together
    for path in (folder / CLIENTS / name, roster_file(folder, name)):
        if path.exists():
            raise UserError(f"{path} is there already: nothing was changed; remove it first.")
    key = None if request is None else _requested(request, name)
    made = _hand_over(folder, name, config.get("code", {}), key)
    _write_settings(folder, config)  # at last: what goes wrong before leaves the federation as it was
    return made


def remove(folder: Path, name: str) -> None:
    """Takes a client off the roster. That is another federation, as with `add`. What lies in its folder stays."""
    config = read_federation(folder)
    names = list(config["federation"]["clients"])
    known("client in federation.toml", name, names)
    config["federation"]["clients"] = [other for other in names if other != name]
    for_server(config, folder)  # raises UserError now if nobody is left
    roster_file(folder, name).unlink(missing_ok=True)
    _write_settings(folder, config)


def revoke(folder: Path, name: str) -> None:
    """Takes a client's key off the roster: whoever has it is refused, also by a server that runs. Its place stays."""
    known("client in federation.toml", name, list(read_federation(folder)["federation"]["clients"]))
    path = roster_file(folder, name)
    if not path.exists():
        raise UserError(f"{name} has no key on the roster: it was revoked before.")
    path.unlink()


def sign(folder: Path, request: Path) -> Path:
    """Puts the key of a signing request on the roster, in place of the one that its client had; returns the folder.

    Args:
        folder: folder of the federation.
        request: the request, which names a client of the federation.
    """
    config, (name, key) = read_federation(folder), read_request(request)
    known("client in federation.toml", name, list(config["federation"]["clients"]))
    private_key(folder / CA_KEY)  # raises UserError now if nothing can be signed
    old = folder / CLIENTS / name / CLIENT_KEY
    if old.exists() and fingerprint(private_key(old).public_key()) != fingerprint(key):
        old.unlink()  # nobody is let in with it any more; a memory that lies beside it stays
    made = _hand_over(folder, name, config.get("code", {}), key)
    if needs_keys(config):
        _write_settings(folder, config)
    return made


def renew(folder: Path, hosts: Sequence[str] = ()) -> list[Path]:
    """Makes new certificates for the keys that there are; returns the files, the server's and then one for each client.

    Args:
        folder: folder of the federation.
        hosts: names or addresses that the server's certificate is for, besides those that it has.
    """
    config = read_federation(folder)
    before = certified_hosts(folder / SERVER_CERTIFICATE)
    make_server(folder, [*map(require_host, hosts), *(host for host in before if host not in hosts)])
    made = [folder / SERVER_CERTIFICATE]
    for name in config["federation"]["clients"]:
        if roster_file(folder, name).exists():
            certificate = sign_client(folder, name, public_key(roster_file(folder, name)))
            (folder / CLIENTS / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            made.append(folder / CLIENTS / name / CLIENT_CERTIFICATE)
            made[-1].write_bytes(certificate)
    return made


def roster_file(folder: Path, name: str) -> Path:
    """Returns the file of a client's public key, which is missing if it was revoked."""
    return folder / KEYS / f"{name}.pub"


def _requested(request: Path, name: str) -> Public:
    named, key = read_request(request)
    if named != name:
        raise UserError(f"{request} is the request of {named}, not of {name}.")
    return key


def needs_keys(config: Config) -> bool:
    """Returns whether the clients' keys are part of what all agree on, as secure aggregation needs them."""
    return bool(config.get("privacy", {}).get("trust") == "secagg")


def _write_settings(folder: Path, config: Config) -> None:
    """Writes the settings, and the keys that are on the roster where they belong into them."""
    if needs_keys(config):
        files = (roster_file(folder, name) for name in config["federation"]["clients"])
        config["federation"]["keys"] = [for_roster(public_key(file)) if file.exists() else "" for file in files]
    replace_text(folder / NAME, _text(config))
    for client in (folder / CLIENTS).iterdir() if (folder / CLIENTS).is_dir() else ():
        if client.is_dir():
            shutil.copy(folder / NAME, client / NAME)


def _copy_code(code: Section, of: Path, to: Path) -> None:
    """Copies the files of the user's own code that all agreed on; what is installed as a package stays there."""
    for name in code:
        if (of / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(of / name, to / name)


def _hand_over(folder: Path, name: str, code: Section, key: Public | None = None) -> Path:
    """Makes what a client gets: the settings, the code, the authority, a certificate. The server keeps the public key.

    Its key is made here too, unless it has one. A client reads the code before it joins: nothing of it comes over the
    wire later.
    """
    private_key(folder / CA_KEY)  # raises UserError now if nothing can be signed
    client = folder / CLIENTS / name
    client.mkdir(parents=True, mode=0o700, exist_ok=True)
    if key is None:
        request = make_request(client, name)
        _, key = read_request(request)
        request.unlink()
    (client / CLIENT_CERTIFICATE).write_bytes(sign_client(folder, name, key))
    roster_file(folder, name).write_bytes(public_bytes(key))
    shutil.copy(folder / CA, client / CA)
    shutil.copy(folder / NAME, client / NAME)
    _copy_code(code, folder, client)
    return client


def has_key(client: Path) -> bool:
    """Returns whether a client's key was made here, and must leave with its folder."""
    return (client / CLIENT_KEY).exists()


def _text(config: Config) -> str:
    return "# What this federation agreed on; every party has the same.\n" + dump(config)
