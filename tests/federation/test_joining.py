"""What a client is told before it takes part, what is tried beforehand, and the model that it keeps at the end."""

import contextlib
import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command, free_port
from federated import CLASSES, FEATURES, NAMES, config, data, party
from safetensors.torch import load, save

from fednormec.config.schema import dump
from fednormec.errors import UserError
from fednormec.federation import checking, keys
from fednormec.federation.agreement import for_server, read_federation
from fednormec.federation.bookkeeping import spent_and_to_come
from fednormec.federation.checking import LOOK, OK, WRONG, check_client, check_server
from fednormec.federation.ending import ending, keep, longest_ending, model_in
from fednormec.federation.joining import Joining, explain, join
from fednormec.federation.messages import OVER, Refused, framed, kind_of
from fednormec.federation.provision import make, revoke
from fednormec.federation.sessions import Serving, serve
from fednormec.privacy.ledger import Ledger

SECURE = {"noise_std": 2.0, "delta": 1e-5, "trust": "local", "randomness": "secure"}


@pytest.fixture
def fed(tmp_path: Path) -> Path:
    """A federation's folder, and north's data beside it."""
    (tmp_path / "asked.toml").write_text(dump(config(privacy=SECURE, participation={"name": "full"})))
    x, y = data()[0]
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    return make(tmp_path / "fed", NAMES, [FEATURES], CLASSES, f"localhost:{free_port()}", tmp_path / "asked.toml")


def home(fed: Path) -> Path:
    return fed / "clients" / "north"


def mine(fed: Path) -> Joining:
    return Joining(str(fed.parent / "mine.npz"))


def levels(found: list[checking.Finding]) -> dict[str, str]:
    return {one.what: one.level for one in found}


# what is said beforehand


def test_explain_says_all_that_a_client_agrees_to_and_connects_to_nobody(
    fed: Path, monkeypatch: pytest.MonkeyPatch, fednormec_: Command
) -> None:
    before = sorted(path.name for path in home(fed).iterdir())
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it connects"))
    said = fednormec_("federation", "join", home(fed), "--data", fed.parent / "mine.npz", "--explain")
    assert said.code == 0
    assert said.out.startswith("north would take part in a federation of 4 clients (north, south, east, west).\n")
    text = " ".join(said.out.split())
    assert "8 examples (5 each). They stay on this machine" in text
    assert (
        "one message for each request, 18 numbers; before noise it is no longer than 1; it adds Gaussian noise" in text
    )
    assert "std 2 in every number" in text  # twice the radius
    assert "promises, after 6 rounds, ε ≤ " in text and "nobody is trusted with an exact message" in text
    assert "0 of at most 6 messages have left" in text
    assert "method.beta = 0.3" in text and "run.rounds = 6" in text
    assert said.out.rstrip().endswith("Nothing was connected, nothing was sent.")
    assert sorted(path.name for path in home(fed).iterdir()) == before


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        (None, "exact, without noise"),
        (SECURE | {"trust": "central"}, "the server, which sees the exact message, adds to the sum Gaussian noise"),
    ],
)
def test_explain_says_who_adds_the_noise(tmp_path: Path, privacy: dict[str, object] | None, said: str) -> None:
    asked = config(participation={"name": "full"}, **({} if privacy is None else {"privacy": privacy}))
    (tmp_path / "asked.toml").write_text(dump(asked))
    np.savez(tmp_path / "mine.npz", x=data()[0][0], y=data()[0][1])
    fed = make(tmp_path / "fed", NAMES, [FEATURES], CLASSES, "localhost:9443", tmp_path / "asked.toml")
    assert said in " ".join(explain(home(fed), mine(fed)).split())


