"""Tables and folders of images by name in [data]: they train, their constants are spelled out, nothing is estimated
from clients in a private run, and a federation reads them as all agreed."""

import inspect
import json
from pathlib import Path
from typing import Any

import federated
import numpy as np
import pandas as pd
import pytest
import torch
from command import Command, sentence, sets
from federated import NAMES, Network
from PIL import Image

from fednormec.config.assemble import assemble
from fednormec.config.datasets import PARTITIONS, federated_data
from fednormec.config.forms import read_agreed
from fednormec.config.own import Loading
from fednormec.config.schema import Config, changed, check, dump, read
from fednormec.config.settings import DEALING
from fednormec.data import Examples, FederatedData, Kind
from fednormec.errors import UserError
from fednormec.federation.agreement import for_client, for_server, read_federation
from fednormec.federation.client import own_data
from fednormec.federation.provision import make

RNG = np.random.default_rng(0)
ROWS = 60
FRAME = pd.DataFrame({
    "hospital": [f"h{i % 5}" for i in range(ROWS)],
    "age": [None if i == 7 else round(float(value), 1) for i, value in enumerate(RNG.normal(50, 15, ROWS))],
    "colour": RNG.choice(["red", "green", "blue"], ROWS),
    "outcome": RNG.choice(["no", "yes"], ROWS),
})  # fmt: skip
TABLE: dict[str, Any] = {
    "label": "outcome", "client": "hospital", "labels": ["no", "yes"],
    "categories": {"colour": ["red", "green", "blue"]}, "missing": {"age": 50}, "scale": {"age": [50, 20]},
}  # fmt: skip
PRIVATE = {"epsilon": 8.0, "delta": 1e-5}


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    FRAME.to_csv("mine.csv", index=False)
    FRAME.to_parquet("mine.parquet")
    FRAME.drop(columns="hospital").head(20).to_csv("test.csv", index=False)


def config(private: bool = False, problem: dict[str, Any] | None = None, **data: Any) -> Config:
    """A config as it is read from a file; a setting that is None is left out."""
    asked: Config = {
        "problem": problem or {}, "model": {"name": "linear"}, "local": {"step": 0.5},
        "data": {"source": "mine.csv", **TABLE, **data}, "run": {"rounds": 2},
    }  # fmt: skip
    asked["data"] = {key: value for key, value in asked["data"].items() if value is not None}
    asked |= {"privacy": PRIVATE} if private else {}
    Path("asked.toml").write_text(dump(asked), encoding="utf-8")
    return read("asked.toml")


def data_of(asked: Config) -> FederatedData:
    return federated_data(asked, {}, 0, Loading()).data


def again(asked: Config) -> Config:
    """What a run folder's config.toml gives."""
    Path("again.toml").write_text(dump(assemble(asked).config), encoding="utf-8")
    return read("again.toml")


# TOML with tables in it


def test_tables_in_a_config_come_back() -> None:
    content: Config = {"data": {
        "scale": {"age": (40.0, 0.1), "a.b c": (1e-300, 5.0)}, "categories": {"ünï": ("a\n", '"', "\\", "")},
        "missing": {}, "label": ("a", "b"),
    }}  # fmt: skip
    Path("back.toml").write_text(dump(content), encoding="utf-8")
    listed = json.loads(json.dumps(content))  # tuples are lists there
    assert read("back.toml") == listed
    assert read("back.toml", ["data.scale={age = [40, 20]}"])["data"]["scale"] == {"age": [40, 20]}


def typed(hint: Any, value: Any) -> Any:
    def build(setting: Any) -> None: ...

    build.__annotations__["setting"] = hint
    return check("[x]", {"setting": value}, build)["setting"]


