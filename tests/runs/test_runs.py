"""The run folder: what was asked, where, what happened and how it ended; enough to get the same bits again."""

import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_runs import whole
from hypothesis import given
from hypothesis import strategies as st
from paths import PLAIN, ROOT
from safetensors.torch import load_file
from strict_json import lines, strictly

import fednormec as fn
from fednormec.config.assemble import assemble
from fednormec.config.schema import read
from fednormec.core.problem import Metrics
from fednormec.core.randomness import generator
from fednormec.data import split
from fednormec.errors import UserError
from fednormec.files import to_json
from fednormec.problems.models import MODELS
from fednormec.runs.environment import environment
from fednormec.runs.folder import RunFolder, default_path
from fednormec.runs.progress import News, counted, figures, shown, sparkline, tallied
from fednormec.runs.runner import perform
from fednormec.runs.start import start
from fednormec.runs.summary import describe

FILES = {"config.toml", "environment.json", "metrics.jsonl", "model.json", "model.safetensors", "summary.json"}
SMALL = ("model.name=linear", "data.partition=iid", "data.clients=4", "local.steps=1")


# the files


def test_a_run_leaves_six_files(tmp_path: Path) -> None:
    whole(tmp_path / "deep" / "down", *SMALL, "run.rounds=2")
    assert {path.name for path in (tmp_path / "deep" / "down").iterdir()} == FILES


@pytest.mark.long
@pytest.mark.parametrize(("rounds", "evaluated"), [(1, 1), (7, 7), (40, 5), (47, 6), (400, 20)])
def test_metrics_have_a_line_per_round_and_up_to_twenty_evaluations(
    tmp_path: Path, rounds: int, evaluated: int
) -> None:
    whole(tmp_path / "out", *SMALL, f"run.rounds={rounds}")
    found = lines(tmp_path / "out" / "metrics.jsonl")
    assert [line["round"] for line in found] == list(range(1, rounds + 1))
    assert sum("test_accuracy" in line for line in found) == evaluated
    assert sum("train_loss" in line["not_private"] for line in found) == evaluated
    assert "test_accuracy" in found[-1]


def test_what_looks_at_the_clients_is_kept_apart(tmp_path: Path) -> None:
    whole(tmp_path / "out", *SMALL, "run.rounds=3", "run.evaluate_every=2")
    first, second, third = lines(tmp_path / "out" / "metrics.jsonl")
    assert set(second) == set(third) == {"round", "test_loss", "test_accuracy", "not_private"}
    assert set(second["not_private"]) == {"train_loss", "computed", "sent", "left_out"}
    assert set(first) == {"round", "not_private"}
    assert set(first["not_private"]) == {"computed", "sent", "left_out"}
    assert all(line["not_private"]["computed"] == 4 for line in (first, second, third))


def test_metrics_are_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    with RunFolder.new(tmp_path / "out", {}) as folder:
        folder.add({"round": 1})
        assert lines(tmp_path / "out" / "metrics.jsonl") == [{"round": 1}]


def test_the_environment_tells_versions_python_and_commit(tmp_path: Path) -> None:
    whole(tmp_path / "out", *SMALL, "run.rounds=1")
    found = strictly((tmp_path / "out" / "environment.json").read_text())
    assert found["versions"]["fednormec"] == fn.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert all(found["versions"].values())
    assert re.match(r"3\.\d+\.\d+", found["python"])
    assert found["threads"] == torch.get_num_threads()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$", found["started"])
    assert "commit" in found


def test_the_commit_is_that_of_the_checkout() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    assert re.fullmatch(r"[0-9a-f]{40}\+?", environment()["commit"])


def test_a_summary_is_what_the_run_returned(tmp_path: Path) -> None:
    summary = whole(tmp_path / "out", *SMALL, "run.rounds=3", "privacy.noise_std=0.1")
    summary.pop("curve")
    assert summary.pop("statement") + "\n" == (tmp_path / "out" / "privacy.txt").read_text()
    assert strictly((tmp_path / "out" / "summary.json").read_text()) == summary
    last = lines(tmp_path / "out" / "metrics.jsonl")[-1]
    assert summary["metrics"]["test_accuracy"] == last["test_accuracy"]
    assert summary["metrics"]["train_loss"] == last["not_private"]["train_loss"]


