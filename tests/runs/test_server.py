"""[server] and run.keep in a run: optimisers, schedules and averages from a config, and the model that is stored."""

import json

import numpy as np
import pytest
import torch
from command import Command, sentence, sets
from example_runs import interrupted, same, whole
from safetensors.torch import load_file
from simulations import mlp_problem

import fednormec as fn
from fednormec.algorithms.optimizers import OPTIMIZERS
from fednormec.config.assemble import assemble
from fednormec.config.schema import read
from fednormec.config.settings import QUICKSTART, THEORY
from fednormec.errors import UserError
from fednormec.runs.kept import BEST, Keeper
from fednormec.runs.runner import go_on

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = ("model.name=linear", "data.clients=6", "run.rounds=12", "run.checkpoint_rounds=3", "run.evaluate_every=2")
PRIVATE = (*SMALL, "privacy.noise_std=2")
BUSY = ("server.name=momentum", "server.schedule=cosine", "server.warmup=2", "server.average=tail",
        "server.local_schedule=linear", "server.beta_schedule=cooldown")  # fmt: skip


def model(out):
    return torch.cat([t.flatten() for t in load_file(out / "model.safetensors").values()])


@pytest.mark.long
@pytest.mark.parametrize("keep", ["last", "average", "best"])
@pytest.mark.parametrize("server", [*OPTIMIZERS])
def test_a_stopped_run_goes_on_to_the_same_files(tmp_path, server, keep):
    asked = (*PRIVATE, *BUSY, f"server.name={server}", f"run.keep={keep}")
    done = whole(tmp_path / "whole", *asked)
    interrupted(tmp_path / "stopped", *asked, after=8)
    again = go_on(tmp_path / "stopped", quiet=True)
    assert same(tmp_path / "whole", tmp_path / "stopped")
    assert done["kept"] == again["kept"] == keep and done.get("kept_best") == again.get("kept_best")
    assert not (tmp_path / "stopped" / BEST).exists()


def test_a_config_spells_out_what_the_server_does(tmp_path):
    whole(tmp_path / "run", *SMALL, *BUSY)
    section = read(tmp_path / "run" / "config.toml")["server"]
    assert section == {"name": "momentum", "decay": 0.9, "nesterov": False, "schedule": "cosine", "warmup": 2,
                       "local_schedule": "linear", "beta_schedule": "cooldown", "scaling": False, "average": "tail",
                       "average_decay": 0.95, "average_share": 0.25}  # fmt: skip
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["server"].startswith("momentum, cosine")


def test_a_config_builds_what_python_builds():
    config = read(QUICKSTART, [*SMALL, *BUSY])
    found = assemble(config)
    x = found.problem.init(np.random.default_rng(0))
    server = found.algorithm.start(x)
    shape = fn.schedule("cosine", 12, warmup=2)
    own = fn.optimizers.tail(fn.optimizers.scheduled(fn.optimizers.momentum(0.9), shape), 9)
    assert found.algorithm.optimizer.name == own.name
    direction = torch.linspace(-1, 1, len(x), dtype=x.dtype)
    for number in (1, 2, 3, 11):
        step = fn.Step(direction, 0.3, x[:0], 2.0)
        ends = [o.update(x, server.optimizer, step, number) for o in (found.algorithm.optimizer, own)]
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_the_best_model_is_the_best_that_was_evaluated(tmp_path):
    asked = (*PRIVATE, "privacy.noise_std=40", "server.average=ema")
    done = whole(tmp_path / "best", *asked, "run.keep=best")
    lines = [json.loads(line) for line in (tmp_path / "best" / "metrics.jsonl").read_text().splitlines()]
    figures = [(line["round"], name, line[name]) for line in lines for name in line if "accuracy" in name]
    highest = max(value for *_, value in figures)
    best = done["kept_best"]
    assert best["value"] == highest
    assert (best["round"], best["figure"], best["value"]) == next(f for f in figures if f[2] == highest)
    last = whole(tmp_path / "last", *asked)
    assert not torch.equal(model(tmp_path / "best"), model(tmp_path / "last"))
    assert last["kept"] == "last" and "kept_best" not in last


@pytest.mark.parametrize("keep", ["last", "average", "best"])
def test_the_stored_model_has_the_figures_that_were_recorded_of_it(fednormec_: Command, tmp_path, keep):
    asked = ("privacy.noise_std=40", "server.average=ema", f"run.keep={keep}")
    done = whole(tmp_path / "run", *PRIVATE, *asked)
    found = json.loads(fednormec_("evaluate", tmp_path / "run", "--json").out)
    assert found["recorded"] is True
    if keep == "best":
        assert found["metrics"]["test_accuracy"] == done["kept_best"]["value"]
    if keep == "average":
        assert found["metrics"]["test_accuracy"] == done["metrics"]["test_accuracy_averaged"]


