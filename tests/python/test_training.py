"""Training from Python with a run folder: the bits of a run without one, resumed to the same files, or a sentence."""

import json
import shutil
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command, sentence
from safetensors.torch import load_file
from simulations import mlp_problem

import fednormec as fn
from fednormec.python import values
from fednormec.results.reading import read_run
from fednormec.runs.records import finished

pytestmark = pytest.mark.usefixtures("undrawn")

QUADRATIC, MLP = fn.random_quadratic(12, 4, seed=1), mlp_problem(test=(np.eye(6), np.arange(6) % 3))
METHOD = fn.fed_normec(fn.gd(0.1, steps=2), beta=0.2)
PRIVATE = fn.Privacy(epsilon=6.0)
FILES = ("metrics.jsonl", "model.safetensors", "x.safetensors", "ledger.jsonl", "privacy.txt", "summary.json")


class Killed(Exception):
    """End of a process, as far as a folder can tell."""


def dying(after: int) -> fn.Observer:
    def look(r: fn.Round, record: fn.Record) -> None:
        if r.number == after:
            raise Killed

    return fn.Observer(look)


def killed(out: Path, after: int, *asked: Any, **settings: Any) -> None:
    with pytest.raises(Killed):
        fn.train(*asked, out=out, observers=[dying(after)], **settings)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def same(one: Path, other: Path) -> bool:
    left = [{name: (out / name).read_bytes() for name in FILES if (out / name).exists()} for out in (one, other)]
    told = [{**found, "summary.json": json.loads(found["summary.json"]) | {"out": None}} for found in left]
    return told[0] == told[1] and len(told[0]) >= 4


def alike(one: fn.Trained, other: fn.Trained) -> bool:
    assert torch.equal(one.x, other.x)
    assert str(one.diverged) == str(other.diverged)
    return (one.history, one.statement, one.stopped) == (other.history, other.statement, other.stopped)


# the same bits


@pytest.mark.parametrize("problem", [QUADRATIC, MLP], ids=["quadratic", "mlp"])
@pytest.mark.parametrize("participation", [None, fn.poisson(0.4), fn.poisson(0.5, idle="sleep"), fn.fixed_size(3)])
@pytest.mark.parametrize("privacy", [None, PRIVATE, fn.Privacy(noise_std=1.0, epsilon=20.0, delta=1e-3)])
def test_a_folder_changes_nothing(tmp_path: Path, problem: Any, participation: Any, privacy: Any) -> None:
    asked: Any = {"rounds": 6, "seed": 5, "evaluate_every": 2}
    without = fn.train(problem, METHOD, participation, privacy, **asked)
    done = fn.train(problem, METHOD, participation, privacy, **asked, out=tmp_path / "out")
    assert alike(without, done)
    assert (without.out, done.out) == (None, tmp_path / "out")
    if isinstance(done.model, torch.nn.Module):
        assert torch.equal(torch.cat([p.flatten() for p in done.model.parameters()]), without.x)


def test_a_run_that_diverges_or_starts_elsewhere_is_the_same_with_a_folder(tmp_path: Path) -> None:
    wild, x0 = fn.fed_avg(fn.gd(1e200, steps=3)), torch.full((4,), 3.0, dtype=torch.float64)
    for name, method in {"wild": wild, "tame": METHOD}.items():
        without = fn.train(QUADRATIC, method, rounds=4, x0=x0)
        done = fn.train(QUADRATIC, method, rounds=4, x0=x0, out=tmp_path / name)
        assert alike(without, done)
        assert (done.diverged is None) == (name == "tame")
        assert getattr(done.diverged, "round", None) == getattr(without.diverged, "round", None)


