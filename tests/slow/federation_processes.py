"""A federation as people run it: a server and clients as processes on loopback, with TLS and keys; killed, restarted,
cheated. `make test-federation` runs this: a few minutes, most of them for starting Python."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from command import free_port
from deployed import NAMES, SECURE, SEEDED, Federation, deploying, text
from paths import ROOT

from fednormec.federation import keys
from fednormec.privacy.ledger import read_ledger
from fednormec.privacy.mechanism import Mechanism

OWN = """
import torch
from torch import nn


def build(input_shape, outputs, bias: bool = True):
    return nn.Sequential(nn.Tanh(), nn.Linear(input_shape[0], outputs, bias=bias))


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none") * (1 + targets)


def extract(x):
    x = torch.as_tensor(x)
    return torch.cat([x, x**2], 1)
"""
CHEAT = """
import sys
import fednormec.federation.client as client

honest = client.answering
def cheating(*given):
    answer = honest(*given)
    def cheat(request):
        reply = answer(request)
        return reply._replace(message=reply.message * 1e6)
    return cheat
client.answering = cheating
from fednormec.cli.main import main
main()
"""


STAGES = ("keys", "shares", "masked", "agree", "unmask")
DIES = """
import os, sys
from pathlib import Path
from fednormec.secagg import aggregator, member

kind, stage, mark = {"client": member.Member, "server": aggregator.Aggregator}[sys.argv.pop(1)], *sys.argv[1:3]
del sys.argv[1:3]
honest = getattr(kind, stage)
def once(*given):
    if not Path(mark).exists():
        Path(mark).touch()
        os._exit(9)
    return honest(*given)
setattr(kind, stage, once)
from fednormec.cli.main import main
main()
"""
FOUR = (*NAMES, "west")
SUMMED = text(SECURE.format(trust="secagg") + "min_survivors = 3\n", rounds=12, deadline=20.0)


OWN_TEXT = (
    text(rounds=4).replace('name = "linear"', 'name = "own.py:build"')
    + '[problem]\nloss = "own.py:loss"\n[features]\nname = "own.py:extract"\n[data]\ntargets = "classes"\n'
)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Federation]]:
    with deploying(tmp_path) as make:
        yield make


def test_serve_and_join_train_what_one_process_would(made):
    federation = made(text())
    server = federation.serve()
    clients = [federation.join(name) for name in NAMES]
    summary = federation.finish(server, clients)
    assert (summary["status"], summary["rounds"], summary["clients"]) == ("done", 8, 3)
    assert all(r["not_private"] == {"computed": 3, "sent": 3, "left_out": 0, "missed": 0} for r in federation.records())
    torch.testing.assert_close(federation.model(), federation.in_process(), rtol=1e-6, atol=1e-12)
    assert torch.equal(federation.model(), federation.without_a_network())
    assert not list((federation.fed / "run").glob("checkpoint*"))


def test_with_seeded_noise_as_in_one_process(made, monkeypatch):
    """Of the clients' own; the server's is tried in test_federation.py."""
    federation = made(text(SEEDED.format(trust="local")))
    summary = federation.finish(federation.serve(), [federation.join(name) for name in NAMES])
    assert summary["trust"] == "local"
    alone = Mechanism.noise

    def sum_of_all(self: Mechanism, dim: int, senders: int, seed: int, round: int) -> np.ndarray:
        return sum((alone(self, dim, 1, seed, round, i) for i in range(senders)), np.zeros(dim))

    assert torch.equal(federation.model(), federation.without_a_network())
    monkeypatch.setattr(Mechanism, "noise", sum_of_all)
    torch.testing.assert_close(federation.model(), federation.in_process(), rtol=1e-6, atol=1e-12)


def test_a_client_that_is_killed_and_restarted_goes_on(made):
    """With the same key and its memory: the training is the one without the kill."""
    federation = made(text(rounds=15))
    server = federation.serve()
    clients = [federation.join(name) for name in NAMES]
    federation.until(5)
    clients[1].kill()
    clients[1].wait()
    clients[1] = federation.join(NAMES[1])
    federation.finish(server, clients)
    assert [r["not_private"]["missed"] for r in federation.records()] == [0] * 15
    assert torch.equal(federation.model(), federation.without_a_network())


def test_a_server_that_is_killed_goes_on_from_its_checkpoint(made):
    federation = made(text(rounds=15))
    server = federation.serve()
    clients = [federation.join(name) for name in NAMES]
    federation.until(5)
    server.kill()
    server.wait()
    summary = federation.finish(federation.serve(), clients)
    assert "goes on after round" in summary["err"]
    assert [r["round"] for r in federation.records()] == list(range(1, 16))
    assert torch.equal(federation.model(), federation.without_a_network())


def test_the_ledger_of_a_killed_server_never_says_less(made):
    """Secure noise of the clients' own: what was paid for before the kill stays paid for."""
    federation = made(text(SECURE.format(trust="local"), rounds=15))
    server = federation.serve()
    clients = [federation.join(name) for name in NAMES]
    federation.until(5)
    server.send_signal(signal.SIGKILL)
    server.wait()
    paid = read_ledger(federation.fed / "run" / "ledger.jsonl").rounds
    assert paid >= len(federation.records())
    summary = federation.finish(federation.serve(), clients)
    spent = read_ledger(federation.fed / "run" / "ledger.jsonl")
    assert spent.rounds >= max(paid, summary["rounds"])
    facts = json.loads((federation.fed / "run" / "privacy.json").read_text())
    assert facts["rounds"] == spent.rounds
    assert facts["epsilon"] == pytest.approx(spent.epsilon(1e-5))
    assert summary["epsilon"] <= 50.0
    statement = " ".join((federation.fed / "run" / "privacy.txt").read_text().split())
    assert "nobody is trusted with an exact message" in statement
    assert "drop-outs a message that does not come is not seen" in statement
    assert "HTTPS; server and clients prove by their keys who they are" in statement