# the model


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), [("linear", "float32"), ("mlp", "float64"), ("small_cnn", "float32")])
def test_the_saved_model_has_the_accuracy_of_the_summary(tmp_path: Path, name: str, dtype: str) -> None:
    learns = ("method.name=fed_avg", "participation.name=full", "local.step=0.5", "local.steps=3", "run.rounds=10")
    summary = whole(tmp_path / "out", *SMALL, *learns, f"model.name={name}", f"run.dtype={dtype}", "run.seed=5")
    model = MODELS[name]((1, 8, 8), 10).to(getattr(torch, dtype))
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))  # strict: names, shapes, nothing missing
    digits = fn.data.digits()
    test = digits.take(split(len(digits), 0.2, generator(5, "split"))[1])
    outputs = model(torch.as_tensor(test.x).to(getattr(torch, dtype)))
    right = int((outputs.argmax(1).numpy() == test.y).sum())
    assert right / len(test) == summary["metrics"]["test_accuracy"]
    assert right / len(test) > 0.3


@pytest.mark.long
@pytest.mark.parametrize(("problem", "names"), [("quadratic", {"x"}), ("logistic", {"w"})])
def test_other_problems_save_their_vector(tmp_path: Path, problem: str, names: set[str]) -> None:
    summary = whole(tmp_path / "out", f"problem.name={problem}", "run.rounds=3", "local.step=0.01")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == names
    again = assemble(read(tmp_path / "out" / "config.toml")).problem.evaluate(tensors.popitem()[1])
    assert again.public | again.not_private == summary["metrics"]


