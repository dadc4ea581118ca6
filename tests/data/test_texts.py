"""Texts as inputs: whatever their form, the same strings; known by content; numbers only by features."""

import json
from pathlib import Path
from typing import Any

import federated
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from command import Command, sentence
from federated import NAMES, Network
from hypothesis import given
from hypothesis import strategies as st
from trained import settings, trained

import fednormec as fn
from fednormec.config.assemble import assemble
from fednormec.config.schema import Config, dump
from fednormec.data import (
    Columns,
    Examples,
    Kind,
    NpzData,
    from_arrays,
    from_datasets,
    from_frame,
    read_folder,
    read_npz,
    read_table,
)
from fednormec.data.features import Extractor, with_features
from fednormec.data.sources import Shapes, given_data
from fednormec.errors import UserError
from fednormec.federation.agreement import for_client, for_server, read_federation
from fednormec.federation.client import own_data
from fednormec.results.evaluating import evaluate
from fednormec.results.exporting import export
from fednormec.results.predicting import predict
from fednormec.runs.shapes import SHAPES, about, read_shapes

TEXTS = Kind("texts")
SOME = ["a bad cab", "Déjà vu\nagain ", "", "NA", "dad", "東京 🙂", "3", "a,b\t\"c\""]  # fmt: skip
LETTERS = """
import numpy as np


def letters(texts, of: str = "abcd"):
    assert texts.dtype == object and all(type(text) is str for text in texts)
    return np.array([[*(text.count(c) for c in of), len(text)] for text in texts], dtype=np.float32)


def clients():
    return {"north": (["a", "bb"], [0, 1]), "south": (["ccc"], [1]), "test": (["dd", "a"], [0, 1])}


def pair():
    return np.array(["a", "bb", "ccc", "d"]), [0, 1, 1, 0], ["n", "s", "n", "s"]


def alone():
    return ["a", "bb", "ccc"]
"""
any_text = st.text(st.characters(exclude_categories=["Cs"]))


def letters(texts: Any) -> np.ndarray:
    return np.array([[*(text.count(c) for c in "abcd"), len(text)] for text in texts], dtype=np.float32)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "cache"))
    (tmp_path / "own.py").write_text(LETTERS)
    return tmp_path


# Examples


@given(st.lists(any_text, min_size=1))
def test_texts_stay_as_they_are(texts: list[str]) -> None:
    objects = np.empty(len(texts), object)
    objects[:] = texts
    for form in (texts, tuple(texts), objects, pd.Series(texts, dtype=object)):
        found = Examples(form, np.zeros(len(texts)), TEXTS)
        assert (
            found.x.tolist() == texts and {type(text) for text in found.x} == {str} and found.x.shape == (len(texts),)
        )
    last = np.arange(len(texts))[::-1]
    assert found.take(last).x.tolist() == texts[::-1] and found.joined(found).x.tolist() == 2 * texts


@pytest.mark.parametrize("dtype", [None, ">U20", np.dtypes.StringDType()])
def test_arrays_of_numpys_texts_are_texts(dtype: Any) -> None:
    found = Examples(np.array(SOME, dtype), np.zeros(len(SOME)), TEXTS)
    assert found.x.tolist() == SOME and {type(text) for text in found.x} == {str}