def test_a_run_that_is_stopped_is_the_same_with_a_folder(tmp_path: Path) -> None:
    def enough(public: fn.Record) -> str | None:
        assert "not_private" not in public
        return "enough" if public["epsilon"] > 3 else None

    without = fn.train(QUADRATIC, METHOD, privacy=PRIVATE, rounds=9, stop_when=enough)
    done = fn.train(QUADRATIC, METHOD, privacy=PRIVATE, rounds=9, stop_when=enough, out=tmp_path / "out")
    assert alike(without, done)
    assert done.stopped == "enough" and len(done.history) < 9
    assert done.statement is not None and done.statement.facts["rounds_counted"] == 9
    summary = finished(tmp_path / "out")
    assert summary is not None and (summary.status, summary["message"]) == ("stopped", "stopped on request: enough")


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    privacy = fn.Privacy(epsilon=np.float64(6.0), colluders=np.int64(0))
    done = fn.train(QUADRATIC, METHOD, fn.poisson(np.float64(0.5)), privacy, rounds=np.int64(3), out=tmp_path / "out")
    again = fn.resume(tmp_path / "out", QUADRATIC, METHOD, fn.poisson(0.5), fn.Privacy(epsilon=6.0), rounds=3)
    assert alike(done, again)


# the folder


def test_the_folder_is_that_of_a_run(tmp_path: Path, fednormec_: Command) -> None:
    out = tmp_path / "mine"
    done = fn.train(MLP, METHOD, fn.poisson(0.4), PRIVATE, rounds=4, out=str(out))
    names = {"config.toml", "environment.json", "privacy.json", "report.html", *FILES}
    assert set(contents(out)) == names
    run = read_run(out)
    assert run.problems == ()
    assert (run.protection, run.rounds, run.clients, run.status) == ("private", 4, 9, "done")
    assert run.expected_messages == pytest.approx(0.4 * 9 * 4)
    spent = fn.read_ledger(out / "ledger.jsonl")
    assert done.statement is not None and spent.epsilon(1e-5) == pytest.approx(done.statement.epsilon, rel=1e-9)
    assert torch.equal(load_file(out / "x.safetensors")["x"], done.x)
    assert "FedAvg" not in run.config["method"]["name"] and run.config["method"]["name"] == METHOD.name
    said = fednormec_("compare", out)
    assert said.code == 0 and "mine" in said.out
    assert fednormec_("report", out, "--out", "page.html").code == 0


def test_no_digest_of_clients_data_stands_among_what_is_public(tmp_path: Path) -> None:
    """Configs and streams of noise are published: they must be the same for neighbours."""
    for name, seed in {"one": 1, "other": 2}.items():
        fn.train(fn.random_quadratic(12, 4, seed=seed), METHOD, privacy=PRIVATE, rounds=2, out=tmp_path / name)
    configs = [(tmp_path / name / "config.toml").read_text() for name in ("one", "other")]
    assert configs[0] == configs[1]
    found = [json.loads((tmp_path / name / "environment.json").read_text()) for name in ("one", "other")]
    apart = [environment.pop("not_private") for environment in found]
    assert apart[0]["problem"]["data"] != apart[1]["problem"]["data"]
    assert apart[0]["problem"]["data"] not in json.dumps(found)


def test_the_history_as_a_frame(tmp_path: Path) -> None:
    done = fn.train(MLP, METHOD, privacy=PRIVATE, rounds=4, evaluate_every=2, out=tmp_path / "out")
    for result in (done, fn.resume(tmp_path / "out", MLP, METHOD)):
        frame = result.to_frame()
        assert list(frame.columns) == [
            "round", "epsilon", "delta", "not_private_computed", "not_private_sent", "not_private_left_out",
            "test_loss", "test_accuracy", "not_private_train_loss",
        ]  # fmt: skip
        assert frame["round"].tolist() == [1, 2, 3, 4]
        assert frame["test_loss"].isna().tolist() == [True, False, True, False]
        assert frame["epsilon"].tolist() == [record["epsilon"] for record in result.history]


