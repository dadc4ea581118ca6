"""Settings of a federation that nobody chose: those that are made let clients learn, the others are refused."""

from pathlib import Path

import numpy as np
import pytest
from command import Command

import fednormec as fn
from fednormec.config.assemble import assemble
from fednormec.config.schema import Config
from fednormec.data import from_arrays
from fednormec.data.sources import digits
from fednormec.errors import UserError
from fednormec.federation.agreement import read_federation
from fednormec.federation.fitting import _outlook, fitted


def about(clients: int) -> dict[str, object]:
    return {"clients": [f"client-{i}" for i in range(clients)], "inputs": [64], "classes": 10}


def accuracy(config: Config, clients: int, seed: int = 0) -> float:
    """How good these settings are on the digits, which are dealt out evenly, on the 360 of them that are left."""
    examples, order = digits(), np.random.default_rng(0).permutation(1797)
    x, y = examples.x.reshape(1797, 64), examples.y
    parts = np.array_split(order[360:], clients)
    asked = {name: section for name, section in config.items() if name != "federation"}
    if "privacy" in asked:
        asked["privacy"] = asked["privacy"] | {"randomness": "seeded"}  # the same noise whenever this is run
    problem, method, who, privacy, run, *_ = assemble(
        asked, from_arrays([(x[part], y[part]) for part in parts], (x[order[:360]], y[order[:360]]))
    )
    *_, last = fn.simulate(problem, method, who, privacy, rounds=run.rounds, seed=seed, evaluate_every=run.rounds)
    assert last.metrics is not None
    return last.metrics.public["test_accuracy"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("trust", "clients", "least"),
    [(None, 3, 0.9), ("local", 230, 0.4), ("central", 16, 0.8), ("central", 60, 0.9)],
)
def test_what_is_made_learns(trust: str | None, clients: int, least: float) -> None:
    assert accuracy(fitted(about(clients), trust), clients) > least


@pytest.mark.parametrize(("trust", "enough"), [("local", 226), ("central", 16)])
def test_one_client_too_few_is_refused_with_the_number_it_takes(trust: str, enough: int) -> None:
    fitted(about(enough), trust)
    with pytest.raises(UserError, match=f"It takes {enough} clients"):
        fitted(about(enough - 1), trust)
    with pytest.raises(UserError, match=f"It takes {enough} clients"):
        fitted(about(2), trust)


@pytest.mark.parametrize(("trust", "power"), [("local", 0.5), ("central", 1.0)])
def test_the_ratio_falls_with_the_number_of_clients_as_the_refusal_says(trust: str, power: float) -> None:
    few, many = (_outlook(fitted(about(n), None) | {"privacy": PRIVACY}, trust).decisive for n in (100, 1600))
    assert few / many == pytest.approx(16**power, rel=0.01)


PRIVACY = {"epsilon": 8.0, "delta": 1e-5, "randomness": "secure"}


def test_init_takes_the_fitted_settings_or_writes_nothing(tmp_path: Path, fednormec_: Command) -> None:
    init = ("federation", "init", tmp_path / "fed", "--inputs", "64")
    said = fednormec_(*init, "--clients", "3")
    assert said.code == 2 and "nothing is promised to 3 clients" in said.err
    assert "226 clients, 18 with --trust secagg" in said.err and ", 16 with --trust central" in said.err
    assert not (tmp_path / "fed").exists()
    for words, why in (
        (("--clients", "9", "--trust", "centrall"), "--trust must be 'local' or 'secagg' or 'central'"),
        (("--clients", "9", "--trust", "central", "--not-private"), "leave one of them out"),
        ((tmp_path / "x.toml", "--not-private"), "CONFIG says what is private"),
    ):
        (tmp_path / "x.toml").write_text('[model]\nname = "linear"\n')
        said = fednormec_(*init, *words)
        assert said.code == 2 and why in said.err
    said = fednormec_(*init, "--clients", "19", "--trust", "central")
    assert said.code == 0 and "little can be learnt" not in said.err
    made = read_federation(tmp_path / "fed")
    assert made["privacy"]["trust"] == "central" and made["method"]["name"] == "dp_fed_avg_normalized"
    assert fednormec_("federation", "init", tmp_path / "open", "--clients", "3", "--not-private").code == 0
    assert "privacy" not in read_federation(tmp_path / "open")