@given(
    st.lists(any_text, max_size=4),
    st.one_of(st.none(), st.integers(), st.floats(), st.binary(), st.booleans(), st.just(["a"]), st.just(b"")),
    st.lists(any_text, max_size=4),
)  # fmt: skip
def test_what_is_no_text_is_named(before: list[str], wrong: Any, after: list[str]) -> None:
    texts = [*before, wrong, *after]
    with pytest.raises(UserError, match=rf"must be texts, got {type(wrong).__name__} at example {len(before)}; make"):
        Examples(texts, np.zeros(len(texts)), TEXTS)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ("one text", "one for each example, got dtype <U8 and shape"),
        (np.array([["a"], ["b"]]), r"got dtype <U1 and shape \(2, 1\); give a list of str"),
        (np.array([b"a", b"b"]), r"got dtype \|S1"),
        (torch.ones(2), "got dtype float32"),
        (["a", "b\ud800"], r"half of a character, '\\ud800', at example 1; decode them anew"),
        (["a"], "one label per example, got 1 in x and 2 in y"),
    ],
)
def test_bad_texts_are_refused(x: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Examples(x, [0, 1], TEXTS)
    with pytest.raises(UserError, match=f"client 0: .*{message}"):
        from_arrays([(x, [0, 1])], kind=TEXTS)


def test_texts_where_numbers_are_expected_say_so() -> None:
    with pytest.raises(UserError, match="x must be numbers .* or, if these are texts, say inputs = 'texts'"):
        Examples(np.array(["a", "b"]), [0, 1])
    with pytest.raises(UserError, match="every input must be alike, got texts in client 0 and numbers in client 1"):
        from_arrays([Examples(["a"], [0], TEXTS), Examples([1.0], [0])])
    with pytest.raises(UserError, match="a model takes numbers, and these are texts"):
        fn.NeuralProblem(fn.models.linear((1,), 2), from_arrays([(["a"], [0])], kind=TEXTS).clients)


@given(st.lists(any_text, min_size=1, max_size=5), st.lists(any_text, min_size=1, max_size=5))
def test_a_digest_is_of_the_content(one: list[str], other: list[str]) -> None:
    def digest(texts: list[str]) -> str:
        fresh = [text.encode().decode() for text in texts]  # other objects, the same texts
        return from_arrays([(fresh, np.zeros(len(texts)))], kind=TEXTS).digest

    assert digest(one) == digest(one)
    assert (digest(one) == digest(other)) == (one == other)


def test_a_digest_knows_where_a_text_ends() -> None:
    found = {from_arrays([(pair, [0, 1])], kind=TEXTS).digest for pair in (["ab", "c"], ["a", "bc"], ["abc", ""])}
    assert len(found) == 3


# Sources


def test_files_of_arrays(tmp_path: Path) -> None:
    x, y, ids = np.array(SOME), np.arange(8) % 2, np.arange(8) // 3
    np.savez(tmp_path / "all.npz", x=x, y=y, client=ids, x_test=x[:2], y_test=y[:2])
    found = read_npz(tmp_path / "all.npz", TEXTS)
    assert found.train.x.tolist() == SOME and found.test is not None and found.test.x.tolist() == SOME[:2]
    (tmp_path / "each").mkdir()
    for name in ("a", "b", "test"):
        np.savez(tmp_path / "each" / name, x=x, y=y)
    assert [one.x.tolist() for one in read_folder(tmp_path / "each", kind=TEXTS).clients] == [SOME, SOME]
    np.savez(tmp_path / "objects.npz", x=x.astype(object), y=y)
    with pytest.raises(UserError, match="Python objects"):  # these would be run, not read
        read_npz(tmp_path / "objects.npz", TEXTS)
    np.savez(tmp_path / "numbers.npz", x=np.ones(8), y=y)
    with pytest.raises(UserError, match="numbers.npz: x must be texts, one for each example, got dtype float64"):
        read_npz(tmp_path / "numbers.npz", TEXTS)


FRAME = pd.DataFrame(
    {"who": list("nsnsnsns"), "title": SOME[::-1], "review": SOME, "year": range(8), "good": [0, 1] * 4}
)


def to_saved(path: Path) -> Path:
    """What Hugging Face's `datasets` saves, as far as it is read."""
    path.mkdir()
    table = pa.Table.from_pandas(FRAME, preserve_index=False)
    with pa.OSFile(str(path / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return path


def test_tables_in_every_form(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "a.csv", index=False)
    FRAME.to_csv(tmp_path / "a.tsv.gz", index=False, sep="\t")
    FRAME.to_parquet(tmp_path / "a.parquet")
    forms = [tmp_path / name for name in ("a.csv", "a.tsv.gz", "a.parquet")]
    for source in (*forms, to_saved(tmp_path / "saved"), FRAME):
        one = read_table(source, Columns("good", "who", ["review"]), TEXTS)
        assert one.train.x.tolist() == SOME and one.train.y.tolist() == [0, 1] * 4
        both = read_table(source, Columns("good", "who", ["title", "review"]), TEXTS)
        assert both.train.x.tolist() == [f"{title}\n{review}" for title, review in zip(SOME[::-1], SOME, strict=True)]
    data = from_frame(FRAME, "good", "who", ["review"], test=FRAME, kind=TEXTS)
    assert data.names == ("n", "s") and data.clients[0].x.tolist() == SOME[::2] and data.input_shape == ()


def test_a_missing_cell_is_the_empty_text(tmp_path: Path) -> None:
    holes = pd.DataFrame({"review": ["a", None, float("nan"), pd.NA, ""], "good": [0, 1, 0, 1, 0]})
    holes.to_csv(tmp_path / "a.csv", index=False)
    holes.to_parquet(tmp_path / "a.parquet")
    nothing = pd.DataFrame({"review": [float("nan")] * 2, "good": [0, 1]})
    for source in (tmp_path / "a.csv", tmp_path / "a.parquet", holes):
        assert read_table(source, Columns("good"), TEXTS).train.x.tolist() == ["a", "", "", "", ""]
    assert read_table(nothing, Columns("good"), TEXTS).train.x.tolist() == ["", ""]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            Columns("good", "who", ["review", "year"]),
            "row 0, column year: expected a text, got int64; convert the column",
        ),
        (
            Columns("good", features=["review"], missing={"review": 0}),
            "missing is for columns of numbers, .* leave miss",
        ),
        (Columns("good", features=["review"], scale={"review": [0, 1]}), "scale is for columns of numbers"),
        (Columns("good", features=["review"], categories={"review": ["a"]}), "categories is for columns of numbers"),
        (Columns("good", features=["text"]), "unknown column of the data frame 'text'"),
    ],
)
def test_columns_that_are_no_texts_are_refused(columns: Columns, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_table(FRAME, columns, TEXTS)


def test_datasets_of_torch() -> None:
    pairs = list(zip(SOME, [0, 1] * 4, strict=True))
    assert from_datasets([pairs, pairs[:2]], pairs, TEXTS).clients[1].x.tolist() == SOME[:2]
    with pytest.raises(UserError, match="client 0, item 1, x: expected a text, got int"):
        from_datasets([[("a", 0), (3, 1)]], kind=TEXTS)


def test_what_code_gives() -> None:
    named = given_data({"a": (["x"], [0]), "test": (["y"], [1])}, "own", TEXTS)
    assert isinstance(named, fn.data.FederatedData) and named.test is not None and named.test.x.tolist() == ["y"]
    pair = given_data((["x", "y"], [0, 1], ["n", "s"]), "own", TEXTS)
    assert isinstance(pair, NpzData) and pair.train.x.tolist() == ["x", "y"]
    with pytest.raises(UserError, match="own, client a: x must be texts, got int at example 0"):
        given_data({"a": ([3], [0])}, "own", TEXTS)


# Features


def test_features_are_kept_by_content(tmp_path: Path) -> None:
    seen: list[str] = []

    def counted(texts: np.ndarray) -> np.ndarray:
        assert texts.dtype == object and {type(text) for text in texts} == {str}
        seen.extend(texts)
        return letters(texts)

    extractor = Extractor("letters", "1", lambda: counted)
    data = from_arrays([(SOME[:5], np.zeros(5)), (SOME[2:], np.zeros(6))], (["a"], [0]), TEXTS)
    found = with_features(data, extractor, tmp_path)
    assert sorted(seen) == sorted({*SOME, "a"}) and found.kind == Kind() and found.input_shape == (5,)
    for before, after in zip((*data.clients, data.test), (*found.clients, found.test), strict=True):
        assert np.array_equal(after.x, letters(before.x))
    again = from_arrays([(np.array(SOME), np.zeros(8))], kind=TEXTS)  # other objects, other clients
    assert np.array_equal(with_features(again, extractor, tmp_path).clients[0].x, letters(SOME))
    assert len(seen) == 9
    with_features(from_arrays([(["new", "a"], [0, 1])], kind=TEXTS), extractor, tmp_path)
    assert seen[9:] == ["new"]


def asked(source: str = "own.py:clients", **sections: Any) -> Config:
    features = {"features": {"name": "own.py:letters"}}
    return settings("linear", data={"source": source, "inputs": "texts"}) | features | sections


@pytest.mark.long
@pytest.mark.parametrize("source", ["own.py:clients", "own.py:pair"])
def test_code_of_the_users_brings_texts(here: Path, source: str) -> None:
    made = assemble(asked(source))
    assert made.shapes is not None and made.shapes.before == ((), "texts") and made.shapes.inputs == (5,)
    assert made.config["data"]["inputs"] == "texts" and made.problem.num_clients == 2
    assert assemble(asked(source, features={"name": "own.py:letters", "of": "a"})).problem.dim == 3 * 2


@pytest.mark.parametrize("problem", ["neural", "logistic"])
def test_texts_need_features(here: Path, problem: str) -> None:
    config = asked(problem={"name": problem})
    del config["features"]
    with pytest.raises(
        UserError, match=r'models take numbers: .* \[features\] name = "minilm" .*, or a function of your'
    ):
        assemble(config)


def test_features_of_images_do_not_take_texts(here: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch", reason="pip install 'fednormec[vision]'")
    with pytest.raises(UserError, match=r'efficientnet_lite0 take numbers, and the inputs are texts .*: take "minilm"'):
        assemble(asked(features={"name": "efficientnet_lite0"}))


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"source": "digits"}, "digits has numbers as inputs and classes as targets"),
        ({"scale": "standard"}, "scale is for columns of numbers"),
        ({"categories": "found"}, "categories is for columns of numbers"),
        ({"missing": {"review": "none"}}, "missing"),
        ({"inputs": "text"}, "inputs must be 'numbers' or 'tokens' or 'texts', not 'text'"),
    ],
)
def test_settings_that_do_not_go_with_texts(here: Path, given_: dict[str, Any], message: str) -> None:
    FRAME.to_csv("a.csv", index=False)
    data = {"source": "a.csv", "inputs": "texts", "label": "good", "features": ["review"], "clients": 2}
    if given_.get("source") == "digits":
        data = {"inputs": "texts"}
    with pytest.raises(UserError, match=message):
        assemble(asked() | {"data": data | given_})