def test_a_frame_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    done = fn.train(QUADRATIC, METHOD, rounds=1)
    found = util.find_spec
    monkeypatch.setattr("fednormec.engine.round.find_spec", lambda name: None if name == "pandas" else found(name))
    with pytest.raises(fn.UserError, match="^to_frame needs pandas: pip install pandas$"):
        done.to_frame()


# going on


@pytest.mark.long
@pytest.mark.parametrize("after", range(1, 7))
@pytest.mark.parametrize("problem", [QUADRATIC, MLP], ids=["quadratic", "mlp"])
def test_killed_after_any_round_it_goes_on_to_the_same_files(tmp_path: Path, problem: Any, after: int) -> None:
    asked = problem, METHOD, fn.poisson(0.4), PRIVATE
    whole = fn.train(*asked, rounds=6, seed=2, checkpoint_rounds=2, out=tmp_path / "whole")
    killed(tmp_path / "out", after, *asked, rounds=6, seed=2, checkpoint_rounds=2)
    done = fn.resume(tmp_path / "out", problem, METHOD)
    assert alike(whole, done)
    assert same(tmp_path / "whole", tmp_path / "out")
    assert not list((tmp_path / "out").glob("checkpoint*"))
    assert alike(done, fn.resume(tmp_path / "out", problem, METHOD)), "a finished run gives its result again"


def test_secure_noise_that_is_drawn_again_counts_again(tmp_path: Path) -> None:
    secure = fn.Privacy(noise_std=3.0, randomness="secure")
    killed(tmp_path / "out", 5, QUADRATIC, METHOD, privacy=secure, rounds=8, checkpoint_rounds=3)
    done = fn.resume(tmp_path / "out", QUADRATIC, METHOD)
    assert done.statement is not None
    assert (done.statement.facts["rounds"], done.statement.facts["rounds_drawn_again"]) == (10, 2)


def patient(rounds: int) -> Callable[[fn.Record], str | None]:
    """Stops when it has been asked so often, which it must remember."""
    seen = list[int]()

    def stop_when(public: fn.Record) -> str | None:
        seen.append(public["round"])
        assert seen == list(range(1, len(seen) + 1)), "every round, once and in order"
        return "patience" if len(seen) == rounds else None

    return stop_when


@pytest.mark.parametrize("after", range(1, 5))
def test_what_stops_a_run_sees_every_round_also_after_a_kill(tmp_path: Path, after: int) -> None:
    asked: Any = {"privacy": PRIVATE, "rounds": 9, "checkpoint_rounds": 2}
    whole = fn.train(QUADRATIC, METHOD, **asked, stop_when=patient(4), out=tmp_path / "whole")
    killed(tmp_path / "out", after, QUADRATIC, METHOD, **asked)
    done = fn.resume(tmp_path / "out", QUADRATIC, METHOD, stop_when=patient(4))
    assert alike(whole, done)
    assert same(tmp_path / "whole", tmp_path / "out")


def test_a_run_that_started_elsewhere_goes_on_from_there(tmp_path: Path) -> None:
    x0 = torch.full((4,), 3.0, dtype=torch.float64)
    whole = fn.train(QUADRATIC, METHOD, rounds=4, x0=x0)
    killed(tmp_path / "out", 2, QUADRATIC, METHOD, rounds=4, x0=x0)
    with pytest.raises(fn.UserError, match="it starts from another model .* or give the same x0"):
        fn.resume(tmp_path / "out", QUADRATIC, METHOD)
    assert alike(whole, fn.resume(tmp_path / "out", QUADRATIC, METHOD, x0=x0))


def own_rule(p: float) -> fn.Participation:
    return fn.Participation("odd ones", lambda m: p, lambda m, source: source.random(m) < p, "sleep")


