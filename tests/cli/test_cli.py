"""The command line: what a person or a script sees, and that a mistake costs one sentence and leaves nothing behind."""

import io
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from command import Command, sentence, sets
from paths import PLAIN, ROOT
from strict_json import strictly
from typer.main import get_command

import fednormec as fn
import fednormec.config.datasets
import fednormec.config.settings
from fednormec.algorithms.methods import METHODS
from fednormec.cli.main import app, main
from fednormec.data.federations import FEDERATIONS
from fednormec.data.images import IMAGE_SETS
from fednormec.problems.models import MODELS, TOKEN_MODELS
from fednormec.runs.summary import describe

pytestmark = pytest.mark.usefixtures("undrawn")

TOMLS = sorted(path for part in ("src", "experiments", "examples", "docs") for path in (ROOT / part).rglob("*.toml"))
LINE = re.compile(r"round (\d+)/(\d+)  [\d.]+ (?:rounds/s|s/round)  ETA \d+ s  loss [\d.]+  accuracy [\d.]+%")
X = np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32)
Y = np.arange(24) % 3
COMMANDS = [
    "run", "sweep", "reproduce", "config", "settings", "recommend", "privacy", "theory", "audit", "evaluate", "predict",
    "export", "compare", "report", "methods", "models", "data", "federation",
]  # fmt: skip


Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def _without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of what is said here has nothing to do with privacy; test_private_runs.py is about what has."""
    monkeypatch.setattr(fednormec.config.settings, "QUICKSTART", PLAIN)


@pytest.fixture
def refused(fednormec_: Command, tmp_path: Path) -> Refused:
    """What `fednormec run` says to a mistake: one sentence, exit code 2, and every file is as it was."""

    def run(*arguments: str, out: str = "out") -> str:
        before = files(tmp_path)
        said = fednormec_("run", *arguments, "--out", out)
        assert said.code == 2
        assert said.out == ""
        assert files(tmp_path) == before
        return sentence(said.err)

    return run


def files(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# mistakes in settings


@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("runn.rounds=3", "unknown section 'runn'; did you mean 'run'?"),
        ("optimizer.step=3", "unknown section 'optimizer'; there are: problem, data, features, model"),
        ("run.round=3", "unknown setting in [run] 'round'; did you mean 'rounds'?"),
        ("data.cliens=3", "unknown setting in [data] dirichlet 'cliens'; did you mean 'clients'?"),
        ("data.partitions=iid", "unknown setting in [data] dirichlet 'partitions'; did you mean 'partition'?"),
        ("data.test_fractoin=0.1", "did you mean 'test_fraction'?"),
        ("model.hiden=[3]", "unknown setting in [model] mlp 'hiden'; did you mean 'hidden'?"),
        ("model.nam=linear", "unknown setting in [model] mlp 'nam'; did you mean 'name'?"),
        ("local.setps=3", "unknown setting in [local] gd 'setps'; did you mean 'steps'?"),
        ("method.betta=3", "unknown setting in [method] fed_normec 'betta'; did you mean 'beta'?"),
        ("participation.probability=1", "unknown setting in [participation] poisson 'probability'; there are: p, idle"),
        ("participation.iddle=sleep", "did you mean 'idle'?"),
        ("privacy.noise_sd=1", "unknown setting in [privacy] 'noise_sd'; did you mean 'noise_std'?"),
        ("problem.vectorise=loop", "unknown setting in [problem] neural 'vectorise'; did you mean 'vectorize'?"),
        ("method.name=fed_normek", "unknown method 'fed_normek'; did you mean 'fed_normec'?"),
        ("model.name=resnet", "unknown model 'resnet'; did you mean 'resnet20'?"),
        ("data.source=digit", "there is no data set, file or folder 'digit'; did you mean 'digits'?"),
        ("data.source=cifar", "there is no data set, file or folder 'cifar'; did you mean 'cifar10'?"),
        ("data.source=fashion-mnits", "file or folder 'fashion-mnits'; did you mean 'fashion_mnist'?"),
        ("data.source=imagenet", "there is no data set, file or folder 'imagenet'; check the path."),
        ("data.partition=dirichlett", "unknown partition 'dirichlett'; did you mean 'dirichlet'?"),
        ("participation.name=poison", "unknown participation 'poison'; did you mean 'poisson'?"),
        ("local.name=sgdd", "unknown local 'sgdd'; did you mean 'sgd'?"),
        ("problem.name=quadratics", "unknown problem 'quadratics'; did you mean 'quadratic'?"),
        ("run.two\nlines=3", r"unknown setting in [run] 'two\nlines'"),
        ("run.\x1b[31m=3", r"unknown setting in [run] '\x1b[31m'"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_and_the_nearest_one_told(refused: Refused, override: str, message: str) -> None:
    assert message in refused(*sets(override))


@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("local.step=big", "[local] gd: step must be a number, not 'big'."),
        ("local.step=true", "[local] gd: step must be a number, not True."),
        ("local.step=[0.5]", "[local] gd: step must be a number, not [0.5]."),
        ("local.steps=2.0", "[local] gd: steps must be a whole number, not 2.0."),
        ("run.rounds=3.5", "[run]: rounds must be a whole number, not 3.5."),
        ("run.rounds=ten", "[run]: rounds must be a whole number, not 'ten'."),
        ("run.rounds=true", "[run]: rounds must be a whole number, not True."),
        ("run.seed=1979-05-27", "[run]: seed must be a whole number, not datetime.date(1979, 5, 27)."),
        ("run.evaluate_every=often", "[run]: evaluate_every must be a whole number, not 'often'."),
        ("run.dtype=float16", "[run]: dtype must be 'float32' or 'float64', not 'float16'."),
        ("run.dtype=32", "[run]: dtype must be 'float32' or 'float64', not 32."),
        ("run.device=[1]", "[run]: device must be a text, not [1]."),
        ("data.source=3", "[data]: source must be a text, not 3."),
        ("data.source=['a', 'b']", "[data]: source must be a text, not ['a', 'b']."),
        ("data.partition=true", "[data]: partition must be a text, not True."),
        ("data.test_fraction=true", "[data]: test_fraction must be a number, not True."),
        ("data.test_fraction=a fifth", "[data]: test_fraction must be a number, not 'a fifth'."),
        ("data.clients=2.0", "[data] dirichlet: clients must be a whole number, not 2.0."),
        ("data.clients={ a = 1 }", "[data] dirichlet: clients must be a whole number, not {'a': 1}."),
        ("model.hidden=64", "[model] mlp: hidden must be a list, such as [64, 64], not 64."),
        ("model.hidden=[64.0]", "[model] mlp: hidden must be a whole number, not 64.0."),
        ("model.hidden=[[64]]", "[model] mlp: hidden must be a whole number, not [64]."),
        ("model.name=3", "[model] needs a name, one of linear, mlp"),
        ("method.name=[]", "unknown method '[]'"),
        ("method.server_normalization=1", "server_normalization must be true or false, not 1."),
        ("method.initial_memory=one", "initial_memory must be 'zero' or 'local_updates', not 'one'."),
        ("participation.p=half", "[participation] poisson: p must be a number, not 'half'."),
        ("participation.idle=true", "idle must be 'advance' or 'sleep', not True."),
        ("privacy.noise_std=[1]", "[privacy]: noise_std must be a number, not [1]."),
        ("privacy.trust=central", "privacy needs epsilon (the noise is then calibrated) or noise_std, or both."),
        ("problem.vectorize=true", "vectorize must be 'auto' or 'layers' or 'vmap' or 'loop', not True."),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused(refused: Refused, override: str, message: str) -> None:
    assert message in refused(*sets(override))


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("participation.p=0", "the participation probability must lie in (0, 1], not 0.0."),
        ("participation.p=-0.1", "must lie in (0, 1]"),
        ("participation.p=1.5", "must lie in (0, 1]"),
        ("participation.p=nan", "must lie in (0, 1], not nan."),
        ("participation.name=fixed_size participation.m=0", "the size of a cohort must be at least 1, not 0."),
        ("participation.name=fixed_size participation.m=21", "a cohort of 21 clients cannot be drawn from 20."),
        ("local.steps=0", "steps must be at least 1, not 0."),
        ("local.steps=-1", "steps must be at least 1, not -1."),
        ("local.name=sgd local.step=1 local.batch_size=0", "batch_size must be at least 1, not 0."),
        ("local.name=ig local.step=1 local.epochs=0", "epochs must be at least 1, not 0."),
        ("method.warmup_rounds=-1", "warmup_rounds must be zero or a positive number, not -1."),
        ("method.name=ef21 method.k=0", "k must be at least 1, not 0."),
        ("method.name=clip21 method.batch_size=0", "batch_size must be at least 1, not 0."),
        ("method.name=clip21_sgd2m method.client_momentum=1.5", "client_momentum must lie in (0, 1], not 1.5."),
        ("data.clients=0", "clients must be a whole number of at least 1, got 0"),
        ("data.clients=-3", "clients must be a whole number of at least 1, got -3"),
        ("data.clients=5000", "every client needs at least one example, got 5000 clients for 1438 examples"),
        ("data.partition=iid data.clients=0", "clients must be a whole number of at least 1, got 0"),
        ("data.partition=shards data.clients=5000", "got 5000 clients for 1438 examples"),
        ("data.partition=shards data.shards_per_client=0", "shards_per_client must be a whole number of at least 1"),
        ("data.partition=shards data.shards_per_client=100", "got 2000 shards for 1438 examples"),
        ("data.partition=by_ids", "partition = 'by_ids' needs data that name a client for each example"),
        ("data.partition=", "unknown partition ''"),
        ("data.concentration=0", "concentration must be a positive finite number, got 0.0"),
        ("data.concentration=nan", "concentration must be a positive finite number, got nan"),
        ("data.test_fraction=1", "test_fraction must be at least 0 and below 1, got 1.0"),
        ("data.test_fraction=-0.1", "test_fraction must be at least 0 and below 1, got -0.1"),
        ("data.test_fraction=nan", "test_fraction must be at least 0 and below 1, got nan"),
        ("model.hidden=[]", "hidden must be one positive whole number per layer"),
        ("model.hidden=[0]", "hidden must be one positive whole number per layer"),
        ("model.name=small_cnn model.channels=[4,4,4,4]", "small_cnn needs images of shape"),
        ("model.name=small_cnn model.norm=batch", "norm must be one of group, none, got 'batch'"),
        ("problem.name=quadratic problem.clients=0", "num_clients must be at least 1, not 0."),
        ("problem.name=quadratic problem.dim=0", "dim must be at least 1, not 0."),
        ("problem.name=quadratic problem.condition=0.5", "condition must be a finite number of at least 1"),
        ("problem.name=logistic problem.regularizer=-1", "regularizer must be zero or a positive number"),
        ("problem.tile=0", "tile must be at least 1, not 0."),
        ("run.rounds=0", "rounds must be at least 1, not 0."),
        ("run.rounds=-5", "rounds must be at least 1, not -5."),
        ("run.evaluate_every=0", "evaluate_every must be at least 1, not 0."),
        ("run.workers=0", "workers must be at least 1, not 0."),
        ("run.chunk_size=0", "chunk_size must be at least 1, not 0."),
        ("run.device=toaster", "[run] device 'toaster' cannot be used here"),
        ("privacy.noise_std=0", "noise_std must be a positive number, not 0.0."),
        ("privacy.noise_std=-1", "noise_std must be a positive number, not -1.0."),
        ("privacy.noise_std=nan", "noise_std must be a positive number, not nan."),
        ("privacy.noise_std=1 privacy.trust=nobody", "'secagg' or 'local' or 'silo', not 'nobody'."),
        ("privacy.noise_std=1 method.name=fed_avg", "FedAvg does not bound what a client sends"),
        ("privacy.noise_std=1 method.name=scaffold", "SCAFFOLD does not bound what a client sends"),
        ("privacy.noise_std=1 method.name=ef21", "EF21 does not bound what a client sends"),
        ("privacy.noise_std=1 method.name=ef21_pp", "EF21-PP does not bound what a client sends"),
        ("privacy.noise_std=1 method.name=ef14 method.bound=top_k", "EF14 does not bound what a client sends"),
        ("method.name=econtrol method.bound=top_k method.tau=2", "tau has no meaning with bound = 'top_k'"),
        ("method.name=centred method.bound=top_k", "bound must be 'normalize' or 'clip', not 'top_k'"),
        ("privacy.noise_std=1 method.initial_memory=local_updates", "publishes the clients' exact updates"),
        ("method.name=alpha_normec", "alpha_normec is the method with every client in every round"),
    ],
)  # fmt: skip
def test_a_value_that_makes_no_sense_is_refused(refused: Refused, overrides: str, message: str) -> None:
    assert message in refused(*sets(*overrides.split()))


STEPS = [f"local.name={name} local.step" for name in ("gd", "ig", "sgd")] + [
    f"method.name={name} method.{key}"
    for name, method in METHODS.items()
    for key, hint in get_type_hints(method.build).items()
    if hint is float
]


@pytest.mark.long
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "0"])
@pytest.mark.parametrize("setting", STEPS)
def test_steps_and_sizes_are_positive_and_finite(refused: Refused, setting: str, value: str) -> None:
    if setting.endswith(("alpha", "error_weight", "rate", "pull")) and value == "0":
        value = "-0.1"  # plain normalisation, EF21, a bound that stays, local training
    assert f"not {float(value)}" in refused(*sets(*f"{setting}={value}".split()))


@pytest.mark.parametrize("override", ["run.rounds", "rounds=3", "run.=3", "=", "run"])
def test_an_override_must_be_section_key_value(refused: Refused, override: str) -> None:
    assert "--set takes section.key=value, such as method.beta=0.1" in refused("--set", override)


# mistakes in config files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = ", "my.toml is not valid TOML"),
        (b"[run\nrounds = 3", "my.toml is not valid TOML"),
        (b"[run]\nrounds = 3\nrounds = 4", "my.toml is not valid TOML"),
        (b"\xff\xfe[run]", "the config file my.toml cannot be read: 'utf-8' codec can't decode byte 0xff"),
        ("[run]\n".encode("utf-16"), "the config file my.toml cannot be read"),
        (b"run = 3", "'run' is a section: write [run] and its settings below, not run = 3."),
        (b"[[run]]\nrounds = 3", "'run' is a section: write [run] and its settings below"),
        (b"rounds = 3", "unknown section 'rounds'"),
        (b"[trainer]\nrounds = 3", "unknown section 'trainer'"),
        (b"['two\nlines']", "is not valid TOML"),
        (b'["two\\nlines"]', r"unknown section 'two\nlines'"),
        (b"[run]\n[run.more]\nrounds = 3", "unknown setting in [run] 'more'"),
        (b"[local]\nsteps = 3", "[local] gd needs the setting 'step'."),
        (b"", "[local] gd needs the setting 'step'."),
    ],
)  # fmt: skip
def test_a_broken_config_file_is_refused(refused: Refused, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "my.toml").write_bytes(content)
    assert message in refused("my.toml")


def test_a_config_that_is_no_file_is_refused(refused: Refused, tmp_path: Path) -> None:
    assert refused("nowhere.toml") == "there is no config file nowhere.toml."
    (tmp_path / "folder.toml").mkdir()
    assert refused("folder.toml") == "the config file folder.toml cannot be read: Is a directory."
    assert "cannot be read" in refused("")


# mistakes in data


def bad_data() -> dict[str, Callable[[Path], object]]:
    whole = dict(x=X, y=Y)
    return {
        "text.npz": lambda path: path.write_text("x,y\n1,2\n"),
        "empty.npz": lambda path: path.write_bytes(b""),
        "truncated.npz": lambda path: (np.savez(path, **whole), path.write_bytes(path.read_bytes()[:300])),
        "pickled.npz": lambda path: np.savez(path, x=X.astype(object), y=Y),
        "no_y.npz": lambda path: np.savez(path, x=X),
        "half_a_test.npz": lambda path: np.savez(path, **whole, x_test=X),
        "unequal.npz": lambda path: np.savez(path, x=X, y=Y[:5]),
        "nobody.npz": lambda path: np.savez(path, x=X[:0], y=Y[:0]),
        "negative.npz": lambda path: np.savez(path, x=X, y=Y - 1),
        "fractions.npz": lambda path: np.savez(path, x=X, y=Y / 2),
        "one_class.npz": lambda path: np.savez(path, x=X, y=0 * Y, client=Y),
        "no_shape.npz": lambda path: np.savez(path, x=X[:, 0], y=Y, client=Y),
        "nameless.npz": lambda path: np.savez(path, **whole, client=np.where(Y == 0, np.nan, Y)),
        "missing.npz": lambda path: None,
        "a" * 300: lambda path: None,
        "nobody": lambda path: path.mkdir(),
        "only_a_test": lambda path: (path.mkdir(), np.savez(path / "test.npz", **whole)),
        "an_empty_client": lambda path: (
            path.mkdir(), np.savez(path / "ann.npz", **whole), np.savez(path / "bob.npz", x=X[:0], y=Y[:0])
        ),
        "a_broken_client": lambda path: (path.mkdir(), (path / "ann.npz").write_text("hello")),
        "unlike_clients": lambda path: (
            path.mkdir(), np.savez(path / "ann.npz", **whole), np.savez(path / "bob.npz", x=X[:, :3], y=Y)
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text.npz", "expected an .npz file of plain arrays at text.npz"),
        ("empty.npz", "expected an .npz file of plain arrays at empty.npz"),
        ("truncated.npz", "expected an .npz file of plain arrays at truncated.npz"),
        ("pickled.npz", "expected an .npz file of plain arrays at pickled.npz"),
        ("no_y.npz", "no_y.npz: expected the keys x, y, found ['x']; add y"),
        ("half_a_test.npz", "half_a_test.npz: expected x_test and y_test together, found only x_test"),
        ("unequal.npz", "unequal.npz: expected one label per example, got 24 in x and 5 in y"),
        ("nobody.npz", "nobody.npz: expected at least one example, got no data"),
        ("negative.npz", "negative.npz: y must be whole numbers from 0 to 2147483647, got -1"),
        ("fractions.npz", "fractions.npz: y must be whole numbers from 0 to 2147483647, got 0.5"),
        ("one_class.npz", "there must be at least 2 classes, got 1: check the labels"),
        ("no_shape.npz", "input_shape must be the shape of one example"),
        ("nameless.npz", "every example must have a client id, got a missing one (NaN)"),
        ("missing.npz", "expected an .npz file at missing.npz, found none; check the path"),
        ("a" * 300, "there is no data set, file or folder 'aaa"),
        ("nobody", "expected one .npz file per client in nobody, found none"),
        ("only_a_test", "expected one .npz file per client in only_a_test, found none"),
        ("an_empty_client", "bob.npz: expected at least one example, got no data"),
        ("a_broken_client", "ann.npz, got something else, a damaged file or Python objects"),
        ("unlike_clients", "every example must have the same shape, got (5,) in client ann and (3,) in client bob"),
    ],
)
def test_bad_data_are_refused(refused: Refused, tmp_path: Path, name: str, message: str) -> None:
    bad_data()[name](tmp_path / name)
    assert message in refused(*sets(f"data.source={name}"))


@pytest.mark.parametrize("model", ["small_cnn", "resnet20"])
def test_a_model_for_images_refuses_flat_features(refused: Refused, tmp_path: Path, model: str) -> None:
    np.savez(tmp_path / "flat.npz", x=X, y=Y)
    message = refused(*sets("data.source=flat.npz", "data.clients=3", f"model.name={model}"))
    assert message.startswith(f"{model} needs images of shape (channels, height, width)")
    assert "got (5,)" in message


def test_more_clients_than_examples_are_refused(refused: Refused, tmp_path: Path) -> None:
    np.savez(tmp_path / "few.npz", x=X, y=Y)
    message = refused(*sets("data.source=few.npz", "data.clients=20"))
    assert "every client needs at least one example, got 20 clients for 19 examples" in message


def test_a_second_test_set_is_refused(refused: Refused, tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=X, y=Y, x_test=X, y_test=Y)
    message = refused(*sets("data.source=all.npz", "data.test_fraction=0.2"))
    assert message.startswith("all.npz brings its own test set: leave test_fraction out, or set pool = true")


@pytest.mark.parametrize(
    "setting", ["partition=iid", "pool=true", "pool=false", "test_fraction=0.1", "examples=3", "test_examples=3"]
)
def test_a_folder_is_not_dealt_out(refused: Refused, tmp_path: Path, setting: str) -> None:
    clients_in(tmp_path / "clients")
    message = refused(*sets("data.source=clients", f"data.{setting}"))
    key = setting.partition("=")[0]
    expected = f"[data] {key} is for data that are dealt out, but in the folder clients each file is a client"
    assert message == f"{expected}: leave {key} out."


def test_a_folder_takes_no_clients(refused: Refused, tmp_path: Path) -> None:
    clients_in(tmp_path / "clients")
    message = refused(*sets("data.source=clients", "data.clients=3"))
    assert "unknown setting in [data] from a folder, one file per client, 'clients'" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.examples=25"], "[data] examples must be from 1 to 24, as many as there are, not 25."),
        (["data.examples=0"], "[data] examples must be from 1 to 24, as many as there are, not 0."),
        (["data.examples=-1"], "[data] examples must be from 1 to 24, as many as there are, not -1."),
        (["data.examples=2.0"], "[data]: examples must be a whole number, not 2.0."),
        (["data.test_examples=7"], "[data] test_examples must be from 1 to 6, as many as there are, not 7."),
        (["data.pool=true", "data.examples=28"], "[data] examples must be from 1 to 27, as many as there are, not 28."),
        (["data.pool=true", "data.test_examples=4"], "[data] test_examples must be from 1 to 3, as many as there are"),
        (["data.pool=true", "data.test_fraction=0", "data.test_examples=1"], "test_examples needs a test set: set"),
        (["data.pool=yes"], "[data]: pool must be true or false, not 'yes'."),
        (["data.pool=true", "data.partition=by_ids"], "choose another partition than by_ids."),
        (["data.examples=2"], "every client needs at least one example, got 3 clients for 2 examples"),
    ],
)
def test_more_examples_than_there_are_are_refused(
    refused: Refused, tmp_path: Path, overrides: list[str], message: str
) -> None:
    np.savez(tmp_path / "all.npz", x=X, y=Y, x_test=X[:6], y_test=Y[:6])
    if not any("by_ids" in override for override in overrides):
        overrides = [*overrides, "data.clients=3"]
    assert message in refused(*sets("data.source=all.npz", *overrides))


# mistakes in the output folder


def test_an_output_folder_that_is_not_empty_is_left_alone(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    message = refused(out="full")
    assert message.startswith("the output folder full is not empty (it holds thesis.txt): nothing was changed")


def test_a_run_is_never_written_over(fednormec_: Command, refused: Refused) -> None:
    assert fednormec_("run", *sets("run.rounds=1", "model.name=linear"), "--out", "first").code == 0
    assert refused(out="first").startswith("the output folder first already holds a run: nothing was changed")


def test_a_note_does_not_come_before_a_mistake(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "in_the_way").write_text("a file")
    assert "cannot be made" in refused(*sets("method.name=clip21"), out="in_the_way")  # [local] has no use


def test_an_output_folder_that_cannot_be_made_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert refused(out="file") == "the output folder file cannot be made: File exists."
    assert refused(out="file/run") == "the output folder file/run cannot be made: Not a directory."
    assert refused(out="a" * 300).endswith("cannot be made: File name too long.")


def test_an_output_folder_that_cannot_be_written_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    if os.access(tmp_path / "locked", os.W_OK):
        pytest.skip("nothing is locked for this user")
    assert refused(out="locked") == "the output folder locked cannot be made: Permission denied."


# a process of its own


WITHOUT_TORCH = """
import sys
from fednormec.cli.main import main
sys.argv[0] = "fednormec"
try:
    main()