# A run, and its model afterwards


def reviews(path: str, rows: int, label: bool = True) -> tuple[list[str], list[bool]]:
    """Writes a table of made-up reviews; those with more a than b are good. Some have commas and line breaks."""
    rng = np.random.default_rng(rows)
    texts = ["".join(rng.choice(list("abcd ,\n"), rng.integers(0, 20))) for _ in range(rows)]
    good = [text.count("a") > text.count("b") for text in texts]
    frame = pd.DataFrame({"who": [f"c{i % 5}" for i in range(rows)], "review": texts})
    frame.assign(good=np.where(good, "yes", "no")).drop(columns=[] if label else "good").to_csv(path, index=False)
    return texts, good


TABLE = {"source": "reviews.csv", "client": "who", "label": "good", "labels": ["no", "yes"], "features": ["review"]}


def run_of_reviews(folder: Path, **sections: Any) -> None:
    reviews("reviews.csv", 120)
    trained(folder / "run", asked(data=TABLE | {"inputs": "texts"}, run={"rounds": 20, "seed": 1}, **sections))


def said_of(texts: list[str]) -> np.ndarray:
    with torch.no_grad():
        return fn.load("run")(torch.from_numpy(letters(texts))).softmax(1).numpy()


@pytest.mark.long
def test_a_run_is_evaluated_and_predicts(here: Path) -> None:
    run_of_reviews(here)
    own = evaluate("run")
    assert own.recorded is True
    other, good = reviews("other.csv", 33)
    right = said_of(other).argmax(1) == np.array(good)
    assert evaluate("run", "other.csv").metrics["test_accuracy"] == right.mean()
    alone, _ = reviews("alone.csv", 21, label=False)
    np.savez("arrays.npz", x=np.array(alone))
    for source, texts in (("alone.csv", alone), ("arrays.npz", alone), ("own.py:alone", ["a", "bb", "ccc"])):
        predict("run", source, Path("y.csv"), {}, force=True)
        found = pd.read_csv("y.csv")
        np.testing.assert_allclose(found[["probability_0", "probability_1"]], said_of(texts), atol=1e-6)
        assert set(found["name"]) <= {"no", "yes"}
    assert evaluate("run", "own.py:clients").on.startswith("the test set of own.py:clients, 2 examples")
    assert "letters make of an example" in export("run", "torchscript", Path("m.pt")).notes[0]
    np.savez("numbers.npz", x=np.ones((3, 5)))
    with pytest.raises(UserError, match="numbers.npz: x must be texts"):
        predict("run", "numbers.npz", Path("z.csv"), {})