def test_a_rule_of_ones_own_must_be_given_again(tmp_path: Path) -> None:
    whole = fn.train(QUADRATIC, METHOD, own_rule(0.5), rounds=4)
    killed(tmp_path / "out", 2, QUADRATIC, METHOD, own_rule(0.5), rounds=4)
    with pytest.raises(fn.UserError, match="'odd ones' is a rule of your own, .* give it to fn.resume, too"):
        fn.resume(tmp_path / "out", QUADRATIC, METHOD)
    with pytest.raises(fn.UserError, match="began with the participation 'odd ones'"):
        fn.resume(tmp_path / "out", QUADRATIC, METHOD, fn.poisson(0.5, idle="sleep"))
    with pytest.raises(fn.UserError, match="began with the participation 'odd ones'"):
        fn.resume(tmp_path / "out", QUADRATIC, METHOD, own_rule(0.25))
    assert alike(whole, fn.resume(tmp_path / "out", QUADRATIC, METHOD, own_rule(0.5)))


class Least:
    """Problem of one's own, least squares with one example each, which knows no digest."""

    tile = 3

    def __init__(self, targets: torch.Tensor) -> None:
        self._targets = targets
        self.num_clients, self.dim = targets.shape
        self.client_sizes = np.ones(len(targets), np.int64)

    def init(self, rng: np.random.Generator) -> torch.Tensor:
        return torch.zeros(self.dim, dtype=torch.float64)

    def grad(self, x: torch.Tensor, ids: np.ndarray, examples: np.ndarray | None = None) -> torch.Tensor:
        return x.expand(len(ids), self.dim) - self._targets[ids]

    def evaluate(self, x: torch.Tensor) -> fn.Metrics:
        return fn.Metrics({}, {"train_loss": float((x - self._targets).square().sum(1).mean() / 2)})

    def named(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x}

    def model(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_problem_of_ones_own_goes_on_and_other_data_are_refused(tmp_path: Path) -> None:
    targets = torch.arange(20, dtype=torch.float64).view(5, 4)
    whole = fn.train(Least(targets), METHOD, rounds=4)
    killed(tmp_path / "out", 2, Least(targets), METHOD, rounds=4)
    with pytest.raises(fn.UserError, match="the problem is not the one .*: its data or its loss are others"):
        fn.resume(tmp_path / "out", Least(targets + 1), METHOD)
    assert alike(whole, fn.resume(tmp_path / "out", Least(targets.clone()), METHOD))


# refusals


def louder(method: fn.Algorithm) -> fn.Algorithm:
    return method._replace(server=lambda server, mean, weights: method.server(server, 2 * mean, weights))


OTHERS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "parameters": (fn.random_quadratic(12, 5, seed=1), METHOD, {}, "it has 5 parameters, not 4"),
    "clients": (fn.random_quadratic(13, 4, seed=1), METHOD, {}, "it has 13 clients, not 12"),
    "class": (fn.random_logistic(12, 4), METHOD, {}, "it is a Logistic, not Quadratic"),
    "sizes": (fn.random_quadratic(12, 4, parts=2, seed=1), METHOD, {}, "other numbers of examples"),
    "data": (fn.random_quadratic(12, 4, seed=2), METHOD, {}, "its data or its loss are others"),
    "dtype": (fn.random_quadratic(12, 4, seed=1, dtype=torch.float32), METHOD, {}, "starts from another model"),
    "name": (QUADRATIC, METHOD._replace(name="mine"), {}, "called 'mine', not 'Fed-alpha-NormEC'"),
    "bound": (QUADRATIC, METHOD._replace(bound=fn.clip(2.0)), {}, "the radius of its bound is 2.0, not 1.0"),
    "slots": (QUADRATIC, METHOD._replace(memory_slots=2), {}, "it has 2 memory slots, not 1"),
    "number": (QUADRATIC, fn.fed_normec(fn.gd(0.1, steps=2), beta=0.3), {}, "or a number in one, is another"),
    "local": (QUADRATIC, fn.fed_normec(fn.gd(0.1, steps=3), beta=0.2), {}, "or a number in one, is another"),
    "code": (QUADRATIC, louder(METHOD), {}, "a function of it, or a number in one, is another"),
    "p": (QUADRATIC, METHOD, {"participation": fn.poisson(0.3)}, "than poisson.0.3.: leave participation out"),
    "rule": (QUADRATIC, METHOD, {"participation": fn.full()}, "than full: leave participation out"),
    "epsilon": (QUADRATIC, METHOD, {"privacy": fn.Privacy(epsilon=7)}, "privacy.epsilon = 6.0, not 7"),
    "rounds": (QUADRATIC, METHOD, {"rounds": 7}, "planned for 6 rounds, and its noise with it, not for 7"),
}


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "mine"
    killed(out, 3, QUADRATIC, METHOD, fn.poisson(0.4), PRIVATE, rounds=6, checkpoint_rounds=2)
    return out


