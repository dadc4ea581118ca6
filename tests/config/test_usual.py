"""Settings that fit a real federation: where a run begins, what a config leaves open, and what stays the user's own."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from command import Command, sentence, sets
from federation_files import TINY
from image_files import write

from fednormec.config.assemble import assemble
from fednormec.config.schema import Config, changed, dump, read
from fednormec.config.settings import QUICKSTART
from fednormec.config.usual import start, usual_path, with_usual
from fednormec.data import fetch
from fednormec.data.federations import FEDERATIONS
from fednormec.data.names import FEDERATIONS as NAMES
from fednormec.errors import UserError

ALL = pytest.mark.parametrize("name", NAMES)
RULES: Config = {"participation": {"name": "full"}, "local": {"name": "gd", "step": 0.1}}


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up federations in place of the real ones, all of them fetched."""
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "cache"))
    for name, (one, file) in TINY.items():
        monkeypatch.setitem(FEDERATIONS, name, one)
        fetch(one, write(tmp_path / "files" / name, {one.archive.file: file}))


def usual(name: str) -> Config:
    path = usual_path(name)
    assert path is not None
    return read(path)


@ALL
def test_the_shipped_settings_fit_and_repeat_themselves(name: str) -> None:
    experiment = assemble(usual(name))
    data, one = experiment.config["data"], FEDERATIONS[name]
    assert (data["partition"], data["inputs"], data["targets"]) == ("by_ids", *one.kind)
    assert data["classes"] == one.classes
    assert data["test_fraction"] == (0.0 if name == "shakespeare" else 0.2)
    assert experiment.privacy is not None and experiment.unused == ()
    again = assemble(tomllib.loads(dump(experiment.config)))
    assert again.config == experiment.config
    x = experiment.problem.init(np.random.default_rng())
    assert np.array_equal(x, again.problem.init(np.random.default_rng()))


@ALL
def test_what_a_config_leaves_out_is_what_fits(name: str) -> None:
    found = assemble({**RULES, "data": {"source": name}}).config
    for section in ("problem", "model"):
        assert usual(name)[section].items() <= found[section].items()
    assert found["local"]["name"] == "gd" and "privacy" not in found, "the rest is as everywhere"


def test_what_a_config_says_stays() -> None:
    def found(**sections: dict[str, object]) -> Config:
        return assemble({**RULES, "data": {"source": "rwm5yr"}, **sections}).config

    assert found(model={"name": "mlp", "hidden": [3]})["model"] == {"name": "mlp", "hidden": (3,)}
    assert found(problem={"metrics": ["auc"]})["problem"]["loss"] == "binary_cross_entropy"
    assert found(problem={"loss": "mse"})["problem"]["loss"] == "mse"
    logistic = assemble({**RULES, "data": {"source": "rwm5yr"}, "problem": {"name": "logistic"}})
    assert "model" not in logistic.config and logistic.unused == ()
    film = assemble({**RULES, "data": {"source": "movielens"}, "model": {"hidden": [4]}}).config["model"]
    assert film == {"name": "bag", "vocabulary": 1713, "hidden": (4,)}


def test_other_sources_have_no_settings_of_their_own() -> None:
    for source in ("digits", "fashion-mnist", "mine.npz", None, 3):
        assert usual_path(source) is None
    config: Config = {"data": {"source": "digits"}}
    assert with_usual(config) is config and with_usual({}) == {}


def test_a_run_without_a_config_begins_with_the_federations_own() -> None:
    assert start([]) == start(["run.rounds=3"]) == start(["data.source=digits"]) == QUICKSTART
    assert start(["run.rounds=3", "data.source=chem97"]) == usual_path("chem97")
    assert start(["data.source=chem97", "data.source=digits"]) == QUICKSTART


@pytest.mark.parametrize("reverse", [False, True])
def test_changing_the_source_drops_what_fits_the_old_one_alone(reverse: bool) -> None:
    """In whichever order the settings are given: a model that is named with the source stays."""
    settings = {"data.source": "chem97", "model.name": "mlp", "model.hidden": [2]}
    asked = changed(read(QUICKSTART), dict(reversed(settings.items())) if reverse else settings)
    assert asked["data"] == {"source": "chem97"} and asked["model"] == {"name": "mlp", "hidden": [2]}
    assert "model" not in changed(read(QUICKSTART), {"data.source": "movielens"})
    back = changed(usual("movielens"), {"data.source": "digits"})
    assert "model" not in back and "problem" not in back and back["data"] == {"source": "digits"}
    same = usual("movielens")
    assert changed(same, {"data.source": "movielens"}) == same