finally:
    assert not {"torch", "numpy", "sklearn"} & set(sys.modules)
"""


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["settings", "--help"], ["--version"]])
def test_help_answers_without_torch(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "fednormec" in done.stdout


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command by its words, those with commands of their own included."""
    group = group or get_command(app)
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_help_is_whole_and_plain(fednormec_: Command, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...]) -> None:
    """On 80 columns no summary of a command is cut short, and no bracket has a backslash before it."""
    monkeypatch.setenv("COLUMNS", "80")
    said = fednormec_(*path, "--help")
    assert (said.code, said.err) == (0, "")
    assert "\\[" not in said.out
    listed = said.out.partition("\nCommands:\n")[2].splitlines()
    assert all(re.fullmatch(r"  [a-z]+ +[A-Z][^.]*\.", line) and len(line) <= 80 for line in listed)
    assert bool(listed) == (path in [(), ("data",), ("federation",)])
    assert not re.search(r"(\.\.\.|…)$", said.out.partition("Options:")[2], flags=re.M)
    if not path:
        assert [line.split()[0] for line in listed] == COMMANDS


def modules(command: Any) -> set[str]:
    """Where the functions of a command, or of the commands in it, are written."""
    if command.callback is not None:
        return {command.callback.__module__}
    return set().union(*map(modules, command.commands.values()))