def test_explain_names_the_code_that_will_run(tmp_path: Path) -> None:
    own = "from torch import nn\n\n\ndef build(input_shape, outputs):\n    return nn.Linear(input_shape[0], outputs)\n"
    (tmp_path / "own.py").write_text(own)
    (tmp_path / "asked.toml").write_text(dump(config(model={"name": "own.py:build"})))
    np.savez(tmp_path / "mine.npz", x=data()[0][0], y=data()[0][1])
    fed = make(tmp_path / "fed", NAMES, [FEATURES], CLASSES, "localhost:9443", tmp_path / "asked.toml")
    said = " ".join(explain(home(fed), mine(fed)).split())
    assert f"own.py, sha256 {hashlib.sha256(own.encode()).hexdigest()}: part of what all agreed on" in said


# what is tried beforehand


def test_a_server_that_could_start_is_told_so(fed: Path, fednormec_: Command) -> None:
    said = fednormec_("federation", "serve", fed, "--check", "--status", f"127.0.0.1:{free_port()}")
    assert [line.split()[1] for line in said.out.splitlines()] == [
        "settings", "certificate", "roster", "port", "disk", "run", "status",
    ]  # fmt: skip
    assert levels(check_server(fed, Serving())) | {"settings": OK} == dict.fromkeys(
        ("settings", "certificate", "roster", "port", "disk", "run"), OK
    )
    assert not (fed / "run").exists()


