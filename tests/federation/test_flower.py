"""Flower as the transport: the same training, who is believed to be who, and what a gateway gives to an app that lies.
Nodes and their owners are in this process; stock SuperLinks and SuperNodes are tried in flower_processes.py."""

import grp
import os
import re
import socket
import stat
import tempfile
import threading
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from clock import Clock
from command import Command, sentence
from federated import DIM, LOCAL, NAMES, PRIVATE, ROUNDS, Network, config, data, in_process
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fednormec.config.schema import Config, dump
from fednormec.errors import UserError
from fednormec.federation import keys
from fednormec.federation.agreement import for_server, read_federation
from fednormec.federation.flower import carrying, gateway, nodes
from fednormec.federation.flower.app import asked_for, write_app
from fednormec.federation.flower.carrying import HEAD, carry
from fednormec.federation.flower.client_app import answered, client_app
from fednormec.federation.flower.gateway import Door, answer, desk_of, opened
from fednormec.federation.flower.hello import hello, introduced, recognised
from fednormec.federation.flower.nodes import Agreed, Nodes
from fednormec.federation.flower.server_app import GridPost, roster_keys, server_app, train
from fednormec.federation.joining import Joining
from fednormec.federation.log import Log
from fednormec.federation.messages import (
    DONE,
    OVER,
    REFUSED,
    REPORT,
    Refused,
    Request,
    framed,
    read_reply,
    request_bytes,
    unframed,
)
from fednormec.federation.provision import make, revoke, roster_file
from fednormec.federation.releases import Releases

RUN = 7
SECURE = {"noise_std": 5.0, "trust": "local", "randomness": "secure"}
Answers = Callable[[bytes, int, int], bytes]


def made(folder: Path, asked: Config) -> Path:
    """A federation's folder, with the data of each client in the client's."""
    (folder / "asked.toml").write_text(dump(asked | {"federation": {"clients": [], "inputs": [], "deadline": 20.0}}))
    fed = make(folder / "fed", NAMES, asked["federation"]["inputs"], 3, "localhost:9443", folder / "asked.toml")
    for name, (x, y) in zip(NAMES, data(), strict=True):
        np.savez(fed / "clients" / name / "data.npz", x=x, y=y)
    return fed


def desk(fed: Path, name: str, **given: Any) -> gateway.Desk:
    client = fed / "clients" / name
    return desk_of(client, Joining(str(client / "data.npz"), **{"not_private": True} | given), Log())


class FakePost:
    """A Grid in this process: each node is a function from a request to its answer, or None while it cannot answer."""

    def __init__(self, *answers: Answers | None, first: int = 100) -> None:
        self.there: dict[int, Answers | None] = {first + i: answer for i, answer in enumerate(answers)}
        self.pushed: list[tuple[int, bytes]] = []
        self._answers = dict[str, bytes | None]()

    def nodes(self) -> Collection[int]:
        return set(self.there)

    def push(self, node: int, body: bytes, seconds: float) -> str | None:
        name = f"message {len(self.pushed)}"
        self.pushed.append((node, body))
        answers = self.there.get(node)
        self._answers[name] = None if answers is None else answers(body, RUN, node)
        return name

    def pull(self, sent: Collection[str]) -> Mapping[str, bytes | None]:
        return {name: self._answers[name] for name in sent if name in self._answers}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Nobody sleeps; the clock of the server's nodes goes on with every look at it."""
    clock = Clock()

    def look() -> float:
        clock.advance(0.3)
        return clock.now

    monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=look, sleep=lambda seconds: None))
    return clock


def request_to(fed: Path, at: float = 0.1, **changed: Any) -> Request:
    agreed = for_server(read_federation(fed), fed).agreed
    model = torch.full((DIM,), at, dtype=torch.float64)
    return Request("a", agreed, 1, 0, True, b"n" * 16, model)._replace(**changed)


# the same training


def model_of(fed: Path) -> torch.Tensor:
    return torch.cat([t.flatten() for _, t in sorted(load_file(fed / "run" / "model.safetensors").items())])