def test_settings_of_several_types() -> None:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    either = Mapping[str, Sequence[float]] | Literal["standard"] | None
    assert typed(either, {"a": [1, 2.5]}) == {"a": (1.0, 2.5)} and typed(either, "standard") == "standard"
    assert typed(str | Sequence[str], "a") == "a" and typed(str | Sequence[str], ["a"]) == ("a",)
    assert typed(Sequence[str | int], ["a", 1]) == ("a", 1) and typed(float | str, 3) == 3.0
    for hint, value, message in (
        (either, 3, r"setting must be a table, such as .* or 'standard', not 3"),
        (either, "other", "setting must be 'standard', not 'other'"),
        (either, {"a": 3}, r"setting.a must be a list, such as \[64, 64\], not 3"),
        (either, {"a": ["b"]}, "setting.a must be a number, not 'b'"),
        (str | Sequence[str], 3, r"setting must be a text or a list, such as \[\"a\", \"b\"\], not 3"),
        (Sequence[str | int], [True], "setting must be a text or a whole number, not True"),
        (float | str, [1], r"setting must be a number or a text, not \[1\]"),
        (Mapping[str, int], [1], r"setting must be a table, such as .*, not \[1\]"),
    ):
        with pytest.raises(UserError, match=message):
            typed(hint, value)


def test_another_partition_keeps_what_the_columns_mean() -> None:
    dealt = {key for build in PARTITIONS.values() for key in list(inspect.signature(build).parameters)[3:]}
    assert dealt == set(DEALING)
    before = config(partition="dirichlet", concentration=0.1, clients=3)
    after = changed(before, {"data.partition": "iid"})["data"]
    assert before["data"].keys() - after.keys() == {"concentration"}


# What a run makes of them


@pytest.mark.parametrize("source", ["mine.csv", "mine.parquet"])
def test_a_table_becomes_clients_by_name(source: str) -> None:
    data = data_of(config(source=source, test_fraction=0.0))
    assert data.names == ("h0", "h1", "h2", "h3", "h4") and data.num_classes == 2 and data.input_shape == (4,)
    first = FRAME[FRAME["hospital"] == "h0"]
    assert np.allclose(data.clients[0].x[:, 0], (first["age"] - 50) / 20)
    assert data.clients[0].y.tolist() == (first["outcome"] == "yes").astype(int).tolist()


@pytest.mark.long
def test_everything_is_spelled_out_and_gives_the_same_again() -> None:
    found = assemble(config(features=None))
    spelled = found.config["data"]
    assert spelled["features"] == ("age", "colour") and spelled["classes"] == 2 and spelled["partition"] == "by_ids"
    assert spelled["scale"] == {"age": (50.0, 20.0)} and spelled["test_fraction"] == 0.2
    once = again(config())
    more = assemble(once)
    assert more.data == found.data is not None
    assert dump(more.config) == dump(found.config)


def test_a_table_without_clients_is_dealt_out() -> None:
    plain = config(client=None, features=["age", "colour"], partition="dirichlet", clients=4)
    assert assemble(plain).problem.num_clients == 4
    assert again(plain)["data"]["concentration"] == 0.5
    with pytest.raises(UserError, match="'by_ids' needs data that name a client .* data.client of a table"):
        assemble(config(client=None, features=["age", "colour"], partition="by_ids"))
    with pytest.raises(UserError, match="ε would be for these and not for those who own the data"):
        assemble(config(private=True, partition="iid"))


def test_a_test_table_is_public_and_needs_no_clients() -> None:
    data = data_of(config(test="test.csv"))
    assert data.test is not None and len(data.test) == 20 and not data.held_out
    assert sum(map(len, data.clients)) == ROWS
    without = data_of(config())
    assert without.held_out and without.test is not None and len(without.test) == 10  # a fifth of each client's 12
    with pytest.raises(UserError, match="brings its own test set: leave test_fraction out"):
        assemble(config(test="test.csv", test_fraction=0.3))
    with pytest.raises(UserError, match="there is no file none.csv"):
        assemble(config(test="none.csv"))
    FRAME.head(5).to_parquet("test.parquet")
    FRAME.to_csv("semi.csv", sep=";", index=False)
    mixed = data_of(config(source="semi.csv", delimiter=";", test="test.parquet"))
    assert mixed.test is not None and len(mixed.test) == 5