@pytest.mark.parametrize(
    ("source", "sections", "message"),
    [
        ("chem97", {"data": {"inputs": "tokens"}}, "chem97 has numbers as inputs and values as targets: leave"),
        ("shakespeare", {"data": {"targets": "values"}}, "shakespeare has tokens as inputs and classes as targets"),
        ("shakespeare", {"model": {"name": "mlp"}}, "mlp does not take tokens .* take bag or causal_net, or"),
        ("chem97", {"model": {"name": "bag"}}, "bag does not take numbers .* take linear, mlp, small_cnn or resnet20"),
        ("insteval", {"model": {"vocabulary": 9}}, r"\[model\] vocabulary = 9, but the data have tokens up to 2194"),
        ("insteval", {"model": {"vocabulry": 9}}, "did you mean 'vocabulary'"),
        ("insteval", {"problem": {"loss": "cross_entropy"}}, "cross entropy needs one whole number"),
        ("shakespeare", {"problem": {"loss": "mse"}}, "mse needs numbers with a point"),
        ("shakespeare", {"data": {"test_fraction": 0.1}}, "shakespeare brings its own test set"),
        ("shakespeare", {"data": {"pool": True}}, "no client owns it"),
        ("shakespeare", {"data": {"classes": 5}}, "expected labels from 0 to 4"),
        ("chem97", {"data": {"partition": "dirichlet"}}, "deals classes out, but the targets are values"),
        ("movielens", {"data": {"clients": 5}}, r"\[data\] clients is for examples that are dealt out, but movielens"),
        ("chem97", {"data": {"partition": "iid"}, "privacy": {"epsilon": 1.0}}, "chem97 names a client for each"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_a_sentence(source: str, sections: Config, message: str) -> None:
    config = {**RULES, **sections, "data": {"source": source, **sections.get("data", {})}}
    with pytest.raises(UserError, match=message) as caught:
        assemble(config)
    assert "\n" not in str(caught.value)


def test_tokens_of_ones_own_take_the_models_too(tmp_path: Path) -> None:
    x = np.arange(24).reshape(6, 4) % 5
    np.savez(tmp_path / "own.npz", x=x, y=x, client=np.arange(6) % 3)
    data = {"source": str(tmp_path / "own.npz"), "inputs": "tokens"}
    problem = assemble({**RULES, "data": data, "model": {"name": "causal_net", "width": 2, "layers": 1}}).problem
    assert problem.num_clients == 3
    with pytest.raises(UserError, match="the model mlp does not take tokens"):
        assemble({**RULES, "data": data})


# the command


def test_a_private_run_on_shakespeare_out_of_the_box(fednormec_: Command) -> None:
    arguments = ("run", "--quiet", "--json", *sets("data.source=shakespeare", "run.rounds=2", "participation.p=0.5"))
    first, second = (json.loads(fednormec_(*arguments, "--out", out).out) for out in ("one", "two"))
    assert first["status"] == "done" and first["private"] and 7 < first["epsilon"] <= 8
    assert len(Path("one/ledger.jsonl").read_text().splitlines()) == 1 + 2, "what is released, and each round"
    last = json.loads(Path("one/metrics.jsonl").read_text().splitlines()[-1])
    assert {"test_accuracy", "test_loss"} <= set(last), "the poems are public"
    assert "train_loss" in last["not_private"]
    assert Path("one/model.safetensors").read_bytes() == Path("two/model.safetensors").read_bytes()
    resolved = tomllib.loads(Path("one/config.toml").read_text())
    assert resolved["model"]["name"] == "causal_net" and resolved["data"]["partition"] == "by_ids"
    assert second["metrics"] == first["metrics"]


def test_a_misspelt_federation_names_the_nearest(fednormec_: Command) -> None:
    said = fednormec_("run", *sets("data.source=shakespear"))
    assert said.code == 2 and "did you mean 'shakespeare'?" in sentence(said.err)


def test_a_run_names_the_command_that_fetches(fednormec_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNORMEC_DATA", "nowhere")
    said = fednormec_("run", *sets("data.source=rwm5yr"))
    assert said.code == 2 and sentence(said.err).endswith("run: fednormec data fetch rwm5yr")