def test_an_unregistered_key_is_refused(made, tmp_path):
    federation = made(text())
    server = federation.serve()
    stranger = federation.fed / "clients" / "north"
    (stranger / "client.key").unlink()
    key = keys.read_request(keys.make_request(stranger, "north"))[1]  # signed, and not on the roster
    (stranger / "client.crt").write_bytes(keys.sign_client(federation.fed, "north", key))
    client = federation.join("north")
    _, err = client.communicate(timeout=60)
    assert client.returncode == 2
    assert "refuses this client: this certificate is of nobody on the roster, or was revoked" in err
    assert server.poll() is None
    server.kill()


def test_own_model_loss_and_features_train_what_one_process_would(made, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "cache"))
    federation = made(OWN_TEXT)
    for name in NAMES:  # each has the code, and computes its own features
        assert (federation.fed / "clients" / name / "own.py").read_text() == OWN
    os.remove(tmp_path / "own.py")  # what counts is what lies beside the agreement
    summary = federation.finish(federation.serve(), [federation.join(name) for name in NAMES])
    assert (summary["status"], summary["rounds"], summary["parameters"]) == ("done", 4, 2 * 5 * 3 + 3)
    monkeypatch.chdir(federation.fed)
    assert torch.equal(federation.model(), federation.without_a_network())


def test_a_client_with_other_code_refuses_and_says_which_file(made, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "cache"))
    (tmp_path / "own.py").write_text(OWN)
    federation = made(OWN_TEXT)
    server = federation.serve()
    with (federation.fed / "clients" / "north" / "own.py").open("a") as file:
        file.write("# one line more\n")
    client = federation.join("north")
    _, err = client.communicate(timeout=60)
    assert client.returncode == 2 and server.poll() is None
    assert err.startswith("fednormec: own.py is not the file that the settings were made with")
    server.kill()


def test_a_client_that_cheats_is_refused_and_counted(made):
    federation = made(text())
    clients = [federation.join(name) for name in NAMES[:2]]
    clients.append(federation.join(NAMES[2], program=("-c", CHEAT)))
    summary = federation.finish(federation.serve(), clients)
    assert summary["left_out"] == 8
    assert all(r["not_private"] == {"computed": 3, "sent": 2, "left_out": 1, "missed": 0} for r in federation.records())
    assert "east sent what was refused: its message is longer than" in summary["err"]