def test_values_are_for_losses_that_compare_values() -> None:
    ages = {"label": "age", "labels": None, "missing": None, "scale": None}
    FRAME.dropna().to_csv("whole.csv", index=False)
    asked = config(problem={"loss": "mse"}, source="whole.csv", features=["colour"], **ages)
    data = data_of(asked)
    assert data.kind == Kind(targets="values") and data.outputs == 1
    assert assemble(asked).problem.num_clients == 5
    yes = data_of(config(problem={"loss": "binary_cross_entropy"}))
    assert set(np.unique(yes.clients[0].y)) <= {0.0, 1.0} and yes.outputs == 1 and yes.classes is None


def test_clients_trained_from_any_form_are_the_same() -> None:
    read_ = data_of(config(test_fraction=0.0))
    np.savez("mine.npz", x=np.concatenate([c.x for c in read_.clients]), y=np.concatenate([c.y for c in read_.clients]),
             client=np.repeat(read_.names, [len(c) for c in read_.clients]))  # fmt: skip
    plain = config(source="mine.npz", test_fraction=0.0, classes=2, **dict.fromkeys(TABLE))
    assert data_of(plain).digest == read_.digest
    for source in ("mine.csv", "mine.parquet"):
        assert data_of(config(source=source, test_fraction=0.0)).digest == read_.digest


# Estimates


def test_estimates_are_written_down() -> None:
    asked = config(scale="standard", missing="mean", categories="found", labels="found")
    spelled = again(asked)["data"]
    ages = FRAME["age"].dropna().astype(float)
    assert spelled["scale"]["age"] == pytest.approx([ages.mean(), ages.std(ddof=0)], rel=1e-12)
    assert spelled["missing"]["age"] == pytest.approx(ages.mean(), rel=1e-12)
    assert spelled["categories"] == {"colour": ["blue", "green", "red"]} and spelled["labels"] == ["no", "yes"]
    assert assemble(asked).data == assemble(read("again.toml")).data
    FRAME.head(9).to_csv("new.csv", index=False)
    new = read_agreed("new.csv", spelled, Kind(), 2)
    assert np.allclose(new.x[0, 0], (FRAME["age"][0] - ages.mean()) / ages.std(ddof=0))


@pytest.mark.parametrize(
    ("key", "word"), [("scale", "standard"), ("missing", "mean"), ("categories", "found"), ("labels", "found")]
)
def test_a_private_run_estimates_nothing_from_clients(key: str, word: str) -> None:
    with pytest.raises(
        UserError, match=f"{key} = '{word}' would be estimated from the clients' data, outside the mech"
    ):
        assemble(config(private=True, **{key: word}))
    assert assemble(config(private=True)).privacy is not None


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": None}, r"\[data\] for mine.csv needs the setting 'label'"),
        ({"label": None, "lable": "outcome"}, r"unknown setting in \[data\] 'lable'; did you mean 'label'"),
        ({"label": "result"}, "unknown column of mine.csv 'result'; there are: hospital, age, colour, outcome"),
        ({"labels": ["no", "maybe"]}, "mine.csv, row 2, column outcome: 'yes' is not listed in labels, no, maybe"),
        ({"classes": 3}, "classes = 3, but labels names 2"),
        ({"scale": {"age": [50]}}, r"scale of age must be \[shift, divisor\]"),
        ({"size": [3, 3]}, r"unknown setting in \[data\] 'size'"),
        ({"clients": 3}, r"clients is for examples that are dealt out, but mine.csv names"),
        ({"source": "none.csv"}, "there is no file none.csv"),
        ({"source": "mine.xlsx", **dict.fromkeys(TABLE)}, "mine.xlsx is in no form that is read here: save it as a t"),
        ({"source": "digits", "client": None}, r"\[data\] label is for tables and folders of images, and digits is n"),
        ({"pool": True, "test": "test.csv"}, "no client owns it"),
    ],
)
def test_mistakes_are_a_sentence_and_nothing_is_written(
    fednormec_: Command, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    config(**settings)
    said = fednormec_("run", "asked.toml", "--out", "out")
    assert said.code == 2 and not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=message):
        raise UserError(sentence(said.err))