# the same again


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "model.name=small_cnn local.name=sgd local.step=0.1 local.steps=3 local.batch_size=8 data.clients=3",
        "participation.name=fixed_size participation.m=7 participation.idle=sleep privacy.noise_std=0.3",
        "method.name=clip21_sgd2m method.batch_size=16 privacy.noise_std=1 privacy.trust=local run.dtype=float64",
        "method.name=dp_scaffold local.name=ig local.step=0.1 local.batch_size=30 local.order=reshuffle",
        "problem.name=logistic problem.positive=[0,2,4] problem.regularizer=0.01 data.partition=shards",
        "problem.name=quadratic problem.parts=3 run.seed=-7",
    ],
)
def test_the_resolved_config_gives_the_same_bits_again(tmp_path: Path, overrides: str) -> None:
    whole(tmp_path / "first", "run.rounds=4", *overrides.split())
    whole(tmp_path / "again", config=tmp_path / "first" / "config.toml")
    for name in ("config.toml", "metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_another_seed_gives_other_bits(tmp_path: Path) -> None:
    for seed in (0, 1):
        whole(tmp_path / str(seed), *SMALL, "run.rounds=1", f"run.seed={seed}")
    first, second = ((tmp_path / str(seed) / "model.safetensors").read_bytes() for seed in (0, 1))
    assert len(first) == len(second)
    assert first != second


@pytest.mark.parametrize(
    "name", ['quote " and \\ backslash', "ünïcödé 数据 😀", "tab\tand\nnew line\x7f", "# no = comment"]
)
def test_any_path_reads_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.npz"
    np.savez(path, x=np.eye(6), y=np.arange(6) % 2, client=np.arange(6) % 3, x_test=np.eye(6), y_test=np.arange(6) % 2)
    config = read(PLAIN, ["run.rounds=1"]) | {"data": {"source": str(path)}}
    perform(config, "test", tmp_path / "first", quiet=True)
    assert read(tmp_path / "first" / "config.toml")["data"]["source"] == str(path)
    whole(tmp_path / "again", config=tmp_path / "first" / "config.toml")


# how it ended


def test_a_run_that_diverges_keeps_its_last_finite_model(tmp_path: Path) -> None:
    summary = whole(
        tmp_path / "out", "problem.name=quadratic", "method.name=fed_avg", "local.step=100", "local.steps=1"
    )
    assert summary["status"] == "diverged"
    assert f"round {summary['rounds'] + 1}:" in summary["message"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES - {"model.json"}  # a vector, no model
    assert len(lines(tmp_path / "out" / "metrics.jsonl")) == summary["rounds"] > 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert tensors["x"].abs().max() > 1e10  # the last one, not the first
    assert "Fed" in describe(summary)


def test_figures_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    """A test set with a hole: the model is finite, its loss there is not."""
    x, y = np.random.default_rng(0).standard_normal((20, 3)), np.arange(20) % 2
    np.savez(tmp_path / "all.npz", x=x, y=y, client=y, x_test=np.full_like(x, np.inf), y_test=y)
    summary = whole(tmp_path / "out", f"data.source={tmp_path / 'all.npz'}", "run.rounds=2")
    assert math.isnan(summary["metrics"]["test_loss"])
    assert strictly((tmp_path / "out" / "summary.json").read_text())["metrics"]["test_loss"] is None
    assert [line["test_loss"] for line in lines(tmp_path / "out" / "metrics.jsonl")] == [None, None]
    assert strictly(to_json(summary))["metrics"]["test_loss"] is None
    assert "test loss      not finite\n" in describe(summary)


@pytest.mark.long
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_whatever_is_written_is_json(content: Any) -> None:
    """As the standard has it: the same content, with null for what is not finite, at any depth."""

    def expected(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: expected(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [expected(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    text = to_json({"all": content})
    assert strictly(text) == {"all": expected(content)}
    assert text.isascii()
    assert text.isprintable()


def test_updates_that_were_left_out_are_counted(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).standard_normal((20, 3)), np.arange(20) % 2
    x[y == 1] = np.nan
    np.savez(tmp_path / "all.npz", x=x, y=np.arange(20) // 4, client=y)
    summary = whole(tmp_path / "out", f"data.source={tmp_path / 'all.npz'}", "run.rounds=3", "participation.name=full")
    assert summary["left_out"] == 3
    assert [line["not_private"]["left_out"] for line in lines(tmp_path / "out" / "metrics.jsonl")] == [1, 1, 1]
    assert "left out       3 updates that were not finite" in describe(summary)


# where it goes


def test_without_a_path_runs_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outs = [perform(read(PLAIN, [*SMALL, "run.rounds=1"]), "mine", None, quiet=True)["out"] for _ in range(2)]
    assert outs == [str(Path("runs") / "mine-1"), str(Path("runs") / "mine-2")]
    assert default_path("mine") == Path("runs") / "mine-3"
    assert default_path("other") == Path("runs") / "other-1"


def test_a_folder_is_used_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with RunFolder.new(tmp_path / "empty", {"run": {"rounds": 3}}):
        pass
    before = {path.name: path.read_bytes() for path in (tmp_path / "empty").iterdir()}
    with pytest.raises(UserError, match="already holds a run: nothing was changed"):
        RunFolder.new(tmp_path / "empty", {"run": {"rounds": 4}})
    assert {path.name: path.read_bytes() for path in (tmp_path / "empty").iterdir()} == before


# what is drawn


def test_a_curve_in_one_line() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([2.0, 1.0, math.nan, 0.0, math.inf]) == "█▅▁"
    assert len(sparkline([float(k) for k in range(1000)])) <= 40


def test_the_figures_beside_a_bar() -> None:
    private = {"train_loss": 0.51234, "gradient_norm": 1.0}
    assert figures(Metrics({"test_loss": 0.5, "test_accuracy": 0.912}, private), False) == "loss 0.5123  accuracy 91.2%"
    assert figures(Metrics({"test_loss": 0.5}, private), False) == "loss 0.5123  test loss 0.5000"
    assert figures(Metrics({}, private), False) == "loss 0.5123"


def test_beside_an_epsilon_no_figure_of_the_clients_stands_unmarked() -> None:
    private = {"train_loss": 0.51234}
    assert (
        figures(Metrics({"test_loss": 0.5, "test_accuracy": 0.912}, private), True)
        == "accuracy 91.2%  test loss 0.5000"
    )
    assert figures(Metrics({}, private), True) == "loss 0.5123 (not private)"


def test_progress_does_not_change_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = read(PLAIN, [*SMALL, "run.rounds=3"])
    perform(config, "test", tmp_path / "shown", quiet=False)
    assert len(capsys.readouterr().err.splitlines()) == 3
    perform(config, "test", tmp_path / "quiet", quiet=True)
    assert capsys.readouterr() == ("", "")
    *_, last = start(assemble(config), fn.Threads(), lambda number, plan: None)
    for out in ("shown", "quiet"):
        tensors = load_file(tmp_path / out / "model.safetensors")
        assert torch.equal(torch.cat([tensors["1.weight"].flatten(), tensors["1.bias"]]), last.x)


@pytest.mark.parametrize(("method", "idle"), [("fed_normec", "advance"), ("scaffold", "sleep"), ("fed_avg", "sleep")])
def test_the_summary_says_what_idle_clients_really_did(method, idle, tmp_path):
    config = read(PLAIN, [f"method.name={method}", "run.rounds=1", "data.clients=3"])
    summary = perform(config, "idle", tmp_path / "out", quiet=True)
    assert (summary["participation"], summary["idle"]) == ("poisson(0.25)", idle)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, width: int, draw: Callable[[], object]) -> list[str]:
    """The last picture that a terminal of such a width shows, line by line."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    draw()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    return text.split("\r")[-1].splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("spent", ["ε 3.99", "ε 4.33e+06 NOT PRIVATE", None])
@pytest.mark.parametrize("measured", [{}, {"test_accuracy": 0.912, "test_loss": 0.4567}])
def test_the_bar_gives_way_and_no_word_is_cut(
    monkeypatch: pytest.MonkeyPatch, width: int, spent: str | None, measured: dict[str, float]
) -> None:
    def draw() -> None:
        with shown(300, quiet=False) as show:
            show(123, Metrics(measured, {"train_loss": 0.3}), spent)
            show(124, None, spent)

    lines = drawn(monkeypatch, width, draw)
    assert all(len(line) <= width for line in lines)
    words = " ".join(" ".join(lines).split())
    assert "…" not in words
    assert words.startswith("round 124/300 ")
    assert ("accuracy 91.2%" if measured else "loss 0.3000") in words
    assert (spent or "") in words
    kinds = r"━+╸?|╺|[\d.]+ (rounds/s|s/round)|ETA \d\d:\d\d|accuracy 91.2%|(test )?loss 0.\d{4}|\(not private\)"
    assert re.fullmatch(rf"round 124/300( ({kinds}|{re.escape(spent or 'ε')}))+", words)
    if width >= 60 and (measured or spent != "ε 4.33e+06 NOT PRIVATE"):
        assert len(lines) == 1
        assert "━" in words
    assert any((spent or "") in line for line in lines)
    if width == 120:
        assert re.search(r"s ETA|round ETA", words)


@pytest.mark.parametrize("width", [30, 60, 80])
def test_the_bars_of_many_runs_and_of_a_download_are_whole(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    def cells() -> None:
        with tallied(12, lambda news: "", quiet=False) as tell:
            tell(News(0, 1200, None, 0))
            tell(News(600, 1200, None, 6))

    def download() -> None:
        with counted("fetching fashion_mnist", quiet=False) as show:
            show(1, 4)

    (line,) = drawn(monkeypatch, width, cells)
    assert re.fullmatch(r"6/12 cells ━+╸? +50%( ETA \d\d:\d\d)?( after \d\d:\d\d)?", line)
    assert ("ETA" in line) == ("after" in line) == (width > 30) or (width == 30 and "after" not in line)
    (line,) = drawn(monkeypatch, width, download)
    assert re.fullmatch(r"fetching fashion_mnist( ━*╸? +| )25%( ETA \d\d:\d\d)?", line)