@pytest.mark.long
def test_logistic_regression_of_texts(here: Path) -> None:
    run_of_reviews(here, problem={"name": "logistic"})
    other, good = reviews("other.csv", 33)
    with torch.no_grad():
        scores = fn.load("run")(torch.from_numpy(letters(other))).numpy()
    right = scores * np.where(good, 1, -1) > 0  # an empty text has the score 0, which is never right
    assert evaluate("run", "other.csv").metrics["test_accuracy"] == right.mean()


@pytest.mark.long
def test_the_commands(fednormec_: Command, here: Path) -> None:
    reviews("reviews.csv", 60)
    Path("reviews.toml").write_text(dump(asked(data=TABLE | {"inputs": "texts"})))
    assert fednormec_("run", "reviews.toml", "--out", "run", "--quiet", "--not-private").code == 0
    assert fednormec_("evaluate", "run", "--data", "reviews.csv").code == 0
    assert fednormec_("predict", "run", "--data", "reviews.csv", "--out", "y.csv").code == 0
    assert len(pd.read_csv("y.csv")) == 60
    assert '"texts"' in fednormec_("settings", "data").out and "length" in fednormec_("settings", "features").out


def test_shapes_come_back(tmp_path: Path) -> None:
    shapes = Shapes((5,), (), 2, Kind(), ("no", "yes"), ((), "texts"))
    (tmp_path / SHAPES).write_text(json.dumps(about(shapes)))
    assert read_shapes(tmp_path) == shapes and shapes.examples == ((), TEXTS)
    (tmp_path / SHAPES).write_text(json.dumps(about(shapes)).replace("texts", "textures"))
    assert read_shapes(tmp_path) is None