def test_settings_of_tables_are_not_for_arrays() -> None:
    np.savez("mine.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1])
    for key, value in {"label": "y", "test": "test.csv", "size": [3, 3]}.items():
        with pytest.raises(UserError, match=f"{key} is for tables and folders of images, and mine.npz is neither"):
            assemble(config(source="mine.npz", **dict.fromkeys(TABLE) | {key: value}))


# Runs


@pytest.mark.long
def test_a_run_resumes_with_the_same_table_alone(fednormec_: Command) -> None:
    asked = config(test="test.csv")
    asked["run"] |= {"keep_checkpoint": True}
    Path("asked.toml").write_text(dump(asked))
    for changes in ("mine.csv", "test.csv"):
        out = Path("runs") / changes
        assert fednormec_("run", "asked.toml", "--out", out, "--quiet").code == 0
        model = (out / "model.safetensors").read_bytes()
        (out / "summary.json").unlink()
        before = Path(changes).read_text()
        Path(changes).write_text(before.replace("yes", "no", 1))
        said = fednormec_("run", "--resume", out, "--quiet")
        assert said.code == 2 and "the data in mine.csv are not those that the run began with" in said.err
        Path(changes).write_text(before)
        assert fednormec_("run", "--resume", out, "--quiet").code == 0
        assert (out / "model.safetensors").read_bytes() == model


@pytest.mark.long
def test_tables_given_on_the_command_line(fednormec_: Command) -> None:
    said = fednormec_("run", "--json", "--out", "out", *sets(
        "data.source=mine.csv", "data.label=outcome", "data.client=hospital", 'data.labels=["no", "yes"]',
        'data.categories={colour = ["red", "green", "*"]}', "data.scale={age = [50, 20]}", "data.missing={age = 50}",
        "run.rounds=2",
    ))  # fmt: skip
    assert said.code == 0, said.err
    assert json.loads(said.out)["clients"] == 5
    assert 'categories = {colour = ["red", "green", "*"]}' in Path("out/config.toml").read_text()


# Images


def images(folder: Path, clients: bool) -> None:
    for i in range(24):
        place = folder / f"client-{i % 3}" if clients else folder
        path = place / ("cat" if i // 3 % 2 else "dog") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 256, (6, 5)).astype(np.uint8)).save(path)


def test_folders_of_images_train(tmp_path: Path) -> None:
    for folder in ("named", "dealt", "other"):
        images(tmp_path / folder, clients=folder == "named")
    none = dict.fromkeys(TABLE)
    named = assemble(config(source="named", size=[4, 4], **none))
    assert named.problem.num_clients == 3 and named.problem.dim == 17 * 2
    assert named.config["data"]["labels"] == ("cat", "dog") and named.config["data"]["channels"] == 1
    assert assemble(again(config(source="named", size=[4, 4], **none))).data == named.data
    dealt = data_of(config(source="dealt", clients=4, test="other", **none))
    assert len(dealt.clients) == 4 and dealt.test is not None and len(dealt.test) == 24 and not dealt.held_out
    assert dealt.clients[0].x.max() <= 1 and dealt.input_shape == (1, 6, 5)
    with pytest.raises(UserError, match="numbers as inputs and classes as targets"):
        assemble(config(problem={"loss": "mse"}, source="dealt", **none))
    before = named.data
    Image.fromarray(np.zeros((6, 5), np.uint8)).save(next((tmp_path / "named").rglob("*.png")))
    assert assemble(config(source="named", size=[4, 4], **none)).data != before


# A federation

FEATURES = ["a", "b", "c", "d", "e"]
AGREED = {"label": "y", "features": FEATURES, "scale": {"a": [0.5, 2]}}


def files(tmp_path: Path) -> dict[str, list[str]]:
    """Each client's data as a table, its columns in an order of its own, and the same as arrays."""
    found: dict[str, list[str]] = {"csv": [], "npz": []}
    for i, (x, y) in enumerate(federated.data()):
        frame = pd.DataFrame(x, columns=FEATURES).assign(y=y, note="not for others")
        frame[[*frame.columns[::-1]] if i % 2 else [*frame.columns]].to_csv(tmp_path / f"{i}.csv", index=False)
        scaled = x.copy()
        scaled[:, 0] = (x[:, 0] - 0.5) / 2
        np.savez(tmp_path / f"{i}.npz", x=scaled, y=y)
        for form, paths in found.items():
            paths.append(str(tmp_path / f"{i}.{form}"))
    return found


@pytest.mark.long
def test_a_federation_of_tables_is_one_of_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for form, paths in files(tmp_path).items():
        asked = federated.config(data=AGREED) if form == "csv" else federated.config()

        def party(asked: Config, i: int, paths: list[str] = paths) -> object:
            return for_client(asked, NAMES[i], own_data(paths[i], asked))

        monkeypatch.setattr(federated, "party", party)
        (tmp_path / form).mkdir()
        *_, last = Network(asked, tmp_path / form).rounds()
        ends.append(last.x)
    assert torch.equal(*ends) and ends[0].abs().sum() > 0


def test_what_the_columns_mean_is_agreed_on(tmp_path: Path) -> None:
    one = for_server(federated.config(data=AGREED), tmp_path)
    other = for_server(federated.config(data=AGREED | {"scale": {"a": [0.5, 3]}}), tmp_path)
    none = for_server(federated.config(), tmp_path)
    elsewhere = for_server(federated.config(data={"source": "digits", "clients": 7}), tmp_path)
    assert len({one.agreed, other.agreed, none.agreed}) == 3 and none.agreed == elsewhere.agreed
    Path("run.toml").write_text(dump(one.experiment.config))
    assert for_server(read("run.toml"), tmp_path).agreed == one.agreed
    own = own_data(files(tmp_path)["csv"][0], federated.config(data=AGREED))
    assert for_client(federated.config(data=AGREED), NAMES[0], own).agreed == one.agreed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"0.csv is a table, and \[data\] in federation.toml does not say its label"),
        ({"label": "y"}, r"does not say its features: all clients must agree"),
        (AGREED | {"scael": {"a": [1, 2]}}, r"unknown setting in \[data\] 'scael'; did you mean 'scale'"),
        (AGREED | {"scale": "standard"}, "scale = 'standard' would be estimated by each client from its own data"),
        (AGREED | {"label": "z"}, "unknown column of .*0.csv 'z'"),
        (AGREED | {"features": ["a", "b"]}, r"agreed on examples of shape \(5,\), these data have \(2,\)"),
        (AGREED | {"labels": ["1", "0"]}, "classes = 3, but labels names 2"),
    ],
)
def test_a_table_that_was_not_agreed_on_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    asked = federated.config(data=given)
    path = files(tmp_path)["csv"][0]
    with pytest.raises(UserError, match=message):
        for_client(asked, NAMES[0], own_data(path, asked))