def test_the_end_of_a_run_names_the_average_and_the_model_that_was_kept(fednormec_: Command, tmp_path):
    said = fednormec_("run", *sets(*PRIVATE, "server.average=tail", "run.keep=average"), "--out", tmp_path / "run")
    assert "\naverage        test accuracy " in said.out and "\nstored         the average model\n" in said.out
    assert "stored: the average model" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("damage", [5, {}, {"round": "x", "figure": 1, "value": []}, None])
def test_a_damaged_entry_of_the_best_model_is_passed_over(fednormec_: Command, tmp_path, damage):
    whole(tmp_path / "run", *PRIVATE, "run.keep=best")
    path = tmp_path / "run" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kept_best": damage}))
    for command in (("evaluate", tmp_path / "run"), ("report", tmp_path / "run", "--out", tmp_path / "r.html")):
        assert fednormec_(*command).code == 0


def test_from_python_the_kept_model_is_the_same_with_and_without_a_folder(tmp_path):
    problem = mlp_problem()
    method = fn.dp_fed_avg_clip(fn.gd(0.3)).with_optimizer(fn.optimizers.ema(fn.optimizers.momentum(0.5)))
    for keep in ("last", "average"):
        here = fn.train(problem, method, rounds=5, keep=keep)
        there = fn.train(problem, method, rounds=5, keep=keep, out=tmp_path / keep)
        assert torch.equal(here.x, there.x)
        assert read(tmp_path / keep / "config.toml")["server"]["name"].startswith("momentum, EMA")
    assert not torch.equal(fn.train(problem, method, rounds=5).x, here.x)


@pytest.mark.parametrize(("overrides", "said"), [
    (["run.keep=average"], "needs an average"),
    (["run.keep=mean"], "keep must be"),
    (["server.name=momentun"], "did you mean 'momentum'"),
    (["server.decay=0.5"], "decay"),
    (["server.name=momentum", "server.decay=1"], "decay must lie in"),
    (["server.warmup=100"], "warmup takes 100 rounds"),
    (["server.schedule=cosin"], "schedule must be"),
    (["server.average=ema", "server.average_decay=1"], "average_decay"),
    (["server.average=tail", "server.average_share=0"], "average_share"),
    (["method.name=dp_fed_avg_clip", "server.beta_schedule=linear"], "no beta to move"),
    (["server.scaling=true"], "cannot be scaled"),
    (["method.name=clip21", "server.local_schedule=linear"], "no local steps"),
])  # fmt: skip
def test_a_mistake_is_a_sentence_and_leaves_nothing(fednormec_: Command, tmp_path, overrides, said):
    done = fednormec_("run", *sets(*SMALL, *overrides), "--out", tmp_path / "run", "--quiet")
    assert done.code == 2 and said in sentence(done.err)
    assert not (tmp_path / "run").exists()


def test_clients_data_do_not_choose_the_best_model_of_a_private_run():
    problem, private = fn.random_quadratic(5, 3), fn.Privacy(noise_std=1.0)
    with pytest.raises(UserError, match="public test set"):
        fn.train(problem, fn.dp_fed_avg_clip(fn.gd(0.1)), privacy=private, rounds=2, keep="best")


def test_where_no_figure_decided_the_last_model_is_not_called_the_best():
    """As in a federation without a public test set, which is not evaluated before its clients are there."""
    *_, r = fn.simulate(fn.random_quadratic(5, 3), fn.fed_avg(fn.gd(0.1)), rounds=2, evaluate_every=1)
    keeper = Keeper("best", True, r.x * 0)
    keeper.after(r)
    assert keeper.facts() == {"kept": "last"} and torch.equal(keeper.model(), r.x)


def test_no_theorem_covers_an_optimiser(fednormec_: Command, tmp_path):
    asked = ["run.rounds=3", "server.name=momentum"]
    done = whole(tmp_path / "run", *asked, config=THEORY)
    assert done["guarantee"] == {"covered": False, "why_not": "no theorem covers an optimiser of the server or a "
                                 "schedule: leave [server] out."}  # fmt: skip
    plain = whole(tmp_path / "plain", "run.rounds=3", "server.name=sgd", "server.average=ema", config=THEORY)
    assert plain["guarantee"]["covered"]


def test_the_optimisers_are_listed(fednormec_: Command):
    rows = json.loads(fednormec_("methods", "--server", "--json").out)
    assert list(rows) == list(OPTIMIZERS)
    assert rows["momentum"]["settings"] == {"decay": 0.9, "nesterov": False}
    listed = json.loads(fednormec_("settings", "server", "--json").out)["server"]
    assert "average_share" in listed["settings"] and set(listed["names"]) == set(OPTIMIZERS)
