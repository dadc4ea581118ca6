"""The README's example and commands do what it says; the examples run."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import guarantee
import literal
import numpy as np
import observers
import own_model_and_data
import pytest
import quickstart
from command import Command
from paths import ROOT
from safetensors.torch import load_file

from fednormec.algorithms.methods import METHODS
from fednormec.data.images import IMAGE_SETS

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = {kind: re.findall(rf"```{kind}\n(.*?)```", README, re.S) for kind in ("sh", "python", "text")}
COMMANDS = [line.partition("#")[0].strip() for line in BLOCKS["sh"][1].splitlines()]


@pytest.mark.long
def test_the_python_example_runs_and_learns(capsys):
    code, _ = BLOCKS["python"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(compile(code, "README.md", "exec"), {})
    accuracy = float(capsys.readouterr().out.split()[0])
    assert accuracy > 0.8


@pytest.mark.long
def test_the_example_with_tables_runs_and_learns(tmp_path, monkeypatch, capsys):
    """Patients with some visits each: whether the outcome is good depends on age and ward."""
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, rows in {"visits.csv": 6000, "public.csv": 500}.items():
        age, ward = rng.integers(20, 90, rows), rng.choice(["A", "B", "C"], rows)
        outcome = (age + 15 * (ward == "A") + 3 * rng.standard_normal(rows) > 60).astype(int)
        lines = [f"{i // 15},{a},{w},{o}" for i, (a, w, o) in enumerate(zip(age, ward, outcome, strict=True))]
        (tmp_path / name).write_text("\n".join(["patient,age,ward,outcome", *lines]))
    _, code = BLOCKS["python"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(compile(code, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert float(said.split()[0]) > 0.85 and "ε ≤ 4.00" in said and (tmp_path / "runs/visits/report.html").is_file()


def test_the_two_commands_are_make_run_and_make_test():
    commands = [line.partition("#")[0].strip() for line in BLOCKS["sh"][0].splitlines()]
    assert commands == ["make run", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^run: .*\n\t\$\(BIN\)/fednormec run$", makefile, re.M)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place with data of one's own, as the README assumes."""
    path = tmp_path_factory.mktemp("readme")
    rng = np.random.default_rng(0)
    np.savez(path / "mydata.npz", x=rng.standard_normal((60, 5)), y=rng.integers(0, 3, 60), client=np.arange(60) % 6)
    return path


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(fednormec_: Command, here, monkeypatch, command, folder):
    """In this process and one after another, as some go on with what others left."""
    monkeypatch.chdir(folder)
    program, _, target = command.partition(" > ")
    words = shlex.split(program)
    assert words[0] == "fednormec"
    own_rounds = "run.rounds" in command or "--resume" in command or command == "fednormec run"
    if words[1] == "run" and not own_rounds:
        words += ["--set", "run.rounds=3"]
    done = fednormec_(*words[1:])
    assert done.code == 0, done.err
    if target:
        (folder / target).write_text(done.out)
    if command == "fednormec run":
        assert_looks_like(done.out, BLOCKS["text"][0])


@pytest.mark.parametrize("command", [line.partition("#")[0].strip() for line in BLOCKS["sh"][2].splitlines()])
def test_the_commands_on_real_data_run(fednormec_: Command, here, command):
    """Where the data were fetched before: nothing is downloaded here. The figures are cut to one with one round."""
    missing = [name for name, images in IMAGE_SETS.items() if not images.path.exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not fetched: fednormec data fetch {missing[0]}")
    words = shlex.split(command.replace("reproduce all", "reproduce figure4 --rounds 1 --seed 1"))
    words = [word.replace("run.rounds=30", "run.rounds=3") for word in words]
    done = fednormec_(*words[1:])
    assert done.code == 0, done.err


def assert_looks_like(printed: str, promised: str) -> None:
    """The same lines with the same labels, and an accuracy within two points of the one in the README."""
    labels = [[line.split("  ")[0] for line in text.strip().splitlines()] for text in (printed, promised)]
    assert labels[0] == labels[1]
    accuracies = [float(re.search(r"accuracy +([\d.]+)%", text)[1]) for text in (printed, promised)]
    assert abs(accuracies[0] - accuracies[1]) <= 2


def test_the_table_of_methods_is_complete():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", README, re.M))
    assert rows == {name: "yes" if method.can_be_private else "no" for name, method in METHODS.items()}
    for method in METHODS.values():
        number = method.paper.removeprefix("arXiv ")
        if number != method.paper:
            assert f"arxiv.org/abs/{number}" in README


def test_the_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).stat().st_size > 0, target


@pytest.mark.long
def test_the_examples_run(capsys):
    assert quickstart.main(rounds=60).history[-1]["test_accuracy"] > 0.7
    losses = own_model_and_data.main(rounds=10)
    assert len(losses) == 3
    measured, bound = guarantee.main(rounds=200)
    assert measured < bound
    assert len(observers.main(rounds=20)) == 2
    literal.main()
    assert float(capsys.readouterr().out.split("difference:")[1]) < 1e-10


@pytest.mark.parametrize(
    "page", sorted(path for folder in ("docs", "experiments") for path in (ROOT / folder).rglob("*.md"))
)
def test_the_links_of_every_page_lead_somewhere(page):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            found = (page.parent / target).resolve()
            assert found.exists(), (page, target)
            assert not tracked or found.is_dir() or str(found.relative_to(ROOT)) in tracked, f"{target} is not in git"


@pytest.mark.long
def test_the_page_on_own_code_does_what_it_says(fednormec_: Command, here, tmp_path):
    page = (ROOT / "docs" / "own-code.md").read_text(encoding="utf-8")
    follow(fednormec_, page, tmp_path)
    record = json.loads((tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()[-1])
    assert record["epsilon"] <= 4 and record["test_accuracy"] > 0.8 and 0 <= record["test_recall"] <= 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_page_on_own_code_adds_adapters(fednormec_: Command, tmp_path):
    pytest.importorskip("peft", reason="LoRA needs the package peft")
    page = (ROOT / "docs" / "own-code.md").read_text(encoding="utf-8")
    follow(fednormec_, page.partition("## A large model")[2], tmp_path)
    adapters, head = 2 * 2 * 2 * 4 * 32, 33 * 2  # of two layers the query and the value, A and B
    tensors = load_file(tmp_path / "runs/texts/model.safetensors")
    assert sum(t.numel() for name, t in tensors.items() if "lora_" in name) == adapters
    record = json.loads((tmp_path / "runs/texts/summary.json").read_text())
    assert record["parameters"] == adapters + head


def follow(fednormec_: Command, page: str, folder: Path) -> None:
    """Writes the first code and config of a page into files by the names that they begin with; runs its commands."""
    code, config, commands = (re.search(rf"```{kind}\n(.*?)```", page, re.S)[1] for kind in ("python", "toml", "sh"))
    for text in (code, config):
        (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    for line in commands.splitlines():
        said = fednormec_(*shlex.split(line.partition("#")[0])[1:])
        assert said.code == 0, said.err