def test_the_folder_of_a_federation_has_the_meaning_and_the_test_table(tmp_path: Path) -> None:
    pd.DataFrame(np.ones((3, 5)), columns=FEATURES).assign(y="yes").to_csv("public.csv", index=False)
    asked: Config = {
        "data": AGREED | {"labels": ["no", "yes"]}, "federation": {"test": "public.csv"}, "model": {"name": "linear"},
        "local": {"step": 0.1}, "privacy": {"noise_std": 1.0, "trust": "local"},
    }  # fmt: skip
    Path("fed.toml").write_text(dump(asked))
    folder = make(tmp_path / "fed", ["a", "b"], [5], None, "localhost:9443", Path("fed.toml"))
    written = read_federation(folder)
    assert written["federation"]["classes"] == 2 and written["data"] == asked["data"]
    assert read_federation(folder / "clients" / "a") == written
    figures = for_server(written, folder).experiment.problem
    assert "test_accuracy" in figures.evaluate(figures.init(np.random.default_rng(0))).public


def test_images_of_a_federation_need_a_form(tmp_path: Path) -> None:
    images(tmp_path / "own", clients=False)
    with pytest.raises(UserError, match="does not say its size"):
        read_agreed("own", {"labels": ["cat", "dog"]}, Kind(), 2)
    form = {"labels": ["dog", "bird", "cat"], "size": [3, 3], "channels": 1}
    own = read_agreed("own", form, Kind(), 3)
    assert isinstance(own, Examples) and own.x.shape == (24, 1, 3, 3) and set(own.y) == {0, 2}
