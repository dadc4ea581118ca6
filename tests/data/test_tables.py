"""Tables: whatever the form, the same content gives the same examples; a cell that does not fit is named."""

import csv
import gzip
import json
import math
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fednormec as fn
from fednormec.data import Columns, Kind, NpzData, from_frame, read_table
from fednormec.data import tables as of_tables
from fednormec.data.cells import BadCell, numbers
from fednormec.data.columns import OTHER
from fednormec.data.encoding import encoded
from fednormec.data.estimating import settled
from fednormec.data.tables import open_table
from fednormec.errors import UserError

SAVED = Path(__file__).parent / "saved"  # by datasets 5.2.0: DatasetDict({"train": ..., "test": ...}).save_to_disk
VALUES = Kind(targets="values")
FRAME = pd.DataFrame({
    "hospital": ["north", "south", "north", "east", "south", "north"],
    "age": [30, 41.5, math.nan, 22, 67, 50],
    "smoker": [True, False, False, True, True, False],
    "colour": ["red", "green", None, "blue", "red", "green"],
    "visits": [1, 0, 3, 2, 2, 12],
    "outcome": ["no", "yes", "yes", "no", "no", "yes"],
})  # fmt: skip
COLUMNS = Columns(
    label="outcome", client="hospital", labels=["no", "yes"], categories={"colour": ["red", "green", "blue"]},
    missing={"age": 40, "colour": "green"}, scale={"age": [40, 20], "visits": [0, 2]},
)  # fmt: skip
X = np.array([
    [-0.5, 1, 1, 0, 0, 0.5],
    [0.075, 0, 0, 1, 0, 0],
    [0, 0, 0, 1, 0, 1.5],
    [-0.9, 1, 0, 0, 1, 1],
    [1.35, 1, 1, 0, 0, 1],
    [0.5, 0, 0, 1, 0, 6],
])  # fmt: skip
Y = [0, 1, 1, 0, 0, 1]