def test_every_command_has_a_file_of_its_own() -> None:
    found = {name: modules(command) for name, command in get_command(app).commands.items()}
    more = {"federation": {"fednormec.cli.federation_flower", "fednormec.cli.federation_roster"}}
    assert found == {name: {f"fednormec.cli.{name}"} | more.get(name, set()) for name in COMMANDS}


def test_a_terminal_without_greek_letters_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["fednormec", "methods"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert rb"Fed-\u03b1-NormEC" in written.getvalue()


# what a run prints


def test_json_is_one_object_on_stdout_and_progress_goes_to_stderr(fednormec_: Command, tmp_path: Path) -> None:
    said = fednormec_("run", "--json", *sets("run.rounds=3", "model.name=linear"), "--out", "out")
    assert said.code == 0
    result = strictly(said.out)
    assert (result["method"], result["rounds"], result["out"]) == ("Fed-alpha-NormEC", 3, "out")
    assert (result["status"], result["message"], result["left_out"]) == ("done", None, 0)
    assert set(result["metrics"]) == {"test_loss", "test_accuracy", "train_loss"}
    assert result["privacy"].startswith("none: no noise was added")
    assert not {"epsilon", "noise_std"} & set(result)
    dropped, *lines = said.err.splitlines()
    assert dropped == "note: --set model.name=linear drops model.hidden, which linear does not take."
    rounds = [LINE.fullmatch(line) for line in lines]
    assert [found and found.groups() for found in rounds] == [("1", "3"), ("2", "3"), ("3", "3")]
    result.pop("curve")
    assert result.pop("statement") is None
    assert Path(result.pop("report")).name == "report.html"
    assert strictly((tmp_path / "out" / "summary.json").read_text()) == result


def test_quiet_says_nothing_on_stderr(fednormec_: Command) -> None:
    said = fednormec_("run", "--quiet", *sets("run.rounds=2", "method.name=clip21"))
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("Clip21: 2 rounds, 20 clients, 4,810 parameters\n")


def test_a_person_is_told_what_matters(fednormec_: Command, tmp_path: Path) -> None:
    said = fednormec_("run", *sets("run.rounds=2"))
    summary = strictly((tmp_path / "runs" / "not_private-1" / "summary.json").read_text())
    metrics = summary["metrics"]
    assert f"test accuracy  {metrics['test_accuracy']:.1%}" in said.out
    assert f"train loss     {metrics['train_loss']:.4f}  (a look at the clients' data: not private)" in said.out
    assert "privacy        none: no noise was added, the clients' data are not protected" in said.out
    folder = Path("runs") / "not_private-1"
    assert said.out.endswith(f"run folder     {folder}\nreport         {folder / 'report.html'}\n")


def test_what_looks_at_clients_says_so_wherever_a_run_is_summed_up(fednormec_: Command, tmp_path: Path) -> None:
    """At its end and when it is looked at again."""
    x = X.copy()
    x[:2] = np.nan
    np.savez(tmp_path / "holes.npz", x=x, y=Y, client=np.arange(24) // 4)
    over = sets("data.source=holes.npz", "run.rounds=1", "participation.name=full")
    first = fednormec_("run", *over, "--out", "out").out
    assert "left out       1 updates that were not finite  (a look at the clients' data: not private)\n" in first
    assert fednormec_("run", "--resume", "out").out == first
    quadratic = fednormec_("run", *sets("problem.name=quadratic", "run.rounds=1")).out
    assert re.search(r"gradient norm  [\d.e+-]+  \(a look at the clients' data: not private\)\n", quadratic)
    apart = {"not_private": ["test_accuracy", "test_loss"], "metrics": {"test_accuracy": 0.5, "test_loss": 1.0}}
    summary = strictly((tmp_path / "out" / "summary.json").read_text()) | {"curve": "", "statement": None} | apart
    for line in describe(summary).splitlines():
        assert line.endswith("not private)") == line.startswith(("test accuracy", "test loss"))


def test_a_section_without_use_is_mentioned(fednormec_: Command) -> None:
    said = fednormec_("run", *sets("run.rounds=1", "problem.name=quadratic"))
    assert said.code == 0
    notes = [line for line in said.err.splitlines() if not line.startswith("round")]
    assert notes == ["note: this run has no use for [data].", "note: this run has no use for [model]."]


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        "local.step=1e30",
        "local.step=1e30 local.steps=1",
        "method.server_step=1e30",
        "method.server_step=1e30 local.steps=1 participation.name=full",
        "local.step=100 local.steps=1 method.server_step=1e12",
    ],
)
def test_a_run_that_diverges_is_kept_and_told(fednormec_: Command, tmp_path: Path, overrides: str) -> None:
    from safetensors.numpy import load_file

    said = fednormec_(
        "run", "--json", *sets("method.name=fed_avg", "run.rounds=60", *overrides.split()), "--out", "out"
    )
    assert said.code == 2
    *progress, last = said.err.splitlines()
    assert all(LINE.match(line) for line in progress if not line.startswith("note: --set "))
    found = re.match(
        r"the model diverged in round (\d+): .* The rounds before it are kept in out\.$", sentence(last + "\n")
    )
    assert found
    before = int(found[1]) - 1
    result = strictly(said.out)
    assert (result["status"], result["rounds"]) == ("diverged", before)
    records = [strictly(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == list(range(1, before + 1))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())


# every model, method, kind of data and config


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_model_runs_on_the_quickstart(fednormec_: Command, name: str) -> None:
    few = sets("data.clients=3", "local.steps=1") if name == "resnet20" else []
    said = fednormec_("run", "--json", *sets(f"model.name={name}", "run.rounds=1"), *few)
    assert said.code == 0, said.err
    assert strictly(said.out)["parameters"] == sum(p.numel() for p in MODELS[name]((1, 8, 8), 10).parameters())


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_on_the_quickstart(fednormec_: Command, name: str) -> None:
    everybody = sets("participation.name=full") if name == "alpha_normec" else []
    said = fednormec_("run", "--json", *sets(f"method.name={name}", "run.rounds=1"), *everybody)
    assert said.code == 0, said.err
    assert strictly(said.out)["status"] == "done"


def clients_in(folder: Path, test: bool = True) -> None:
    folder.mkdir()
    for name, rows in {"ann": slice(0, 5), "bob": slice(5, 14), "eve": slice(14, 24)}.items():
        np.savez(folder / f"{name}.npz", x=X[rows], y=Y[rows])
    if test:
        np.savez(folder / "test.npz", x=X, y=Y)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "clients", "tested"),
    [
        (lambda path: np.savez(path, x=X, y=Y, client=np.array(["ann", "bob", "eve"])[Y]), 3, True),
        (lambda path: np.savez(path, x=X, y=Y, client=Y // 2, x_test=X, y_test=Y), 2, True),
        (lambda path: np.savez(path, x=np.concatenate([X] * 2), y=np.tile(Y, 2)), 20, True),
        (lambda path: np.savez(path, x=np.concatenate([X] * 2), y=np.tile(Y, 2), x_test=X[:4], y_test=Y[:4]), 20, True),
        (lambda path: np.savez(path, x=X.reshape(24, 5, 1).astype(">f8"), y=Y.astype(float), client=Y), 3, True),
        (clients_in, 3, True),
        (lambda path: clients_in(path, test=False), 3, False),
    ],
    ids=["ids", "ids and a test set", "no ids", "a test set", "big-endian", "folder", "folder without a test set"],
)
def test_own_data_train(
    fednormec_: Command, tmp_path: Path, make: Callable[[Path], object], clients: int, tested: bool
) -> None:
    make(tmp_path / "mine.npz")  # a folder may be called so, too
    said = fednormec_("run", "--json", *sets("data.source=mine.npz", "run.rounds=2"), "--out", "out")
    assert said.code == 0, said.err
    result = strictly(said.out)
    assert (result["rounds"], result["clients"]) == (2, clients)
    assert ("test_accuracy" in result["metrics"]) == tested
    again = fednormec_("run", "--json", str(tmp_path / "out" / "config.toml"), "--out", "again")
    assert strictly(again.out)["metrics"] == result["metrics"]


def test_the_quickstart_is_among_the_configs() -> None:
    assert ROOT / "src" / "fednormec" / "config" / "quickstart.toml" in TOMLS


@pytest.mark.long
@pytest.mark.parametrize("path", TOMLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_in_the_repository_runs(fednormec_: Command, path: Path) -> None:
    """With digits in place of images that would have to be fetched; a real federation has nothing in its place."""
    source = tomllib.loads(path.read_text()).get("data", {}).get("source")
    if source in FEDERATIONS and not FEDERATIONS[source].path.exists():
        pytest.skip(f"{source} is not fetched: fednormec data fetch {source}")
    images = source in IMAGE_SETS
    said = fednormec_("run", str(path), *sets("run.rounds=1", *(["data.source=digits"] if images else [])))
    assert said.code == 0, said.err


# the other commands


def test_config_prints_what_it_would_run(fednormec_: Command, tmp_path: Path) -> None:
    said = fednormec_("config", *sets("method.name=dp_scaffold", "run.rounds=7"))
    drops = "--set method.name=dp_scaffold drops method.alpha, method.beta and method.server_normalization"
    assert (said.code, said.err) == (0, f"note: {drops}, which dp_scaffold does not take.\n")
    (tmp_path / "my.toml").write_text(said.out, encoding="utf-8")
    assert fednormec_("config", "my.toml").out == said.out
    assert 'name = "dp_scaffold"\ntau = 1.0\nserver_step = 1.0\n' in said.out
    assert set(path.name for path in tmp_path.iterdir()) == {"my.toml"}


def test_config_refuses_as_run_does(fednormec_: Command) -> None:
    said = fednormec_("config", *sets("run.round=7"))
    assert (said.code, said.out) == (2, "")
    assert "did you mean 'rounds'?" in sentence(said.err)


@pytest.mark.parametrize(("command", "table"), [("methods", METHODS), ("models", MODELS | TOKEN_MODELS)])
def test_methods_and_models_are_listed(fednormec_: Command, command: str, table: dict[str, object]) -> None:
    said = fednormec_(command)
    assert (said.code, said.err) == (0, "")
    assert [line for line in said.out.splitlines() if not line.startswith(" ")] == list(table)
    assert list(strictly(fednormec_(command, "--json").out)) == list(table)


def test_the_version_is_the_packages(fednormec_: Command) -> None:
    assert fednormec_("--version") == (0, f"fednormec {fn.__version__}\n", "")


PRIVACY = "privacy --clients 9 --rounds 2 --p 0.5 --trust central"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{PRIVACY} --epsilon 1e-20 --calibration paper", "the paper's formula gives noise of std"),
        (f"{PRIVACY} --epsilon 1e308 --calibration paper", "ask for another epsilon."),
        (f"{PRIVACY} --noise-std 1 --total-norm {10**30}", "ask for fewer dimensions."),
        ("run --set privacy.epsilon=1e-20 --set privacy.calibration=paper", "the paper's formula gives noise of std"),
        ("run --set privacy.epsilon=99999999999999999999", "a whole number in it does not fit 64 bits; write"),
        ("sweep --over run.seed=[99999999999999999999]", "a whole number in it does not fit 64 bits; write"),
        ("audit --set privacy.noise_std=1 --canaries 999999999999", "an audit takes at most 1,000,000,000 canaries"),
    ],
)  # fmt: skip
def test_an_error_speaks_of_what_was_given(fednormec_: Command, command: str, said: str) -> None:
    """Not of the noise, the clients or the text that it was turned into."""
    found = fednormec_(*command.split())
    assert (found.code, found.out) == (2, "")
    assert said in sentence(found.err)
    assert not re.search("noise_std|number of clients|must be a number", found.err)