def assert_trained(fed: Path, asked: Config, folder: Path) -> None:
    """The same bits as with clients in this process and nothing between them; and what an engine without a wire gives,
    which adds in another order."""
    named = for_server(read_federation(fed), fed).experiment.problem.named
    folder.mkdir()
    *_, last = Network(asked, folder).rounds()
    assert torch.equal(model_of(fed), torch.cat([t.flatten() for _, t in sorted(named(last.x).items())]))
    if asked.get("privacy", {}).get("trust") != "local":  # there clients draw their own
        expected = torch.cat([t.flatten() for _, t in sorted(named(in_process(asked)[-1].x).items())])
        torch.testing.assert_close(model_of(fed), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("privacy", [None, PRIVATE, LOCAL])
def test_over_flowers_nodes_it_trains_as_in_process(tmp_path, privacy):
    asked = config() | ({} if privacy is None else {"privacy": privacy})
    fed = made(tmp_path, asked)
    post = FakePost(*(desk(fed, name).answer for name in NAMES))
    summary = train(post, RUN, {"folder": str(fed), "not-private": True})
    assert (summary["status"], summary["rounds"], summary["clients"]) == ("done", ROUNDS, len(NAMES))
    assert_trained(fed, asked, tmp_path / "other")
    if privacy is not None:
        assert "Flower: a SuperLink and SuperNodes" in " ".join((fed / "run" / "privacy.txt").read_text().split())


@pytest.mark.long
def test_an_interrupted_training_goes_on_in_another_run(tmp_path):
    """A run of Flower's that failed: the next one finds the checkpoint, and clients know their memories."""
    asked = config(participation={"name": "full"})
    fed = made(tmp_path, asked)
    answers = [desk(fed, name).answer for name in NAMES]
    asked_for_training = 0

    def dies(body: bytes, run: int, node: int) -> bytes:
        nonlocal asked_for_training
        asked_for_training += unframed(body)[0]["kind"] == "train"
        if asked_for_training == 4:
            raise ZeroDivisionError
        return answers[0](body, run, node)

    settings = {"folder": str(fed), "not-private": True}
    with pytest.raises(ZeroDivisionError):
        train(FakePost(dies, *answers[1:]), RUN, settings)
    summary = train(FakePost(*answers, first=500), RUN, settings)
    assert summary["rounds"] == ROUNDS
    assert_trained(fed, asked, tmp_path / "other")


# the gateway


@contextmanager
def running(fed: Path, name: str, folder: Path, **given: Any) -> Iterator[tuple[str, list[bool]]]:
    """A gateway in a thread: its socket, and what it returns at its end."""
    path, ends, stop = folder / f"{name}.sock", list[bool](), threading.Event()
    client = fed / "clients" / name
    how = Joining(str(client / "data.npz"), not_private=True, **given)
    thread = threading.Thread(target=lambda: ends.append(answer(client, how, Door(path), stop.is_set)))
    thread.start()
    while not (path.exists() or not thread.is_alive()):
        thread.join(0.01)
    try:
        yield str(path), ends
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
        assert not path.exists()


@pytest.mark.long
def test_gateways_answer_through_their_sockets_until_it_is_over(tmp_path):
    fed = made(tmp_path, config(privacy=SECURE, participation={"name": "full"}))
    with (
        running(fed, NAMES[0], tmp_path, keep_model=tmp_path / "kept.safetensors") as (first, over),
        running(fed, NAMES[1], tmp_path) as (second, _),
        running(fed, NAMES[2], tmp_path) as (third, _),
        running(fed, NAMES[3], tmp_path) as (fourth, _),
    ):
        assert stat.S_IMODE(Path(first).stat().st_mode) == 0o600
        sockets = (first, second, third, fourth)
        carried = [lambda body, run, node, path=path: carry(path, body, run, node) for path in sockets]
        summary = train(FakePost(*carried), RUN, {"folder": str(fed)})
    assert summary["rounds"] == ROUNDS and over == [True]
    assert (tmp_path / "kept.safetensors").read_bytes() == (fed / "run" / "model.safetensors").read_bytes()
    agreed = for_server(read_federation(fed), fed).agreed
    for name in NAMES:
        assert Releases(fed / "clients" / name, agreed).count() == ROUNDS
        assert list((fed / "clients" / name).glob("memory-*.safetensors"))


def raw(path: str, content: bytes) -> bytes:
    """What a gateway says to these bytes, whatever they are."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
        wire.settimeout(20)
        wire.connect(path)
        wire.sendall(content)
        wire.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: wire.recv(65536), b""))


def test_an_app_that_lies_gets_nothing_from_a_gateway(tmp_path, capsys):
    """Whatever it asks, and however it breaks what it sends: a refusal, and the gateway goes on."""
    fed = made(tmp_path, config(privacy=SECURE, participation={"name": "full"}))
    right = request_bytes(request_to(fed))
    lies = {
        "other settings": request_bytes(request_to(fed, agreed="0" * 32)),
        "no training is called that": request_bytes(request_to(fed, run="../../x")),
        "a memory that is not here": request_bytes(request_to(fed, base=3)),
        "does not let a client report": request_bytes(request_to(fed), REPORT),
        "more vectors": right + b"\0" * 8,
        "is not finite": request_bytes(request_to(fed, at=float("nan"))),
        "nobody knows what is asked for": framed({"kind": "data"}),
        "it is no message": b"give me the data",
    }
    with running(fed, NAMES[0], tmp_path) as (path, ends):
        for why, body in lies.items():
            said, vectors = unframed(carry(path, body, RUN, 100))
            assert said["status"] != DONE and vectors == b"" and why in (said["why"] or "a memory that is not here")
        long = raw(path, HEAD.pack(RUN, 100, 2**31))  # of which nothing is read
        assert read_reply(long[4:], DIM, torch.float64).status == REFUSED
        for broken in (b"", b"\0" * 7, HEAD.pack(RUN, 100, len(right)) + right[:50]):
            assert raw(path, broken) == b""
        assert Releases(fed / "clients" / NAMES[0], request_to(fed).agreed).count() == 0
        assert read_reply(carry(path, right, RUN, 100), DIM, torch.float64).status == DONE
    assert ends == [False]
    said = capsys.readouterr().err
    assert "a request has" in said and "the other side ended it" in said


@pytest.mark.long
def test_an_app_gets_no_more_messages_than_the_budget_pays_for(tmp_path):
    """Whichever nodes, runs and trainings it makes up: the gateway counts."""
    fed = made(tmp_path, config(privacy=SECURE, participation={"name": "full"}))
    with running(fed, NAMES[0], tmp_path) as (path, _):
        replies = [
            read_reply(
                carry(path, request_bytes(request_to(fed, at=float(i), run=f"a{i % 3}")), i, i), DIM, torch.float64
            )
            for i in range(3 * ROUNDS)
        ]
    assert [reply.status for reply in replies] == [DONE] * ROUNDS + [REFUSED] * 2 * ROUNDS
    assert "budget" in replies[-1].why


@given(body=st.binary(max_size=200))
def test_no_bytes_end_what_answers(tmp_path_factory, body):
    answers = _desk_once(tmp_path_factory)
    said, _ = unframed(answers(body, RUN, 1), 2**20)
    assert said.get("status") == REFUSED or "proof" in said


def _desk_once(tmp_path_factory: pytest.TempPathFactory, kept: list[Answers] = []) -> Answers:  # noqa: B006
    if not kept:
        kept.append(desk(made(tmp_path_factory.mktemp("fuzz"), config()), NAMES[0]).answer)
    return kept[0]


def test_a_gateway_wants_consent_and_says_what_flower_shows(tmp_path, capsys):
    fed = made(tmp_path, config(privacy=PRIVATE))
    with pytest.raises(UserError, match="--not-private"):
        desk(fed, NAMES[0], not_private=False)
    desk(fed, NAMES[0])
    assert "whoever runs them, or may start a run on them, sees what the server sees" in capsys.readouterr().err


def test_a_socket_is_opened_where_none_is(tmp_path):
    path = tmp_path / "gateway.sock"
    with opened(path), pytest.raises(UserError, match="another gateway answers"), opened(path):
        pass
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(path))
    left.close()
    with opened(path) as door:  # what a kill left behind is in nobody's way
        assert door.getsockname() == str(path)
    path.write_text("mine")
    with pytest.raises(UserError, match="no socket"), opened(path):
        pass
    with pytest.raises(UserError, match="give --socket a shorter one"), opened(tmp_path / ("x" * 200)):
        pass
    with pytest.raises(UserError, match="there is no nobody-of-that-name"), opened(path, "nobody-of-that-name"):
        pass
    with pytest.raises(UserError, match="no gateway answers at"):
        carry(str(tmp_path / "none.sock"), b"", 1, 1)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextmanager
def as_user(user: int, group: int) -> Iterator[None]:
    """Does what is within as another user."""
    mine, groups = (os.geteuid(), os.getegid()), os.getgroups()
    os.setgroups([])
    os.setegid(group)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(mine[0])
        os.setegid(mine[1])
        os.setgroups(groups)


def test_secure_aggregation_wants_a_gateway(tmp_path: Path) -> None:
    """Its secrets stay in one process from stage to stage."""
    fed = made(tmp_path, config(privacy={"noise_std": 1.0, "trust": "secagg", "min_survivors": 3}))
    node = {"folder": str(fed / "clients" / NAMES[0]), "data": str(fed / "clients" / NAMES[0] / "data.npz")}
    with pytest.raises(UserError, match="start `fednormec federation answer`"):
        answered(b"", 1, 1, node, {})


def test_a_group_may_reach_the_socket(open_folder):
    path = open_folder / "a.sock"
    with opened(path, grp.getgrgid(os.getgid()).gr_name):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_a_group_that_cannot_get_to_the_socket_is_a_mistake(open_folder):
    """The folder of a client is for its owner alone."""
    (open_folder / "north").mkdir(mode=0o700)
    for path in (open_folder / "north" / "gateway.sock", open_folder / "north" / "sockets" / "gateway.sock"):
        said = f"no group can reach {path}, since {open_folder / 'north'} is for its owner alone: give --socket"
        with pytest.raises(UserError, match=re.escape(said)), opened(path, grp.getgrgid(os.getgid()).gr_name):
            pass


ROOT_ALONE = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone becomes others")


@ROOT_ALONE
def test_a_socket_is_given_to_no_group_that_one_is_not_in(open_folder):
    (mine := open_folder / "mine").mkdir()
    os.chown(mine, 65534, 65534)
    with (
        as_user(65534, 65534),
        pytest.raises(UserError, match="--group must be a group that you are in yourself"),
        opened(mine / "a.sock", "root"),
    ):
        pass
    assert list(mine.iterdir()) == []


@ROOT_ALONE
def test_another_user_of_the_group_reaches_the_socket_and_not_the_data(open_folder):
    """A SuperNode runs as somebody else: what its app can have is what the gateway answers."""
    fed, stopped = made(open_folder, config()), threading.Event()
    home, group = fed / "clients" / NAMES[0], grp.getgrgid(12)
    desk_here = desk(fed, NAMES[0])
    with opened(open_folder / "a.sock", group.gr_name) as door:
        thread = threading.Thread(
            target=gateway.serve_socket, args=(door, desk_here, stopped.is_set, lambda said: None)
        )
        thread.start()
        try:
            with as_user(4321, group.gr_gid):
                assert unframed(carry(str(open_folder / "a.sock"), b"of no kind", 1, 1))[0]["status"] == REFUSED
                for file in ("data.npz", "client.key"):
                    with pytest.raises(PermissionError):
                        (home / file).read_bytes()
            with as_user(4321, 4321), pytest.raises(UserError, match="Permission denied"):
                carry(str(open_folder / "a.sock"), b"of no kind", 1, 1)
        finally:
            stopped.set()
            thread.join(20)


def test_an_answer_that_is_too_long_is_not_carried(tmp_path, monkeypatch):
    monkeypatch.setattr(carrying, "MOST", 10)
    with opened(tmp_path / "a.sock") as door:
        long = gateway.Desk(lambda body, run, node: b"x" * 100, 50)
        thread = threading.Thread(
            target=lambda: gateway.serve_socket(door, long, lambda: stopped.is_set(), lambda said: None)
        )
        stopped = threading.Event()
        thread.start()
        try:
            with pytest.raises(UserError, match="its answer would have 100 bytes"):
                carry(str(tmp_path / "a.sock"), b"12345", 1, 1)
        finally:
            stopped.set()
            thread.join(20)


# who is who


def agreed_of(fed: Path) -> Agreed:
    federation = for_server(read_federation(fed), fed)
    return Agreed(NAMES, lambda: roster_keys(fed, NAMES), federation.agreed, federation.terms, 10_000)


def exchange(fed: Path, post: FakePost) -> tuple[Nodes, list[str]]:
    said = list[str]()
    return Nodes(agreed_of(fed), post, RUN, said.append, said.append), said


def test_a_hello_proves_one_key_for_one_node_run_and_nonce(tmp_path):
    fed = made(tmp_path, config())
    agreed = agreed_of(fed)
    key = keys.private_key(fed / "clients" / NAMES[1] / keys.CLIENT_KEY)
    asked = hello(agreed.digest, b"n" * 32)
    said, why = introduced(NAMES[1], key, agreed.digest, agreed.terms, asked, RUN, 100)
    assert not why

    def known(data: bytes = said, nonce: bytes = b"n" * 32, run: int = RUN, node: int = 100) -> int:
        return recognised(data, NAMES, agreed.keys(), agreed.digest, agreed.terms, nonce, run, node)

    assert known() == 1
    for changed in ({"nonce": b"m" * 32}, {"run": 8}, {"node": 101}):
        with pytest.raises(Refused, match="does not prove it by the key on the roster"):
            known(**changed)
    other = introduced(NAMES[0], key, agreed.digest, agreed.terms, asked, RUN, 100)[0]
    with pytest.raises(Refused, match="does not prove"):
        known(other)
    with pytest.raises(Refused, match="nobody on the roster"):
        known(introduced("stranger", key, agreed.digest, agreed.terms, asked, RUN, 100)[0])
    revoke(fed, NAMES[1])
    with pytest.raises(Refused, match="was revoked"):
        known()


def test_a_hello_with_other_settings_is_not_signed_and_says_what_differs(tmp_path):
    fed = made(tmp_path, config())
    agreed = agreed_of(fed)
    key = keys.private_key(fed / "clients" / NAMES[1] / keys.CLIENT_KEY)
    terms = agreed.terms | {"method.beta": 9.0}
    said, why = introduced(NAMES[1], key, "other", terms, hello(agreed.digest, b"n"), RUN, 100)
    assert "other settings" in why and unframed(said, 2**20)[0]["proof"] == ""
    with pytest.raises(Refused, match="method.beta is 0.3 with the server and 9.0 with the client"):
        recognised(said, NAMES, agreed.keys(), agreed.digest, agreed.terms, b"n", RUN, 100)
    for nonce in (b"", b"n" * 65):
        assert "nonce" in introduced(NAMES[1], key, agreed.digest, terms, hello(agreed.digest, nonce), RUN, 1)[1]


def test_clients_come_and_go_with_their_nodes(tmp_path):
    fed = made(tmp_path, config())
    post = FakePost(desk(fed, NAMES[2]).answer, desk(fed, NAMES[0]).answer, None, lambda body, run, node: b"nonsense")
    link, said = exchange(fed, post)
    assert link.here() == {0, 2}
    post.there[900] = desk(fed, NAMES[2]).answer  # with the same key at another node
    for _ in range(20):
        assert link.here() == {0, 2}
    assert [client.address for client in link.status()] == ["node 101", "", "node 100", ""]
    del post.there[100]
    for _ in range(40):
        link.here()
    assert link.status()[2].address == "node 900"
    revoke(fed, NAMES[0])
    for _ in range(20):
        link.here()
    assert link.here() == {2}
    for sentence_ in (
        "east has joined, at node 100", "refused node 103: it is no message", "east is gone (node 100)",
        "refused node 900: east is at node 100 already: the second waits until the first is gone",
        "node 102 does not say who it is: is its gateway there? It is asked again", "east is back, at node 900",
        "north was revoked and is no longer served (node 101)",
    ):  # fmt: skip
        assert sentence_ in said, said
    roster_file(fed, NAMES[2]).write_text("half a ke")  # just being written
    for _ in range(20):
        assert link.here() == {2}


def test_who_cannot_answer_is_asked_again_until_the_deadline(tmp_path):
    """A gateway that is not there, then one that is; a node that goes away; answers that are too long."""
    fed = made(tmp_path, config())
    answers = [desk(fed, name).answer for name in NAMES]
    tries = 0

    def slow(body: bytes, run: int, node: int) -> bytes | None:
        nonlocal tries
        if unframed(body)[0]["kind"] != "train":
            return answers[0](body, run, node)
        tries += 1
        return answers[0](body, run, node) if tries > 2 else None

    post = FakePost(
        slow,  # type: ignore[arg-type]
        lambda body, run, node: answers[1](body, run, node) if unframed(body)[0]["kind"] != "train" else b"x" * 10_001,
        lambda body, run, node: answers[2](body, run, node) if unframed(body)[0]["kind"] != "train" else None,  # type: ignore[arg-type,return-value]
    )
    link, _ = exchange(fed, post)
    assert link.here() == {0, 1, 2}
    body = request_bytes(request_to(fed))
    found = link.ask(dict.fromkeys(range(4), body), 60.0)
    assert set(found) == {0, 1} and found[1] == b"" and tries == 3
    assert [client.missed for client in link.status()] == [0, 0, 1, 0]
    assert link.sent >= 5 * len(body) and link.received > 10_000
    link.finish(framed({"kind": OVER}))
    assert [unframed(body)[0]["kind"] for _, body in post.pushed[-3:]] == [OVER] * 3


def test_a_round_waits_for_somebody_and_can_be_stopped(tmp_path):
    fed = made(tmp_path, config())
    post = FakePost()
    link, said = exchange(fed, post)
    looks = 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        if looks == 5:
            post.there[1] = desk(fed, NAMES[0]).answer
        return False

    body = request_bytes(request_to(fed))
    assert set(link.ask({0: body}, 5.0, stop)) == {0}
    assert looks >= 5 and "nobody of the 1 clients that are asked is here: the round waits" in said
    post.there.clear()
    for _ in range(20):
        link.here()
    with pytest.raises(KeyboardInterrupt):
        link.ask({0: body}, 5.0, lambda: True)


# the app


def test_the_app_is_written_and_its_settings_are_read(tmp_path, fednormec_: Command):
    fed = made(tmp_path, config(privacy=SECURE))
    done = fednormec_("federation", "app", fed)
    assert done.code == 0 and f"{fed / 'app'}: a Flower App" in done.out
    about = tomllib.loads((fed / "app" / "pyproject.toml").read_text())
    assert about["project"]["dependencies"] == []  # nothing is installed at run time
    settings = about["tool"]["flwr"]["app"]["config"]
    assert settings["privacy"]["trust"] == "local" and settings["folder"] == str(fed)
    for side, module in about["tool"]["flwr"]["app"]["components"].items():
        file, _, name = module.partition(":")
        source = (fed / "app" / Path(*file.split("."))).with_suffix(".py").read_text()
        assert f"{name} = {side.removesuffix('app')}_app()" in source
    flat = {key: value for key, value in settings.items() if key != "privacy"}
    flat |= {f"privacy.{key}": value for key, value in settings["privacy"].items()}
    assert asked_for(flat) == (fed, None, None, False, False)
    changed = flat | {"out": "x", "wait-for": 2, "forget-memories": True}
    assert asked_for(changed) == (fed, Path("x"), 2, False, True)
    assert write_app(fed, tmp_path / "other") == tmp_path / "other"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "privacy.noise_std",
            0.0,
            r"privacy.noise_std is 5.0 in federation.toml, and 0.0 in this run: what all agreed",
        ),
        ("privacy.epsilon", 99.0, r"privacy.epsilon is not set in federation.toml, and 99.0 in this run"),
        ("method.beta", 3.0, r"unknown setting of a run of this app"),
        ("wait-fro", 3, r"wait-for"),
        ("wait-for", "two", r"wait-for in the run's config must be as 0, not 'two'"),
        ("folder", "nowhere", r"must be the federation's folder on this machine, not 'nowhere'"),
    ],
)
def test_a_run_changes_nothing_that_was_agreed_on(tmp_path, key, value, said):
    fed = made(tmp_path, config(privacy=SECURE))
    post = FakePost()
    with pytest.raises(UserError, match=said):
        train(post, RUN, {"folder": str(fed), key: value})
    assert not post.pushed


def test_a_client_takes_no_setting_of_the_run(tmp_path):
    """It answers by what its owner set: a socket, or a folder and data for who trusts the app; in a simulation, by the
    federation's folder."""
    fed = made(tmp_path, config(privacy=SECURE))
    body = request_bytes(request_to(fed))
    lying = {"folder": str(tmp_path), "privacy.noise_std": 0.0, "not-private": True, "socket": "/x", "data": "/y"}
    client = fed / "clients" / NAMES[0]
    with running(fed, NAMES[0], tmp_path) as (path, _):
        first = read_reply(answered(body, RUN, 1, {"socket": path}, lying), DIM, torch.float64)
    owners = {"folder": str(client), "data": str(client / "data.npz")}
    again = read_reply(answered(body, RUN, 1, owners, lying), DIM, torch.float64)
    simulated = answered(body, RUN, 1, {"partition-id": 0, "num-partitions": 4}, {"folder": str(fed)})
    for reply in (again, read_reply(simulated, DIM, torch.float64)):
        assert torch.equal(first.message, reply.message)  # the same memory, and noise that is drawn once
    for wrong in ({}, {"folder": str(client)}, {"socket": 3}, {"folder": str(client), "partition-id": 0}):
        with pytest.raises(UserError, match="must say where this client's answers come from"):
            answered(body, RUN, 1, wrong, lying)
    with pytest.raises(UserError, match="num-supernodes=4"):
        answered(body, RUN, 1, {"partition-id": 4}, {"folder": str(fed)})
    (fed / "clients" / NAMES[1] / "data.npz").unlink()
    with pytest.raises(UserError, match="a simulation needs the data of south"):
        answered(body, RUN, 1, {"partition-id": 1}, {"folder": str(fed)})


def test_answer_says_what_is_wrong(tmp_path, fednormec_: Command):
    fed = made(tmp_path, config())
    done = fednormec_(
        "federation", "answer", fed / "clients" / NAMES[0], "--data", fed / "clients" / NAMES[0] / "data.npz"
    )
    assert done.code == 2 and "--not-private" in sentence(done.err)


# with Flower itself


@pytest.mark.skipif(find_spec("flwr") is None, reason="flwr is not installed here: make test-flower tries this")
def test_flowers_messages_carry_it(tmp_path):
    from flwr.app import Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity  # which Flower sets before it starts an app

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, 1
    fed = made(tmp_path, config(participation={"name": "full"}))
    app, contexts = client_app(), dict[int, Any]()
    for i, name in enumerate(NAMES):
        folder = str(fed / "clients" / name)
        owners = {"folder": folder, "data": f"{folder}/data.npz", "not-private": True}
        contexts[100 + i] = Context(RUN, 100 + i, owners, RecordDict(), {})

    class Grid:
        def __init__(self) -> None:
            self.replies = dict[str, Any]()

        def get_node_ids(self) -> list[int]:
            return list(contexts)

        def push_messages(self, messages: list[Message]) -> list[str]:
            names = [f"{len(self.replies) + i}" for i in range(len(messages))]
            for name, message in zip(names, messages, strict=True):
                node = message.metadata.dst_node_id
                reply = app(message, contexts[node])
                about = SimpleNamespace(reply_to_message_id=name, src_node_id=node)
                self.replies[name] = SimpleNamespace(
                    metadata=about, has_content=reply.has_content, content=reply.content
                )
            return names

        def pull_messages(self, names: list[str]) -> list[Any]:
            return [self.replies[name] for name in names]

    grid = Grid()
    settings = {"folder": str(fed), "not-private": True}
    summary = train(GridPost(grid), RUN, settings)  # type: ignore[arg-type]
    assert summary["rounds"] == ROUNDS and callable(server_app())
    assert all(not context.state for context in contexts.values())  # what a client remembers is in its own folder
    lying = GridPost(grid)  # type: ignore[arg-type]
    name = lying.push(100, framed({"kind": OVER}), 1.0)
    grid.replies[str(name)].metadata.src_node_id = 101  # somebody else's answer
    assert lying.pull([str(name)]) == {name: None}