def test_a_client_that_never_comes_stalls_nobody(made):
    """A round would wait for an hour; it ends long before somebody loses patience."""
    federation = made(text(SECURE.format(trust="central"), rounds=5).replace("deadline = 60.0", "deadline = 3600.0"))
    summary = federation.finish(federation.serve("--wait-for", "2"), [federation.join(name) for name in NAMES[:2]])
    assert [r["not_private"]["missed"] for r in federation.records()] == [1] * 5
    assert summary["trust"] == "central"
    assert "whatever arrives" in " ".join(summary["statement"].split())


def test_control_c_finishes_the_round_and_the_same_command_goes_on(made):
    federation = made(text(rounds=15))
    server = federation.serve()
    clients = [federation.join(name) for name in NAMES]
    federation.until(3)
    server.send_signal(signal.SIGINT)
    _, err = server.communicate(timeout=60)
    assert server.returncode == 130
    assert re.search(r"stopped after round \d+\. To go on: fednormec federation serve fed\n", err)
    federation.finish(federation.serve(), clients)
    assert torch.equal(federation.model(), federation.without_a_network())


# the README, and the example


def test_the_example_is_one_command():
    done = subprocess.run(
        [sys.executable, "examples/federation/run.py"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"test accuracy +([\d.]+)%", done.stdout)[1]) > 90
    assert "none: no noise was added" in done.stdout