SECAGG = {"--clients": "100", "--rounds": "60", "--trust": "secagg", "--adjacency": "zero_out"}


def test_what_drop_outs_and_colluders_cost_is_shown(fednormec_: Command) -> None:
    """The docs' figures: the noise of the sum is one Gaussian's, and each message has its share of it."""
    words = [word for pair in (SECAGG | {"--epsilon": "4"}).items() for word in pair]
    shown = fednormec_("privacy", *words).out
    lines = [line.split(": ")[1] for line in shown.splitlines() if "drop out (" in line]
    assert lines == [
        "noise_std 0.83749, +0.0% when all come; without that ε ≤ 4.00",
        "noise_std 0.8828, +5.4% when all come; without that ε ≤ 4.26",
        "noise_std 1.001, +19.5% when all come; without that ε ≤ 4.92",
    ]
    plain = fn.Mechanism(100, fn.full(), 1.0).calibrate(4.0, 1e-5, 60).noise_std
    found = json.loads(fednormec_("privacy", *words, "--colluders", "10", "--json").out)
    costs = next(one for one in found if one["accountant"] == "pld")["drop_outs"]
    for one, left in zip(costs, (90, 80, 60), strict=True):
        assert one["noise_std"] == pytest.approx(plain / math.sqrt(left), rel=1e-3)
    assert "10 colluders, where" in fednormec_("privacy", *words, "--colluders", "10").out


