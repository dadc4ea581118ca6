"""What an operator does and sees: waiting for clients, certificates that end, logs, and mistakes on the way."""

import datetime
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from clock import Clock
from command import Command
from federated import CLASSES, FEATURES, NAMES, Network, config, data, party, request_for

from fednormec.config.schema import dump
from fednormec.errors import Stopped, UserError
from fednormec.federation import client, expiry, keys, sessions
from fednormec.federation.agreement import Federation, for_server, read_federation, split_address
from fednormec.federation.client import client_of
from fednormec.federation.disclosure import HTTPS
from fednormec.federation.exchange import ClientStatus
from fednormec.federation.expiry import Expiring
from fednormec.federation.joining import Joining, join
from fednormec.federation.log import Log
from fednormec.federation.provision import add, make, renew, revoke, sign
from fednormec.federation.sessions import Serving, train_over
from fednormec.privacy.ledger import read_ledger

SECURE = {"noise_std": 2.0, "delta": 1e-5, "trust": "local", "randomness": "secure"}


def made(folder: Path, **sections: object) -> Path:
    (folder / "asked.toml").write_text(dump(config(**{"privacy": SECURE, **sections})))
    return make(folder / "fed", NAMES, [FEATURES], CLASSES, "localhost:9443", folder / "asked.toml")


class InProcess:
    """An exchange with clients in this process, who are here when a test says so."""

    transport, command = HTTPS, "fednormec federation serve"

    def __init__(self, fed: Path, here: Callable[["InProcess"], set[int]]) -> None:
        self.names, self.fed, self._here = tuple(NAMES), fed, here
        self.sent = self.received = self.rounds = 0
        asked = read_federation(fed)
        self.clients = [
            client_of(party(asked, i), i, fed / "clients" / name, lambda said: None) for i, name in enumerate(NAMES)
        ]

    @contextmanager
    def opened(self, federation: Federation) -> Iterator["InProcess"]:
        yield self

    def here(self) -> set[int]:
        return self._here(self)

    def status(self) -> list[ClientStatus]:
        return []

    def ask(self, bodies: Mapping[int, bytes], deadline: float, stop: object = None) -> dict[int, bytes]:
        self.rounds += 1
        return {client: self.clients[client](body) for client, body in bodies.items() if client in self.here()}

    def finish(self, said: bytes) -> None:
        pass


def served(
    fed: Path, exchange: InProcess, stop: Callable[[], bool] = lambda: False, **how: object
) -> dict[str, object]:
    with Log() as log:
        return train_over(exchange.opened, fed, Serving(quiet=True, **how), stop, log)


# who must be here


def test_below_wait_for_nothing_is_paid(tmp_path):
    """At the start, and in every later round."""
    fed, ledger = made(tmp_path, participation={"name": "full"}), tmp_path / "fed" / "run" / "ledger.jsonl"
    paid: list[int] = []

    def here(exchange: InProcess) -> set[int]:
        return {0, 1} if len(paid) < 3 or exchange.rounds < 3 else {0}

    def stop() -> bool:
        paid.append(read_ledger(ledger).rounds if ledger.exists() else 0)
        return len(paid) >= 8

    waits = InProcess(fed, lambda exchange: {0})
    with pytest.raises(Stopped):
        served(fed, waits, lambda: paid.append(0) or len(paid) > 3, wait_for=2)
    assert waits.rounds == 0 and not ledger.exists()
    goes = InProcess(fed, here)
    with pytest.raises((Stopped, KeyboardInterrupt)):
        served(fed, goes, stop, wait_for=2)
    assert goes.rounds == 3 and read_ledger(ledger).rounds == 3 and paid[-1] == 3