# A federation


def of_texts(**sections: Any) -> Config:
    about = {"clients": list(NAMES), "inputs": [], "texts": True, "classes": 3}
    return federated.config(federation=about, features={"name": "own.py:letters"}) | sections


def own(client: int) -> tuple[list[str], np.ndarray]:
    rng = np.random.default_rng(client)
    return ["".join(rng.choice(list("abcd"), 6)) for _ in range(8)], rng.integers(0, 3, 8)


@pytest.mark.long
def test_a_federation_of_texts_is_one_of_their_features(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for kind, asked_ in (("texts", of_texts()), ("numbers", federated.config())):

        def party(asked_: Config, i: int, kind: str = kind) -> object:
            x, y = own(i)
            return for_client(asked_, NAMES[i], Examples(x if kind == "texts" else letters(x), y, Kind(kind)))

        monkeypatch.setattr(federated, "party", party)
        (here / kind).mkdir()
        (here / kind / "own.py").write_text(LETTERS)
        *_, last = Network(asked_, here / kind).rounds()
        ends.append(last.x)
    assert torch.equal(*ends) and ends[0].abs().sum() > 0


def test_that_inputs_are_texts_is_agreed_on(here: Path) -> None:
    server = for_server(of_texts(), here)
    assert server.experiment.shapes is not None and server.experiment.shapes.before == ((), "texts")
    mine = Examples(*own(0), TEXTS)
    assert for_client(of_texts(), NAMES[0], mine, here).agreed == server.agreed
    (here / "run.toml").write_text(dump(server.experiment.config))
    assert server.experiment.config["federation"]["texts"] is True
    one = {"clients": list(NAMES), "inputs": [], "classes": 3}
    (here / "other.py").write_text("import numpy as np\n\n\ndef zeros(x):\n    return np.zeros((len(x), 5))\n")
    alike = [federated.config(federation=one | {"texts": texts}, features={"name": "other.py:zeros"})
             for texts in (True, False)]  # fmt: skip
    assert for_server(alike[0], here).agreed != for_server(alike[1], here).agreed


@pytest.mark.parametrize("given_", [{"inputs": [5]}, {"tokens": True}])
def test_texts_say_all_about_inputs(here: Path, given_: dict[str, Any]) -> None:
    config = of_texts()
    with pytest.raises(UserError, match="texts = true says all about inputs: leave tokens out, and let inputs"):
        for_server(config | {"federation": config["federation"] | given_}, here)


@pytest.mark.parametrize("said_by", ["config", "option"])
def test_a_folder_for_a_federation_of_texts(fednormec_: Command, here: Path, said_by: str) -> None:
    reviews("public.csv", 20)
    reviews("north.csv", 30)
    table = {key: TABLE[key] for key in ("label", "labels", "features")}
    table |= {"inputs": "texts"} if said_by == "config" else {}
    option = ["--texts"] if said_by == "option" else []
    config = asked(data=table, federation={"test": "public.csv"})
    Path("reviews.toml").write_text(dump(config))
    said = fednormec_("federation", "init", "wrong", "reviews.toml", *option, "--inputs", "64")
    assert said.code == 2 and "leave --inputs out" in sentence(said.err) and not Path("wrong").exists()
    assert fednormec_("federation", "init", "fed", "reviews.toml", "--clients", "north,south", *option).code == 0
    folder = Path("fed/clients/north")
    agreed = read_federation(folder)
    assert agreed["federation"]["texts"] is True and agreed["federation"]["inputs"] == []
    np.savez("north.npz", x=np.array(["a", "b"]), y=[0, 1])
    for source in ("north.csv", "north.npz"):
        party = for_client(agreed, "north", own_data(source, agreed), folder)
        assert party.agreed == for_server(read_federation(Path("fed")), Path("fed")).agreed
        assert party.experiment.problem.dim == (5 + 1) * 2
    figures = for_server(read_federation(Path("fed")), Path("fed")).experiment.problem
    assert "test_accuracy" in figures.evaluate(figures.init(np.random.default_rng(0))).public