@pytest.mark.parametrize("other", OTHERS)
def test_another_run_is_refused_in_a_sentence_and_nothing_is_changed(unfinished: Path, other: str) -> None:
    problem, method, more, said = OTHERS[other]
    before = contents(unfinished)
    with pytest.raises(fn.UserError, match=f"{said}.*start a new run.$") as found:
        fn.resume(unfinished, problem, method, **more)
    assert "\n" not in str(found.value)
    assert contents(unfinished) == before


def test_privacy_cannot_be_added_later(tmp_path: Path) -> None:
    killed(tmp_path / "out", 1, QUADRATIC, METHOD, rounds=3)
    with pytest.raises(fn.UserError, match="the run began without privacy"):
        fn.resume(tmp_path / "out", QUADRATIC, METHOD, privacy=PRIVATE)


def test_a_config_that_was_changed_is_refused(unfinished: Path, tmp_path: Path) -> None:
    shutil.copytree(unfinished, tmp_path / "out")
    config = tmp_path / "out" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 6", "rounds = 8"))
    with pytest.raises(fn.UserError, match=r"config.toml was changed since ledger.jsonl was begun"):
        fn.resume(tmp_path / "out", QUADRATIC, METHOD)


def test_another_version_of_python_is_said_and_goes_on(
    unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(unfinished, tmp_path / "out")
    monkeypatch.setattr(values, "VERSION", "3.99")
    monkeypatch.setattr(values, "fingerprint", lambda value: "of another bytecode" + repr(value)[:0])
    whole = fn.train(QUADRATIC, METHOD, fn.poisson(0.4), PRIVATE, rounds=6)
    assert alike(whole, fn.resume(tmp_path / "out", QUADRATIC, METHOD))
    assert "Python is 3.99, not 3." in capsys.readouterr().err


def test_the_command_line_says_where_to_go_on(unfinished: Path, fednormec_: Command) -> None:
    before = contents(unfinished)
    said = fednormec_("run", "--resume", unfinished)
    assert said.code == 2
    assert sentence(said.err) == (
        f"the run in {unfinished} was begun from Python, where its problem and its method are. To go on, call "
        f"fn.resume('{unfinished}', problem, algorithm) there."
    )
    for command in ("run", "audit", "theory", "config"):
        said = fednormec_(command, unfinished / "config.toml")
        assert said.code == 2 and "[python] says that problem and method came from Python" in sentence(said.err)
    assert contents(unfinished) == before


def test_what_a_config_began_is_not_resumed_here(tmp_path: Path, fednormec_: Command) -> None:
    assert fednormec_("run", "--quiet", "--out", "out", "--set", "run.rounds=1").code == 0
    with pytest.raises(fn.UserError, match="begun by its config and not from Python: fednormec run --resume "):
        fn.resume(tmp_path / "out", QUADRATIC, METHOD)


def test_a_folder_that_cannot_be_used_is_said_and_left_alone(tmp_path: Path, unfinished: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("dear")
    (tmp_path / "file").write_text("content")
    for out, said in {
        tmp_path / "full": r"is not empty \(it holds letter\): nothing was changed; choose another out.$",
        tmp_path / "file": "cannot be made: File exists.$",
        unfinished: rf"already holds a run.*or go on with it: fn.resume\('{unfinished}', problem, algorithm\).$",
    }.items():
        with pytest.raises(fn.UserError, match=said):
            fn.train(QUADRATIC, METHOD, rounds=3, out=out)
    for folder in (tmp_path / "full", tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(fn.UserError, match=f"{folder} holds no run to go on with.$"):
            fn.resume(folder, QUADRATIC, METHOD)
    assert contents(tmp_path / "full") == {"letter": b"dear"} and (tmp_path / "file").read_text() == "content"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"rounds": 0}, "rounds must be at least 1, not 0"),
        ({"rounds": 2.5}, "rounds must be a whole number, not 2.5"),
        ({"rounds": 3, "seed": 2**70}, "seed must fit 64 bits in a run folder"),
        ({"rounds": 3, "checkpoint_rounds": 0}, "checkpoint_rounds must be at least 1"),
        ({"rounds": 3, "observers": [print]}, "observers is a list of fn.Observer"),
        ({"rounds": 3, "x0": torch.zeros(3)}, "x0 must be 4 numbers"),
        ({"rounds": 3, "participation": fn.fixed_size(20)}, "a cohort of 20 clients cannot be drawn from 12"),
        ({"rounds": 3, "on": fn.Threads(2), "workers": 2}, "leave workers out"),
    ],
)
def test_a_mistake_leaves_nothing_behind(tmp_path: Path, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(fn.UserError, match=said):
        fn.train(QUADRATIC, METHOD, out=tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((METHOD, QUADRATIC), "problem is a problem, such as fn.NeuralProblem(...), not of type Algorithm."),
        ((QUADRATIC, QUADRATIC), "algorithm is a method, such as fn.fed_normec(fn.gd(0.1)), not of type Quadratic."),
        ((QUADRATIC, fn.fed_avg), "algorithm is a method, such as fn.fed_normec(fn.gd(0.1)), not of type function."),
        ((QUADRATIC, None), "algorithm is a method, such as fn.fed_normec(fn.gd(0.1)), not None."),
        ((QUADRATIC, METHOD, 0.2), "participation is a rule, such as fn.poisson(0.2), not 0.2."),
        ((QUADRATIC, METHOD, PRIVATE), "participation is a rule, such as fn.poisson(0.2), not of type Privacy."),
        ((QUADRATIC, METHOD, None, 4.0), "privacy is what to keep to, such as fn.Privacy(epsilon=4), not 4.0."),
    ],
)
def test_values_in_each_others_place_are_said(tmp_path: Path, unfinished: Path, asked: Any, said: str) -> None:
    for call in (
        lambda: fn.train(*asked, rounds=2),
        lambda: fn.train(*asked, rounds=2, out=tmp_path / "out"),
        lambda: fn.resume(unfinished, *asked),
        lambda: fn.sweep(*asked, rounds=2, out=tmp_path / "out", quiet=True),
    ):
        with pytest.raises(fn.UserError) as found:
            call()
        assert str(found.value).endswith(said) or "needs 'local'" in str(found.value)
    assert not (tmp_path / "out").exists()


def test_checkpoints_need_a_folder() -> None:
    with pytest.raises(fn.UserError, match="checkpoint_rounds is for a run with a folder: give out"):
        fn.train(QUADRATIC, METHOD, rounds=3, checkpoint_rounds=1)


def test_a_finished_run_without_its_vector_is_said(tmp_path: Path) -> None:
    fn.train(QUADRATIC, METHOD, rounds=1, out=tmp_path / "out")
    (tmp_path / "out" / "x.safetensors").write_bytes(b"no tensors")
    with pytest.raises(fn.UserError, match="x.safetensors, the model of a finished run, cannot be read"):
        fn.resume(tmp_path / "out", QUADRATIC, METHOD)