def test_what_would_keep_a_server_from_working_is_found(
    fed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make(tmp_path / "other", NAMES, [FEATURES], CLASSES, "localhost:9443", None)
    revoke(fed, "south")
    (fed / "run").mkdir()
    (fed / "run" / "something").touch()
    shutil.copy(other / "ca.crt", fed / "ca.crt")
    monkeypatch.setattr(checking, "ROOM", 10**18)
    found = check_server(fed, Serving(status="127.0.0.1:0x"))
    assert levels(found) | {"settings": OK} == {
        "settings": OK, "certificate": WRONG, "roster": LOOK, "port": OK, "disk": WRONG, "run": WRONG,
        "status page": WRONG,
    }  # fmt: skip
    said = {one.what: one.said for one in found}
    assert "is it of another federation?" in said["certificate"]
    assert said["roster"].startswith("no key of south")
    assert "MB left, and 1,000,000,000,000 MB are needed" in said["disk"]


def test_a_certificate_for_another_name_is_found(fed: Path) -> None:
    keys.make_server(fed, ["fl.example.org"])
    (found,) = (one for one in check_server(fed, Serving()) if one.what == "certificate")
    assert found.level == WRONG and "it is for fl.example.org, and clients look for localhost" in found.said


@pytest.mark.parametrize("privacy", [None, SECURE | {"trust": "central"}, SECURE])
def test_a_count_that_is_damaged_is_found_before_anything_is_asked(tmp_path: Path, privacy: dict | None) -> None:
    asked = config(participation={"name": "full"}, **({} if privacy is None else {"privacy": privacy}))
    (tmp_path / "asked.toml").write_text(dump(asked))
    np.savez(tmp_path / "mine.npz", x=data()[0][0], y=data()[0][1])
    fed = make(tmp_path / "fed", NAMES, [FEATURES], CLASSES, "localhost:9443", tmp_path / "asked.toml")
    (home(fed) / "releases.json").write_text("[")
    how = mine(fed)._replace(not_private=True)
    assert levels(check_client(home(fed), how))["memory"] == WRONG
    with pytest.raises(UserError, match="which counts what has left this client, is damaged"):
        join(home(fed), how, lambda: True)


def test_a_client_whose_server_is_not_there_is_told_so(fed: Path, fednormec_: Command) -> None:
    said = fednormec_("federation", "join", home(fed), "--data", fed.parent / "mine.npz", "--check")
    assert said.code == 2 and said.err == "fednormec: 1 of 6 checks failed: it would not work.\n"
    assert "wrong server       nobody answers at localhost:" in said.out
    (home(fed) / "memory-a.safetensors").write_bytes(b"damaged")
    (home(fed) / "releases.json").write_text("{")
    found = {one.what: one for one in check_client(home(fed), mine(fed))}
    assert found["memory"].level == LOOK and "cannot be used" in found["memory"].said
    (home(fed) / "memory-a.safetensors").unlink()
    assert levels(check_client(home(fed), mine(fed)))["memory"] == WRONG


@pytest.mark.parametrize("how", [Joining("nowhere.npz"), Joining("mine.npz", name="nobody")])
def test_what_does_not_fit_here_is_found_first(fed: Path, monkeypatch: pytest.MonkeyPatch, how: Joining) -> None:
    monkeypatch.chdir(fed.parent)
    (found,) = check_client(home(fed), how)
    assert found.level == WRONG and found.what == "settings"


# the model at the end


def trained(tmp_path: Path) -> tuple[Path, bytes]:
    named = party(config(), 0).experiment.problem.named(torch.arange(18, dtype=torch.float64))
    (tmp_path / "model.safetensors").write_bytes(save({name: t.clone() for name, t in named.items()}))
    return tmp_path / "model.safetensors", (tmp_path / "model.safetensors").read_bytes()


def test_the_trained_model_arrives_as_it_is(tmp_path: Path) -> None:
    path, content = trained(tmp_path)
    said = ending(path)
    assert kind_of(said) == OVER and len(said) <= longest_ending(party(config(), 0))
    assert model_in(said, party(config(), 0)) == (content, hashlib.sha256(content).hexdigest())
    assert keep(tmp_path / "kept", said, party(config(), 0)).endswith(hashlib.sha256(content).hexdigest())
    assert (tmp_path / "kept").read_bytes() == content


def test_what_is_not_the_trained_model_is_not_kept(tmp_path: Path) -> None:
    path, content = trained(tmp_path)
    mine, said = party(config(), 0), ending(path)

    def over(content: bytes) -> bytes:
        return framed({"kind": OVER, "sha256": hashlib.sha256(content).hexdigest()}) + content

    other = {name: torch.zeros(3) for name in load(content)}
    wild = {name: t * torch.nan for name, t in load(content).items()}
    for sent, why in (
        (ending(tmp_path / "none"), "the training diverged"),
        (said[:-1] + bytes([said[-1] ^ 1]), "not the one whose digest"),
        (framed({"kind": OVER, "sha256": 3}) + content, "not the one whose digest"),
        (over(b""), "no model"),
        (over(content[:-1]), "no model"),
        (over(save(other)), "not of the kind"),
        (over(save(wild)), "not finite"),
    ):
        with pytest.raises(Refused, match=why):
            model_in(sent, mine)
        with pytest.raises(UserError, match=f"no model was stored: .*{why}"):
            keep(tmp_path / "kept", sent, mine)
    assert not (tmp_path / "kept").exists()


def test_a_model_takes_nobodys_place(fed: Path) -> None:
    for file, why in ((fed.parent / "mine.npz", "is there already"), (fed / "no" / "model", "there is no folder")):
        with pytest.raises(UserError, match=why):
            join(home(fed), mine(fed)._replace(keep_model=file), lambda: True)


# secure aggregation

SECAGG = {"noise_std": 2.0, "trust": "secagg", "min_survivors": 3}


def secagg(tmp_path: Path, **sections: object) -> Path:
    """A federation's folder with secure aggregation, and north's data beside it."""
    asked = config(privacy=SECAGG, participation={"name": "full"}) | sections
    (tmp_path / "asked.toml").write_text(dump({name: s for name, s in asked.items() if name != "federation"}))
    np.savez(tmp_path / "mine.npz", x=data()[0][0], y=data()[0][1])
    return make(tmp_path / "fed", NAMES, [FEATURES], CLASSES, f"localhost:{free_port()}", tmp_path / "asked.toml")


def test_explain_says_what_noise_there_is_in_secure_aggregation(tmp_path: Path) -> None:
    text = " ".join(explain(home(secagg(tmp_path)), mine(tmp_path / "fed")).split())
    assert "it adds Gaussian noise on a grid of std 2 in every number, and masks that only the sum over 3" in text
    for term in ("privacy.randomness = secure", "privacy.noise = discrete", "privacy.draws = server"):
        assert term in text
    assert "before its masked message has come is not in the sum" in text


def test_checks_say_who_must_stay(tmp_path: Path) -> None:
    fed = secagg(tmp_path, privacy=SECAGG | {"colluders": 1})
    stays = "those of all 4 clients are in federation.toml; if 4 clients are asked 3 must stay, and a sum needs 3"
    for found in (check_server(fed, Serving()), check_client(home(fed), mine(fed))):
        said = {one.what: one.said for one in found}
        assert said["keys"].startswith(stays)


def test_a_server_whose_file_has_other_keys_than_its_roster_does_not_start(tmp_path: Path) -> None:
    fed = secagg(tmp_path)
    asked = read_federation(fed)
    asked["federation"]["keys"][:2] = asked["federation"]["keys"][1::-1]
    (fed / "federation.toml").write_text(dump(asked))
    said = {one.what: (one.level, one.said) for one in check_server(fed, Serving())}["keys"]
    assert said[0] == WRONG and "federation.toml has another key for north than" in said[1]
    with pytest.raises(UserError, match="has another key for north than"):
        serve(fed, Serving(), lambda: True)


@pytest.mark.parametrize("rule", [{"name": "poisson", "p": 0.01}, {"name": "fixed_size", "m": 2}])
def test_what_leaves_no_round_a_sum_is_refused_before_anything_is_written(tmp_path: Path, rule: dict) -> None:
    with pytest.raises(UserError, match="a round needs 3 senders"):
        secagg(tmp_path, participation=rule)
    assert not (tmp_path / "fed").exists()


# another roster


def test_a_changed_roster_says_what_was_spent_and_what_comes_on_top(fed: Path, fednormec_: Command) -> None:
    """By composition of what the ledgers hold and what the new agreement will release."""
    said = fednormec_("federation", "add", fed, "spring")
    assert said.code == 0 and "no training of this federation has spent anything yet" in said.out
    assert f"{fed / 'federation.toml'}: send it to north, south, east, west, spring; it begins a new run" in said.out
    federation = for_server(read_federation(fed), fed)
    for name, rounds in (("run", 6), ("second", 2), ("other", 3)):
        (fed / name).mkdir()
        promised = federation.experiment.config["privacy"] | ({"delta": 1e-6} if name == "other" else {})
        (fed / name / "config.toml").write_text(dump(federation.experiment.config | {"privacy": promised}))
        with contextlib.closing(Ledger(fed / name / "ledger.jsonl", federation.plan)) as ledger:
            for number in range(1, rounds + 1):
                ledger.add(number)
    mechanism = federation.plan.mechanism
    said = fednormec_("federation", "remove", fed, "spring")
    before, after = (float(one) for one in re.findall(r"ε ≤ ([\d.]+)", said.out))
    assert before == pytest.approx(mechanism.epsilon(8, 1e-5), abs=0.01)
    assert after == pytest.approx(mechanism.epsilon(14, 1e-5), abs=0.01) and after > before
    assert f"{fed / 'other'} is not in this number: its δ, trust, adjacency or colluders are others" in said.out
    (fed / "run" / "ledger.jsonl").write_text("{}\n")
    assert f"{fed / 'run'} is not in this number: " in fednormec_("federation", "add", fed, "summer").out


def test_a_changed_roster_counts_no_epsilon_where_nobody_is_protected(tmp_path: Path) -> None:
    for name, privacy, said in (
        ("total", SECURE | {"noise_scale": "total_norm"}, "NOT PRIVATE: noise by total norm protects nobody"),
        ("none", None, "without [privacy] no ε is kept"),
    ):
        asked = config(participation={"name": "full"}, **({} if privacy is None else {"privacy": privacy}))
        (tmp_path / "asked.toml").write_text(dump(asked))
        folder = make(tmp_path / name, NAMES, [FEATURES], CLASSES, "localhost:9443", tmp_path / "asked.toml")
        (line,) = spent_and_to_come(folder)
        assert line.startswith(said)