def test_the_readmes_commands_are_a_federation(tmp_path):
    """All of them side by side, in the order in which they stand, each in the folder where it is meant to be."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## A real federation\n")[2].partition("\n## ")[0]
    lines = [line.partition("#")[0].strip() for line in re.findall(r"```sh\n(.*?)```", section, re.S)[0].splitlines()]
    init, serve, *joins = [shlex.split(line) for line in lines if line.startswith("fednormec")]
    assert [words[2] for words in (init, serve, *joins)] == ["init", "serve", "join", "join", "join"]
    rng = np.random.default_rng(0)
    for words in joins:
        np.savez(tmp_path / words[words.index("--data") + 1], x=rng.random((9, 64)), y=rng.integers(0, 10, 9))
    port = ("--address", f"localhost:{free_port()}")
    python = [sys.executable, "-m"]
    subprocess.run([*python, *init, *port], cwd=tmp_path, check=True, timeout=60, capture_output=True)
    for path in tmp_path.rglob("federation.toml"):
        path.write_text(path.read_text().replace("rounds = 60", "rounds = 3"))
    with open(tmp_path / "said", "w") as said:
        running = [
            subprocess.Popen([*python, *words], cwd=tmp_path, stdout=said, stderr=said) for words in (serve, *joins)
        ]
        try:
            assert [process.wait(timeout=120) for process in running] == [0] * 4, (tmp_path / "said").read_text()
        finally:
            for process in running:
                process.kill()
    assert (tmp_path / "fed" / "run" / "privacy.txt").read_text().startswith("ε ≤ 8.00 at δ = 1e-05 for each client")


def test_the_commands_of_the_hospitals_page_lead_from_files_to_a_statement(tmp_path):
    """Each block as it stands, one after another; what the page says they print, they print."""
    page = (ROOT / "docs" / "hospitals.md").read_text(encoding="utf-8")
    (tmp_path / "hospitals.toml").write_text(re.findall(r"```toml\n(.*?)```", page, re.S)[0])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    here = f"--classes 2 --address localhost:{free_port()}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = ""
    for block in re.findall(r"```sh\n(.*?)```", page, re.S):
        done = subprocess.run(
            ["bash", "-ec", block.replace("--classes 2", here)], cwd=tmp_path, env=os.environ | {"PATH": path},
            timeout=240, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        said += done.stdout
    lines = {line.strip() for line in said.splitlines()}
    missing = [line for text in re.findall(r"```text\n(.*?)```", page, re.S) for line in text.splitlines()
               if line.strip() not in lines]  # fmt: skip
    assert missing == []
    for name, patients in {"north": 182, "south": 114, "east": 80, "west": 51, "coast": 28}.items():
        signed = (tmp_path / "fed" / "clients" / name / "statement.txt").read_text()
        assert "ε ≤ 3.00 at δ = 0.0001 for each record" in signed and f"{name}: {patients} records" in signed
        counted = json.loads((tmp_path / "fed" / "clients" / name / "records.json").read_text())
        assert [one["rounds"] for one in counted.values()] == [20]
    summary = json.loads((tmp_path / "fed" / "run" / "summary.json").read_text())
    assert summary["metrics"]["test_accuracy"] > 0.8  # 0.63 are benign


def test_nothing_speaks_to_anybody_else(made, tmp_path, monkeypatch):
    """Every address that any of the processes connects to is this machine's, by Python's own account."""
    spy = tmp_path / "spy"
    spy.mkdir()
    (spy / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def hear(event, given):\n"
        "    if event == 'socket.connect':\n"
        f"        with open({str(tmp_path / 'heard')!r}, 'a') as file:\n"
        "            file.write(f'{given[1]!r}\\n')\n"
        "sys.addaudithook(hear)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(spy), prepend=os.pathsep)
    federation = made(text(rounds=3))
    federation.finish(federation.serve(), [federation.join(name) for name in NAMES])
    heard = set((tmp_path / "heard").read_text().splitlines())
    assert heard
    assert all(re.match(r"\('(127\.0\.0\.1|::1)', ", address) for address in heard), heard


def summed(federation: Federation, summary: dict[str, object], status: str = "done", rounds: int = 12) -> None:
    """What must hold after a training with secure aggregation, whatever happened on the way."""
    assert (summary["status"], summary["rounds"], summary["trust"]) == (status, rounds, "secagg")
    said = " ".join(str(summary["statement"]).split())
    assert "learns noisy sums alone, over 3 messages or more" in said and "whoever runs the program" not in said
    assert "what secure aggregation takes to be so" in said
    paid = read_ledger(federation.fed / "run" / "ledger.jsonl").rounds
    assert rounds <= paid <= 12 and all(r["not_private"]["sent"] in (0, 3, 4) for r in federation.records())
    for name in FOUR:
        (count,) = json.loads((federation.fed / "clients" / name / "releases.json").read_text()).values()
        assert count["releases"] <= paid


def test_messages_leave_in_secure_aggregation_only(made):
    federation = made(SUMMED, names=FOUR)
    summary = federation.finish(federation.serve(), [federation.join(name) for name in FOUR])
    summed(federation, summary)
    assert [r["not_private"]["sent"] for r in federation.records()] == [4] * 12
    assert read_ledger(federation.fed / "run" / "ledger.jsonl").rounds == 12


def test_a_client_that_is_killed_at_any_stage_is_no_trouble(made, tmp_path):
    federation = made(SUMMED, names=FOUR)
    server = federation.serve()
    clients = [federation.join(name) for name in FOUR[1:]]
    for stage in STAGES:
        program = ("-c", DIES, "client", stage, str(tmp_path / f"died-{stage}"))
        assert federation.join(FOUR[0], program=program).wait(timeout=60) == 9
    summed(federation, federation.finish(server, [*clients, federation.join(FOUR[0])]))


def test_a_server_that_is_killed_at_any_stage_goes_on(made, tmp_path):
    """What it had paid for stays paid for, which begins with masked vectors: three of twelve rounds are lost."""
    federation = made(SUMMED, names=FOUR)
    clients = [federation.join(name) for name in FOUR]
    for number, stage in enumerate(STAGES, 1):
        program = ("-c", DIES, "server", stage, str(tmp_path / f"died-{stage}"))
        assert federation.serve(program=program).wait(timeout=120) == 9
        ledger = federation.fed / "run" / "ledger.jsonl"
        paid = read_ledger(ledger).rounds if ledger.exists() else 0
        assert paid == len(federation.records()) + max(0, number - 2)
    summed(federation, federation.finish(federation.serve(), clients), "budget_spent", 9)