def test_a_resumed_training_does_not_wait_for_ever_for_who_does_not_come_back(tmp_path, monkeypatch, capsys):
    fed = made(tmp_path, participation={"name": "full"})
    exchange = InProcess(fed, lambda exchange: {0, 1, 2, 3} if exchange.rounds < 2 else set())
    calls: list[int] = []
    with pytest.raises((Stopped, KeyboardInterrupt)):
        served(fed, exchange, lambda: calls.append(1) or len(calls) > 5)
    clock = Clock()
    monkeypatch.setattr(sessions, "time", clock)
    again = InProcess(fed, lambda exchange: {1})
    summary = served(fed, again, lambda: clock.advance(10.0) or False)
    assert summary["rounds"] == 6
    said = capsys.readouterr().err
    assert "waiting for clients: 1 of 4 are here" in said and "going on with 1 of 4 clients" in said
    assert clock.now >= 1090.0


def test_nobody_waits_for_a_client_whose_key_was_revoked(tmp_path):
    fed = made(tmp_path, participation={"name": "full"})
    revoke(fed, NAMES[3])
    assert served(fed, InProcess(fed, lambda exchange: {0, 1, 2}))["rounds"] == 6
    for name in NAMES[:3]:
        revoke(fed, name)
    with pytest.raises(UserError, match="all were revoked"):
        served(fed, InProcess(fed, lambda exchange: set()), out=fed / "second")


def test_a_second_training_says_what_the_first_has_spent(tmp_path, capsys):
    """Also one in a folder within a folder."""
    fed = made(tmp_path, participation={"name": "full"})
    everyone = InProcess(fed, lambda exchange: {0, 1, 2, 3})
    served(fed, everyone, out=fed / "runs" / "first")
    assert "have spent" not in capsys.readouterr().err
    served(fed, everyone, out=fed / "runs" / "second")
    assert "trainings so far have spent ε ≤ " in capsys.readouterr().err


# certificates


