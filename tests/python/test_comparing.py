"""Comparison and report of runs from Python, with one call each."""

from pathlib import Path

import numpy as np
import pytest
from simulations import mlp_problem

import fednormec as fn

pytestmark = pytest.mark.usefixtures("undrawn")

PROBLEM = mlp_problem(test=(np.eye(6), np.arange(6) % 3))
LOCAL = fn.gd(0.5)


def trained(out: Path, method: fn.Algorithm, seed: int = 0, problem: fn.Problem = PROBLEM) -> fn.Trained:
    return fn.train(problem, method, fn.poisson(0.5), rounds=3, seed=seed, out=out)


def test_two_methods_are_two_lines_and_seeds_share_one(tmp_path: Path) -> None:
    for seed in (0, 1):
        trained(tmp_path / f"mine-{seed}", fn.dp_fed_avg_clip(LOCAL), seed)
    other = trained(tmp_path / "other", fn.fed_avg(LOCAL))
    table = fn.compare(tmp_path)
    assert {row[0].strip("* "): row[1] for row in table.rows} == {"DP-FedAvg (clip)": "2", "FedAvg": "1"}
    assert str(table).splitlines()[0].split()[:2] == ["run", "seeds"]
    assert len(fn.compare(other, tmp_path / "mine-0").rows) == 2


def test_methods_that_share_a_name_are_told_apart_by_what_can_be_said(tmp_path: Path) -> None:
    trained(tmp_path / "small", fn.dp_fed_avg_clip(LOCAL, tau=0.1))
    trained(tmp_path / "large", fn.dp_fed_avg_clip(LOCAL, tau=1.0))
    assert {row[0].strip("* ") for row in fn.compare(tmp_path).rows} == {"bound=clip(0.1)", "bound=clip(1)"}
    trained(tmp_path / "stepping", fn.dp_fed_avg_clip(LOCAL, tau=1.0, server_step=0.5))  # nothing says so
    assert {row[0].strip("* ") for row in fn.compare(tmp_path).rows} == {"bound=clip(0.1)", "large", "stepping"}


def test_problems_of_one_shape_with_other_data_are_no_seeds_of_each_other(tmp_path: Path) -> None:
    for seed in (1, 2):
        trained(tmp_path / f"data-{seed}", fn.fed_avg(LOCAL), problem=fn.random_quadratic(9, 3, seed=seed))
    assert {row[0].strip("* ") for row in fn.compare(tmp_path).rows} == {"data-1", "data-2"}


def test_a_page_about_them(tmp_path: Path) -> None:
    done = trained(tmp_path / "mine", fn.dp_fed_avg_clip(LOCAL))
    page = fn.report(done, out=tmp_path / "page.html", figures=tmp_path / "figures")
    assert page == tmp_path / "page.html" and "DP-FedAvg (clip)" in page.read_text()
    assert {"table.md", "table.csv", "accuracy.png"} <= {path.name for path in (tmp_path / "figures").iterdir()}
    with pytest.raises(fn.UserError, match="page.html exists already: nothing was changed; .* force=True.$"):
        fn.report(done, out=page)
    assert fn.report(tmp_path / "mine", out=page, force=True) == page


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    with pytest.raises(fn.UserError, match="there is nothing to compare: name run folders"):
        fn.compare()
    with pytest.raises(fn.UserError, match="without a folder cannot be read back: train with out="):
        fn.compare(fn.train(PROBLEM, fn.fed_avg(LOCAL), rounds=1))
    with pytest.raises(fn.UserError, match="does not exist"):
        fn.report(tmp_path / "nowhere", out=tmp_path / "page.html")