def to_csv(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_csv(path / "all.csv", index=False)
    return path / "all.csv"


def to_csv_with_index(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_csv(path / "index.csv")
    return path / "index.csv"


def to_gz(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_csv(path / "all.csv.gz", index=False)
    return path / "all.csv.gz"


def to_tsv(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_csv(path / "all.tsv", index=False, sep="\t")
    return path / "all.tsv"


def to_parquet(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_parquet(path / "all.parquet")
    return path / "all.parquet"


def to_saved(frame: pd.DataFrame, path: Path) -> Path:
    """As `datasets` saves it: Arrow streams, and a state that names them."""
    folder = path / "saved"
    folder.mkdir()
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    table = pa.Table.from_pandas(frame, preserve_index=False)
    for name, part in zip(names, (table.slice(0, 2), table.slice(2)), strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def to_frame(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    return frame


class Polars:
    """A frame that is no pandas frame."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame, self.columns = frame, list(frame.columns)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._frame[name].to_numpy()

    def __len__(self) -> int:
        return len(self._frame)


FORMS: list[Callable[[pd.DataFrame, Path], Any]] = [
    to_csv, to_csv_with_index, to_gz, to_tsv, to_parquet, to_saved, to_frame, lambda frame, path: Polars(frame),
]  # fmt: skip


def same(one: NpzData, other: NpzData) -> bool:
    ids = (one.client_ids is None) == (other.client_ids is None) and (
        one.client_ids is None or list(one.client_ids) == list(other.client_ids)
    )
    arrays = [(a.x, a.y) for a in (one.train, other.train)]
    return ids and all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(*arrays, strict=True))


def written(path: Path, text: str, name: str = "mine.csv") -> Path:
    (path / name).write_text(text, encoding="utf-8")
    return path / name


# What comes out


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_examples(tmp_path: Path, form: Callable[[pd.DataFrame, Path], Any]) -> None:
    found = read_table(form(FRAME, tmp_path), COLUMNS)
    assert np.allclose(found.train.x, X, rtol=0, atol=1e-15) and found.train.x.dtype == np.float64
    assert found.train.y.tolist() == Y and found.train.y.dtype == np.int64
    assert found.client_ids is not None and list(found.client_ids) == list(FRAME["hospital"])
    assert same(found, read_table(FRAME, COLUMNS))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 4])
def test_batches_make_no_difference(
    tmp_path: Path, form: Callable[[pd.DataFrame, Path], Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_table(FRAME, COLUMNS)
    monkeypatch.setattr(of_tables, "ROWS_TOGETHER", rows)
    assert same(read_table(form(FRAME, tmp_path), COLUMNS), whole)


@pytest.mark.long
def test_a_frame_becomes_clients_and_a_test_set() -> None:
    data = from_frame(
        FRAME, "outcome", "hospital", labels=["no", "yes"], categories={"colour": ["red", "green", "blue"]},
        missing={"age": 40, "colour": "green"}, scale={"age": (40, 20), "visits": (0, 2)},
        test=FRAME.drop(columns="hospital"),
    )  # fmt: skip
    assert data.names == ("east", "north", "south") and data.num_classes == 2 and not data.held_out
    assert [client.y.tolist() for client in data.clients] == [[0], [0, 1, 1], [1, 0]]
    assert data.test is not None and np.array_equal(data.test.x, read_table(FRAME, COLUMNS).train.x)
    assert np.array_equal(data.clients[1].x, data.test.x[[0, 2, 5]])
    problem = fn.NeuralProblem(fn.models.linear(data.input_shape, data.outputs), data.clients, data.test)
    assert problem.num_clients == 3


def test_what_datasets_really_saved_is_read() -> None:
    columns = Columns(
        "outcome", "hospital", ["age", "colour"], categories={"colour": ["red", "green"]}, missing={"age": 1}
    )
    parts = [read_table(path, columns) for path in (SAVED, SAVED / "test")]
    whole = read_table(SAVED / "same.csv", columns)
    assert [len(part.train) for part in parts] == [8, 4]
    assert np.array_equal(np.concatenate([part.train.x for part in parts]), whole.train.x)
    assert np.array_equal(np.concatenate([part.train.y for part in parts]), whole.train.y)
    tokens = read_table(SAVED, Columns("outcome", features=["tokens"]), Kind("tokens"))
    assert tokens.train.x.shape == (8, 4) and tokens.train.x[0].tolist() == [7, 5, 4, 2]


def test_what_datasets_saves_here_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_pandas(FRAME, preserve_index=False).save_to_disk(tmp_path / "saved", num_shards=2)
    assert same(read_table(tmp_path / "saved", COLUMNS), read_table(FRAME, COLUMNS))


@pytest.mark.parametrize("form", [to_csv, to_parquet, to_saved, to_frame])
def test_several_labels_are_a_row_of_targets(tmp_path: Path, form: Callable[[pd.DataFrame, Path], Any]) -> None:
    columns = Columns(["visits", "smoker"], features=["age"], missing={"age": 0})
    found = read_table(form(FRAME, tmp_path), columns, VALUES)
    assert found.train.y.tolist() == [[1, 1], [0, 0], [3, 0], [2, 1], [2, 1], [12, 0]] and found.client_ids is None
    assert found.train.y.dtype == np.float64
    classes = read_table(FRAME, columns).train.y
    assert classes.dtype == np.int64 and np.array_equal(classes, found.train.y)


def test_names_of_classes_number_them_and_values_too(tmp_path: Path) -> None:
    path = written(tmp_path, "a,y\n1,-1\n2,1\n3,-1\n")
    assert read_table(path, Columns("y", labels=[-1, 1])).train.y.tolist() == [0, 1, 0]
    found = read_table(path, Columns("y", labels=["-1", "1"]), VALUES).train
    assert found.y.tolist() == [0.0, 1.0, 0.0] and found.y.dtype == np.float64


def test_all_other_categories_are_one(tmp_path: Path) -> None:
    path = written(tmp_path, 'a,y\nred,0\n"light blue, or so",1\n green ,0\n*,0\n')
    x = read_table(path, Columns("y", categories={"a": ["red", "green", OTHER]})).train.x
    assert x.argmax(axis=1).tolist() == [0, 2, 1, 2] and (x.sum(axis=1) == 1).all()


def test_a_category_may_be_called_none_or_nothing(tmp_path: Path) -> None:
    """What is listed is no missing cell: NA is a country."""
    path = written(tmp_path, "a,y\nNA,0\n,1\nDE,1\n")
    assert read_table(path, Columns("y", categories={"a": ["NA", "", "DE"]})).train.x.argmax(axis=1).tolist() == [
        0,
        1,
        2,
    ]


def test_whole_numbers_with_a_point_are_categories(tmp_path: Path) -> None:
    frame = pd.DataFrame({"grade": [1.0, 3.0, math.nan], "y": [0, 1, 0]})
    columns = Columns("y", categories={"grade": [1, 2, 3]}, missing={"grade": 2})
    for source in (frame, to_csv(frame, tmp_path), to_parquet(frame, tmp_path)):
        assert read_table(source, columns).train.x.argmax(axis=1).tolist() == [0, 2, 1]


def test_text_in_utf_8_with_a_mark_quotes_and_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        '\ufeff\n"naïve, column";y\r\n\r\n"1";0\r\n" 2,5";1'.encode().replace(b"2,5", b"2.5")
    )
    found = read_table(tmp_path / "a.csv", Columns("y", delimiter=";"))
    assert found.train.x.tolist() == [[1.0], [2.5]]
    assert open_table(tmp_path / "a.csv", ";").names == ("naïve, column", "y")


def test_truths_and_what_is_missing(tmp_path: Path) -> None:
    words = ["true", "YES", "False", "no", "1", "0.0"]
    path = written(
        tmp_path, "a,y\n" + "".join(f"{word},0\n" for word in [*words, "NA", "n/a", "NaN", "null", "None", ""])
    )
    found = read_table(path, Columns("y", missing={"a": 7}, features=["a"])).train.x[:, 0]
    assert found.tolist() == [1, 1, 0, 0, 1, 0, *[7] * 6]


def test_clients_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    path = written(tmp_path, "c,a,y\n10,1,0\n2,1,1\n")
    assert read_table(path, Columns("y", "c")).client_ids.tolist() == [10, 2]  # type: ignore[union-attr]
    data = from_frame(pd.DataFrame({"c": [10, 2, 10], "a": [1, 2, 3], "y": [0, 1, 1]}), "y", "c")
    assert data.names == ("2", "10")
    mixed = from_frame(pd.DataFrame({"c": ["10", "2", "x"], "a": [1, 2, 3], "y": [0, 1, 1]}), "y", "c")
    assert mixed.names == ("10", "2", "x")


def test_lists_of_numbers_are_so_many_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.DataFrame({"v": [[1, 2], [3, 4]], "y": [0, 1]})
    for source in (to_parquet(frame, tmp_path), to_saved(frame, tmp_path)):
        assert read_table(source, Columns("y", scale={"v": [1, 2]})).train.x.tolist() == [[0, 0.5], [1, 1.5]]
    uneven = pd.DataFrame({"v": [[1, 2], [3, 4, 5]], "y": [0, 1]})
    with pytest.raises(UserError, match="the column v has lists of 2 and of 3 numbers"):
        read_table(to_parquet(uneven, tmp_path), Columns("y"))
    monkeypatch.setattr(of_tables, "ROWS_TOGETHER", 1)
    with pytest.raises(UserError, match="all.parquet, row 1: expected 2 numbers, as in the rows before, got 3"):
        read_table(to_parquet(uneven, tmp_path), Columns("y"))
    with pytest.raises(UserError, match="has lists that are missing"):
        read_table(to_parquet(pd.DataFrame({"v": [[1, 2], None], "y": [0, 1]}), tmp_path), Columns("y"))


# Any table

names = (
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=8)
    .map(str.strip)
    .filter(lambda name: name and name != "__index_level_0__")
)
words = (
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
    .map(str.strip)
    .filter(lambda word: word.lower() not in ("", "na", "n/a", "nan", "null", "none", OTHER))
)
finite = st.floats(-1e300, 1e300)


@st.composite
def any_tables(draw: Callable[[Any], Any]) -> tuple[dict[str, list[Any]], Columns, np.ndarray]:
    """Cells by column, what they mean, and the numbers that must come out."""
    rows, label, *others = draw(st.integers(1, 7)), *draw(st.lists(names, min_size=2, max_size=5, unique=True))
    cells: dict[str, list[Any]] = {label: draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows))}
    categories, missing, scale, blocks = {}, {}, {}, list[np.ndarray]()
    for name in others:
        if draw(st.booleans()):
            kinds = draw(st.lists(words, min_size=1, max_size=4, unique=True))
            drawn = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=rows, max_size=rows))
            cells[name], categories[name] = [kinds[i] for i in drawn], kinds
            blocks.append(np.array([[float(i == j) for j in range(len(kinds))] for i in drawn]))
        else:
            drawn = draw(st.lists(st.none() | finite, min_size=rows, max_size=rows))
            missing[name], scale[name] = draw(finite), (draw(st.floats(-9, 9)), draw(st.floats(0.5, 9)))
            cells[name] = drawn
            filled = np.array([missing[name] if value is None else value for value in drawn], np.float64)
            blocks.append(((filled - scale[name][0]) / scale[name][1])[:, None])
    return cells, Columns(label, None, others, None, categories, missing, scale), np.hstack(blocks)


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(any_tables(), st.sampled_from(",;\t|"))
def test_any_table_comes_back_from_any_form(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[dict[str, list[Any]], Columns, np.ndarray], delimiter: str
) -> None:
    cells, columns, x = drawn
    path = tmp_path_factory.mktemp("any")
    with gzip.open(path / "a.csv.gz", "wt", encoding="utf-8-sig", newline="") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerow(cells)
        rows.writerows([["" if cell is None else cell for cell in row] for row in zip(*cells.values(), strict=True)])
    pa.parquet.write_table(pa.table(cells), path / "a.parquet")
    by_text = Columns(**vars(columns) | {"delimiter": delimiter})
    for source, said in ((path / "a.csv.gz", by_text), (path / "a.parquet", columns), (pd.DataFrame(cells), columns)):
        found = read_table(source, said).train
        assert np.array_equal(found.x, x) and found.y.tolist() == cells[str(columns.label)]


@settings(deadline=None)
@given(st.lists(st.one_of(finite.map(repr), st.sampled_from(["yes", "", "NA", "no"]), st.text(max_size=5)), min_size=1))
@example(["INF", ":"])
def test_a_cell_is_a_number_or_is_named(cells: list[str]) -> None:
    try:
        found = numbers(cells)
    except BadCell as bad:
        with pytest.raises(BadCell):
            numbers([cells[bad.index]])
        found = numbers(cells[: bad.index])
    assert not np.isinf(found).any() and len(found) <= len(cells)


@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["a.csv", "a.csv.gz", "a.parquet"]))
def test_any_bytes_are_a_table_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(content)
    with pytest.raises(UserError):
        read_table(path, Columns("no such column"))


@pytest.mark.long
def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    """Never much more in memory than what it becomes."""
    rows, wide = 20_000, 20
    path = tmp_path / "large.csv"
    x = np.random.default_rng(0).standard_normal((rows, wide))
    np.savetxt(
        path, np.hstack([x, np.zeros((rows, 1))]), "%.17g", ",", header=",".join("abcdefghijklmnopqrstu"), comments=""
    )
    tracemalloc.start()
    try:
        found = read_table(path, Columns("u"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(found.train.x, x)
    assert peak < 2.5 * x.nbytes + 2**22


# Estimates


def test_estimates_are_those_of_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Columns("outcome", "hospital", labels="found", categories="found", missing="mean", scale="standard")
    for together in (4096, 2):
        monkeypatch.setattr(of_tables, "ROWS_TOGETHER", together)
        found = settled(open_table(FRAME), asked)
        assert found.features == ("age", "smoker", "colour", "visits") and found.estimated == ()
        assert found.labels == ("no", "yes") and found.categories == {"colour": ("blue", "green", "red")}
        assert isinstance(found.missing, dict) and isinstance(found.scale, dict)
        assert set(found.missing) == set(found.scale) == {"age", "smoker", "visits"}
        ages = FRAME["age"].dropna()
        assert found.missing["age"] == pytest.approx(ages.mean(), rel=1e-14)
        assert found.scale["age"] == pytest.approx((ages.mean(), ages.std(ddof=0)), rel=1e-14)
    constant = settled(
        open_table(pd.DataFrame({"a": [3, 3], "y": [5, 10]})), Columns("y", labels="found", scale="standard")
    )
    assert constant.scale == {"a": (3.0, 1.0)} and constant.labels == ("5", "10")


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(1, 7))
def test_moments_in_pieces_are_those_of_the_whole(values: list[float], together: int) -> None:
    frame = pd.DataFrame({"a": values, "y": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_tables, "ROWS_TOGETHER", together)
        scale = settled(open_table(frame), Columns("y", scale="standard")).scale
    assert isinstance(scale, dict)
    assert scale["a"][0] == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert scale["a"][1] == pytest.approx(np.std(values) or 1.0, rel=1e-6, abs=1e-6) or np.std(values) < 1e-6


def test_categories_that_are_found_may_be_given_for_missing_cells() -> None:
    asked = Columns("visits", features=["colour"], categories="found", missing={"colour": "red"})
    table = open_table(FRAME)
    assert encoded(table, settled(table, asked)).train.x.argmax(axis=1).tolist() == [2, 1, 2, 0, 2, 1]
    with pytest.raises(UserError, match="missing of colour must be one of its categories, not 'pink'"):
        settled(table, replace(asked, missing={"colour": "pink"}))


def test_columns_of_names_are_no_categories() -> None:
    frame = pd.DataFrame({"who": [f"person {i}" for i in range(1001)], "id": [str(i) for i in range(1001)], "y": 0})
    with pytest.raises(UserError, match="the column who has more than 1000 different values"):
        settled(open_table(frame), Columns("y", categories="found"))
    assert settled(open_table(frame), Columns("y", features=["id"], categories="found")).categories == {}


def test_reading_from_python_estimates_nothing() -> None:
    for setting in ({"scale": "standard"}, {"missing": "mean"}, {"categories": "found"}, {"labels": "found"}):
        with pytest.raises(UserError, match="estimated from the clients' data, outside the mechanism"):
            read_table(FRAME, Columns("outcome", **setting))  # type: ignore[arg-type]
        with pytest.raises(UserError, match="estimated from the clients' data, outside the mechanism"):
            from_frame(FRAME, "outcome", "hospital", **setting)  # type: ignore[arg-type]


# What is refused

GOOD = "who,age,colour,y\nann,40,red,0\nbob,30,green,1\n"
USES = Columns("y", "who", categories={"colour": ["red", "green"]})


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        (GOOD.replace("30", "old"), USES, r"mine.csv, row 3, column age: 'old' is not a number; list the column's"),
        (GOOD.replace("30", "2024-01-31"), USES, "row 3, column age: '2024-01-31' is a date: write it as a number"),
        (GOOD.replace("30", "1_000"), USES, "row 3, column age: '1_000' is not a number"),
        (GOOD.replace("30", "inf"), USES, "row 3, column age: 'inf' is not a finite number"),
        (GOOD.replace("30", "1e999"), USES, "row 3, column age: '1e999' is not a finite number"),
        (GOOD.replace("30", ""), USES, r"row 3, column age: the cell is empty; .* missing = \{age = 0\}"),
        (GOOD.replace("30,", ""), USES, "row 3: expected 4 cells, one for each column, got 3"),
        (GOOD.replace("green", "pink"), USES, "row 3, column colour: 'pink' is not listed in its categories; add it"),
        (GOOD.replace("green", ""), USES, r"row 3, column colour: the cell is empty; .* \{colour = 'red'\}"),
        (GOOD.replace(",1\n", ",\n"), USES, "row 3, column y: the row has no label"),
        (GOOD.replace(",1\n", ",-1\n"), USES, "row 3, column y: expected a class, a whole number from 0, got '-1'"),
        (GOOD.replace(",1\n", ",1.5\n"), USES, "row 3, column y: expected a class, a whole number from 0, got '1.5'"),
        (GOOD.replace(",1\n", ",maybe\n"), USES, "row 3, column y: 'maybe' is not a number; name the classes in order"),
        (GOOD.replace("bob", " "), USES, "row 3, column who: the row names no client"),
        (GOOD, Columns("why", "who"), "unknown column of .*mine.csv 'why'; did you mean 'who'"),
        (GOOD, Columns("y", "clinic"), "unknown column of .*mine.csv 'clinic'; there are: who, age, colour, y"),
        (GOOD, Columns("y", features=["age", "weight"]), "unknown column of .*mine.csv 'weight'"),
        (GOOD, Columns("y", features=["age"], labels=["a", "b"]), "row 2, column y: '0' is not listed in labels, a, b"),
        (GOOD, Columns("y", features=["age"], scale={"agee": [1, 2]}), "unknown feature in scale 'agee'; did you mean"),
        (GOOD, Columns("y", features=["age"], missing={"who": 1}), "unknown feature in missing 'who'"),
        (GOOD.replace(",", ";"), USES, r"has one column, 'who;age;colour;y': set data.delimiter = \";\""),
        (GOOD.replace("age", "who"), USES, "has two columns that are called 'who'"),
        ("", USES, "has no named columns"),
        ("who,age,colour,y\n", USES, "has no rows"),
        ("y\n1\n", Columns("y"), "has no column to predict from beside y"),
        ('a,y\n"1,0\n2,1\n', Columns("y"), "mine.csv cannot be read: unexpected end of data"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, columns: Columns, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        read_table(written(tmp_path, text), columns)
    assert "\n" not in str(raised.value)


def test_a_label_beyond_the_classes_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="row 3, column y: expected a class, a whole number from 0 to 1, got '7'"):
        read_table(written(tmp_path, "a,y\n1,0\n2,7\n"), Columns("y"), classes=2)
    with pytest.raises(UserError, match="classes = 3, but labels names 2"):
        read_table(written(tmp_path, "a,y\n1,0\n2,1\n"), Columns("y", labels=[0, 1]), classes=3)


def test_rows_of_frames_and_parquet_are_counted_from_0(tmp_path: Path) -> None:
    frame = FRAME.assign(colour=["red"] * 5 + ["pink"])
    for source, name in ((frame, "the data frame"), (to_parquet(frame, tmp_path), "all.parquet"),
                         (to_saved(frame, tmp_path), "saved")):  # fmt: skip
        with pytest.raises(UserError, match=f"{name}, row 5, column colour: 'pink' is not listed"):
            read_table(source, COLUMNS)


@pytest.mark.parametrize("kind", ["timestamp", "bytes"])
def test_columns_of_other_kinds_are_refused_or_left_out(tmp_path: Path, kind: str) -> None:
    other = [pd.Timestamp("2024-01-31")] * 6 if kind == "timestamp" else [b"x"] * 6
    frame = FRAME.assign(when=other)
    with pytest.raises(UserError, match="column when"):
        read_table(to_parquet(frame, tmp_path), COLUMNS)
    with pytest.raises(UserError, match="column when"):
        read_table(frame, COLUMNS)
    named = Columns(**vars(COLUMNS) | {"features": ["age", "smoker", "colour", "visits"]})
    assert np.allclose(read_table(to_parquet(frame, tmp_path), named).train.x, X)
    assert np.allclose(read_table(frame, named).train.x, X)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": []}, "label must be a column or a list of columns, at least one"),
        ({"label": ["y", "y"]}, "'y' is there twice"),
        ({"features": []}, "features must be a list of columns, at least one"),
        ({"features": ["a", "a"]}, "'a' is there twice"),
        ({"features": ["a", "y"]}, "the column y is the label, and no feature"),
        ({"features": ["a", "c"], "client": "c"}, "the column c is the client, and no feature"),
        ({"labels": []}, "labels must be a list of the classes' names, at least one"),
        ({"labels": ["1", 1]}, "'1' is there twice"),
        ({"labels": "finds"}, "labels must be such as .* or 'found', not 'finds'"),
        ({"categories": {"a": []}}, "categories of a must be a list of values, at least one"),
        ({"categories": {"a": ["x", " x"]}}, "'x' is there twice"),
        ({"categories": {"a": ["x"]}, "scale": {"a": [0, 1]}}, "has categories, which are not scaled"),
        ({"categories": {"a": ["x"]}, "missing": {"a": "z"}}, "missing of a must be one of its categories"),
        ({"missing": {"a": "z"}}, "missing of a must be a finite number, not 'z'"),
        ({"missing": {"a": math.inf}}, "missing of a must be a finite number"),
        ({"scale": {"a": [1]}}, r"scale of a must be \[shift, divisor\]"),
        ({"scale": {"a": [1, 0]}}, "the second not 0"),
        ({"scale": {"a": [math.nan, 1]}}, "finite"),
    ],
)
def test_meanings_that_contradict_themselves(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Columns(**{"label": "y"} | settings)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin.csv").write_bytes("a,y\nnaïve,1\n".encode("latin-1"))
    for name, content in {
        "a.csv.gz": b"no gzip",
        "b.parquet": b"no parquet",
        "c.csv.gz": gzip.compress(b"a,y\n1,0\n")[:-9],
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            read_table(tmp_path / name, Columns("y"))
    with pytest.raises(UserError, match=r"latin.csv is not in UTF-8 \(it has the byte 0xef\)"):
        read_table(tmp_path / "latin.csv", Columns("y"))
    for name in ("none.csv", "none.parquet"):
        with pytest.raises(UserError, match=f"there is no file .*{name}"):
            read_table(tmp_path / name, Columns("y"))
    with pytest.raises(UserError, match="none.txt is no table: expected a .csv"):
        read_table(tmp_path / "none.txt", Columns("y"))
    for delimiter in ("", ";;", '"', "\n"):
        with pytest.raises(UserError, match="delimiter must be one character"):
            open_table(written(tmp_path, GOOD), delimiter or "\r")
    for nothing in (to_parquet(FRAME[:0], tmp_path), to_saved(FRAME[:0], tmp_path), FRAME[:0]):
        with pytest.raises(UserError, match="has no rows"):
            read_table(nothing, COLUMNS)
    with pytest.raises(UserError, match="delimiter is for CSV files"):
        open_table(to_parquet(FRAME, tmp_path), ";")


def test_saved_folders_that_are_damaged(tmp_path: Path) -> None:
    folder = to_saved(FRAME, tmp_path)
    state = folder / "state.json"
    for content, message in {
        "{": "state.json cannot be read",
        "[]": "does not say in which files",
        '{"_data_files": [{"filename": "../x"}]}': "does not say in which files",
        '{"_data_files": [{"filename": "x.arrow"}]}': "there is no file .*x.arrow",
        '{"_data_files": [{"filename": "state.json"}]}': "cannot be read",
        '{"_data_files": [{"filename": "x"}], "_indices_files": ["y"]}': "flatten_indices",
    }.items():  # fmt: skip
        state.write_text(content)
        with pytest.raises(UserError, match=message):
            read_table(folder, COLUMNS)
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    with pytest.raises(UserError, match="holds several data sets, and none is called train"):
        read_table(tmp_path / "dict", COLUMNS)


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet, saved = to_parquet(FRAME, tmp_path), to_saved(FRAME, tmp_path)
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"pip install 'fednormec\[parquet\]'"):
        read_table(parquet, COLUMNS)
    with pytest.raises(UserError, match=r"pip install 'fednormec\[huggingface\]'"):
        read_table(saved, COLUMNS)