def ending(folder: Path, name: str, days: float) -> None:
    """Puts a certificate for the server's key in the place of one, which holds for so many days."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "VALID", datetime.timedelta(days=days))
        keys.make_server(folder, ["localhost"])
    if name == "client.crt":
        shutil.copy(folder / "server.crt", folder / "clients" / NAMES[0] / name)


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_session_says_each_day_that_a_certificate_soon_ends(tmp_path, monkeypatch, side):
    fed, clock = made(tmp_path), Clock()
    monkeypatch.setattr(expiry, "time", clock)
    home = fed if side == "server" else fed / "clients" / NAMES[0]
    look = Expiring.of_server if side == "server" else Expiring.of_client
    log = Log()
    expiring = look(home, log)
    assert not log.lines
    ending(fed, f"{side}.crt", 29)
    expiring()
    assert not log.lines  # it was looked at a moment ago
    for days in (1, 2, 3):
        clock.advance(86_400.0)
        expiring()
        expiring()
        assert len(log.lines) == days and f"{side}'s certificate" in log.lines[-1].message
        assert "expires on" in log.lines[-1].message and log.lines[-1].level == "WARNING"
    again = Log()
    look(home, again)
    assert "expires on" in again.lines[0].message
    ending(fed, f"{side}.crt", -0.5)
    with pytest.raises(UserError, match="expired on"):
        look(home, again)


# logs


def test_no_log_has_anything_of_a_clients_data(tmp_path):
    """What a mistake in the data quotes is for the terminal."""
    fed = made(tmp_path)
    (tmp_path / "mine.csv").write_text("a,b,c,d,e,label\n1,2,3,4,John Smith,0\n")
    (tmp_path / "load.py").write_text("def load():\n    raise ValueError('John Smith, 1961-03-04')\n")
    for source in (tmp_path / "mine.csv", f"{tmp_path / 'load.py'}:load"):
        log = tmp_path / "join.log"
        with pytest.raises(UserError) as found:
            join(fed / "clients" / NAMES[0], Joining(str(source), log_file=log, log_json=True), lambda: False)
        assert source == tmp_path / "mine.csv" or "John Smith" in str(found.value)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert lines[-1]["message"] == "the data cannot be used; the terminal says why"
        assert "John" not in log.read_text()


# mistakes


def test_a_roster_that_cannot_be_changed_stays_as_it_was(tmp_path):
    fed = made(tmp_path)
    before = (fed / "federation.toml").read_bytes()
    (fed / "clients" / "client-1.zip").write_text("packed, and left here")
    (fed / "authority.key").rename(tmp_path / "authority.key")
    for change in (lambda: add(fed, "up"), lambda: sign(fed, keys.make_request(asking(tmp_path), NAMES[0]))):
        with pytest.raises(UserError, match="authority.key holds no private key"):
            change()
    assert (fed / "federation.toml").read_bytes() == before
    assert (fed / "clients" / NAMES[0] / "client.key").exists()
    (tmp_path / "authority.key").rename(fed / "authority.key")
    add(fed, "up")
    assert read_federation(fed)["federation"]["clients"] == [*NAMES, "up"]
    assert (
        read_federation(fed / "clients" / "up") == read_federation(fed / "clients" / NAMES[0]) == read_federation(fed)
    )


def asking(folder: Path) -> Path:
    (folder / "asking").mkdir(exist_ok=True)
    return folder / "asking"


@pytest.mark.parametrize("missing", ["server.crt", "ca.crt"])
def test_certificates_that_are_not_there_get_a_sentence(tmp_path, missing):
    fed = made(tmp_path)
    (fed / missing).unlink()
    with pytest.raises(UserError, match=f"{missing} holds no certificate that can be used"):
        renew(fed)


@pytest.mark.parametrize("host", ["münchen.example", "fl..example.org", "", "a b", "-x", "x" * 64, "[]", "a/b", "x:y"])
def test_what_is_no_hosts_name_gets_a_sentence(tmp_path, fednormec_: Command, host):
    with pytest.raises(UserError):
        split_address(f"{host}:9443")
    said = fednormec_("federation", "init", tmp_path / "fed", "--not-private", "--address", f"{host}:9443")
    assert said.code == 2 and "Traceback" not in said.err and not (tmp_path / "fed").exists()
    fed = made(tmp_path)
    said = fednormec_("federation", "renew", fed, "--address", host)
    assert said.code == 2 and "is no host's name" in said.err


@pytest.mark.parametrize("address", ["localhost:1", "fl.example.org.:2", "10.0.0.1:3", "[::1]:4", "::1:5", "my_host:6"])
def test_what_is_a_hosts_name_is_taken(address):
    assert split_address(address)[1] == int(address[-1])


def test_a_file_in_the_place_of_a_folder_gets_a_sentence(tmp_path, monkeypatch, fednormec_: Command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "west").write_text("")
    said = fednormec_("federation", "request", "west")
    assert said.code == 2 and "the folder west cannot be made" in said.err


def test_how_often_clients_report_is_part_of_what_all_agreed_on(tmp_path):
    def agreed(every: int, report: bool) -> str:
        run = {"rounds": 6, "seed": 3, "dtype": "float64", "evaluate_every": every}
        federation = config()["federation"] | ({"report": True} if report else {})
        return for_server(config(run=run, federation=federation), tmp_path).agreed

    assert agreed(2, True) != agreed(3, True)
    assert agreed(2, False) == agreed(3, False)


def test_data_from_a_module_in_the_working_directory(tmp_path, monkeypatch, fednormec_: Command):
    """--data hospital:load finds hospital.py here, and is said to."""
    fed = made(tmp_path)
    x, y = data()[0]
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    (tmp_path / "a_hospital.py").write_text(
        "import numpy\ndef load():\n    found = numpy.load('mine.npz')\n    return found['x'], found['y']\n"
    )
    monkeypatch.chdir(tmp_path)
    said = fednormec_("federation", "join", fed / "clients" / NAMES[0], "--data", "a_hospital:load", "--explain")
    assert said.code == 0 and "a_hospital:load: 8 examples" in said.out


def test_a_hostile_server_fills_no_disk_with_trainings(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "MOST_TRAININGS", 3)
    network = Network(config(privacy=SECURE), tmp_path)
    for number in range(6):
        request = request_for(network, 1, 0, sends=False)._replace(run=f"a{number}")
        assert (network.clients[0](request).status == "done") == (number < 3)
    assert network.clients[0](request_for(network, 2, 1)._replace(run="a0")).status == "done"
    assert len(list((tmp_path / NAMES[0]).glob("memory-*"))) == 3
    assert time.monotonic() > 0