@pytest.mark.parametrize(
    ("more", "said"),
    [({"--min-survivors": "70", "--trust": "secag"}, "trust must be"),
     ({"--min-survivors": "31", "--fixed-size": "30"}, "a round needs 31 senders, and fixed_size(30) draws 30"),
     ({"--min-survivors": "70", "--colluders": "70"}, "70 colluders could be all of the 70 clients in a sum")],
)  # fmt: skip
def test_floors_that_no_run_could_keep_are_refused(fednormec_: Command, more: dict[str, str], said: str) -> None:
    asked = SECAGG | {"--epsilon": "4"} | more
    found = fednormec_("privacy", *(word for pair in asked.items() for word in pair))
    assert found.code == 2 and said in found.err and len(found.err.splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize(("option", "value"), [("epsilon", "1e308"), ("p", "1e-320")])
def test_an_extreme_target_is_answered_where_the_papers_formula_is_not(
    fednormec_: Command, option: str, value: str
) -> None:
    asked = {"--clients": "9", "--rounds": "2", "--trust": "central", "--adjacency": "zero_out", "--epsilon": "4"}
    asked |= {"--p": "0.5"} | {f"--{option}": value}
    found = fednormec_("privacy", *(word for pair in asked.items() for word in pair))
    assert (found.code, found.err) == (0, "")
    assert re.search(r"the paper's σ = .* is .*, beyond what can be accounted\n$", found.out)
