"""Persons: all examples of one are one record and stay together; whatever form the data are in, the same persons."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command import Command, sentence
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import fednormec as fn
from fednormec.config.asking import Reading, asked_about, asked_inputs
from fednormec.config.assemble import assemble
from fednormec.config.datasets import federated_data
from fednormec.config.forms import read_agreed
from fednormec.config.own import Loading
from fednormec.config.schema import Config, dump, read
from fednormec.core.bounds import clip
from fednormec.core.ids import numbered
from fednormec.core.records import bounded_sum, record_sizes
from fednormec.data import Columns, Examples, FederatedData, Kind, from_frame, hold_out, read_folder, read_npz, split
from fednormec.data.features import Extractor, with_features
from fednormec.data.persons import as_persons
from fednormec.data.sources import given_data
from fednormec.engine.planning import planned_for_records
from fednormec.errors import UserError

RNG = np.random.default_rng(0)
ROWS, PEOPLE = 90, 30
OWNERS = [f"p{k % PEOPLE}" for k in range(ROWS)]  # three rows each, all at one hospital
FRAME = pd.DataFrame({
    "hospital": [f"h{k % 5}" for k in range(ROWS)],
    "patient": OWNERS,
    "age": RNG.integers(20, 90, ROWS),
    "dose": RNG.normal(0, 1, ROWS).round(3),
    "outcome": RNG.integers(0, 2, ROWS),
})  # fmt: skip
TABLE: dict[str, Any] = {"label": "outcome", "client": "hospital", "person": "patient", "scale": {"age": [50, 20]}}
RECORDS = {"epsilon": 3.0, "delta": 1e-3, "unit": "record"}
X, Y = FRAME[["age", "dose"]].to_numpy(np.float64), FRAME["outcome"].to_numpy(copy=True)


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    FRAME.to_csv("mine.csv", index=False)
    FRAME.to_parquet("mine.parquet")


def config(private: bool = False, **data: Any) -> Config:
    """A config as it is read from a file; a setting that is None is left out."""
    asked: Config = {
        "model": {"name": "linear"}, "run": {"rounds": 2}, "data": {"source": "mine.csv", **TABLE, **data},
        "local": {"name": "dp_sgd", "step": 0.5, "steps": 2, "rate": 0.5}, "method": {"name": "fed_avg"},
    }  # fmt: skip
    asked["data"] = {key: value for key, value in asked["data"].items() if value is not None}
    asked |= {"privacy": RECORDS} if private else {}
    Path("asked.toml").write_text(dump(asked), encoding="utf-8")
    return read("asked.toml")


def data_of(asked: Config, seed: int = 0) -> FederatedData:
    return federated_data(asked, {}, seed, Loading()).data


def persons_of(examples: Examples) -> list[Any]:
    assert examples.person is not None
    return list(examples.person.tolist())


def of_arrays(person: Any, **changes: Any) -> Examples:
    return Examples(**{"x": np.zeros((3, 2)), "y": np.zeros(3), "person": person} | changes)


# Ids


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([7, 8, 7], [7, 8, 7]),
        (["b", " a ", "b"], ["b", "a", "b"]),
        (np.array([7, "7", 7.0], dtype=object), ["7", "7", "7"]),
        (pd.Series([1, 2, 1], dtype="Int64"), [1, 2, 1]),
        (torch.tensor([3, 3, 4]), [3, 3, 4]),
    ],
)
def test_ids_are_numbers_or_texts(ids: Any, found: list[Any]) -> None:
    assert persons_of(of_arrays(ids)) == found


@pytest.mark.parametrize("missing", [None, math.nan, "", "  ", "NA", "nan", pd.NA, pd.NaT])
def test_a_person_without_an_id_would_be_many(missing: Any) -> None:
    with pytest.raises(UserError, match="example 1 has none; name the person, or leave the example out"):
        of_arrays(np.array(["a", missing, "b"], dtype=object))
    with pytest.raises(UserError, match="example 2 has none"):
        of_arrays([1.0, 2.0, math.nan])


@pytest.mark.parametrize("ids", [[1, 2], [[1], [2], [3]], np.array([b"a", b"b", b"c"]), np.zeros(3, "M8[s]"), 5])
def test_what_is_no_id_for_each_example(ids: Any) -> None:
    with pytest.raises(UserError, match="person must be one id for each of 3 examples, a number or a text"):
        of_arrays(ids)


@given(st.lists(st.integers(-3, 3), max_size=12))
def test_persons_are_numbered_as_they_come(ids: list[int]) -> None:
    seen = list[int]()
    for one in ids:
        seen += [] if one in seen else [one]
    assert numbered(np.array(ids, dtype=np.int64)).tolist() == [seen.index(one) for one in ids]


def test_examples_keep_their_persons() -> None:
    own = of_arrays(["a", "b", "a"])
    assert persons_of(own.take(np.array([2, 1]))) == ["a", "b"]
    assert persons_of(own.joined(of_arrays([1, 2, 3]))) == ["a", "b", "a", "1", "2", "3"]
    assert own.joined(replace(own, person=["c"] * 3)).take(np.array([5])).person == ["c"]
    with pytest.raises(UserError, match="either all examples name their persons or none do, but the first set does"):
        own.joined(of_arrays(None))
    wide = FederatedData((own, replace(own, x=np.zeros((3, 2), np.float32))), None, ("0", "1"))
    assert wide.persons is not None and [ids.tolist() for ids in wide.persons] == [["a", "b", "a"]] * 2
    with pytest.raises(UserError, match="client 0 does and client 1 does not"):
        FederatedData((own, of_arrays(None)), None, ("0", "1"))
    rows = Extractor("doubled", "doubled", lambda: lambda x: 2 * x)
    assert persons_of(with_features(wide, rows, Path("rows")).clients[0]) == ["a", "b", "a"]


def test_the_digest_knows_the_persons_and_nothing_new_without_them() -> None:
    own = FederatedData((of_arrays(None),), None, ("0",))
    found = hashlib.sha256(repr((own.names, own.classes, own.kind)).encode())
    for array in (own.clients[0].x, own.clients[0].y):
        found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    assert own.digest == found.hexdigest()
    named = [FederatedData((of_arrays(ids),), None, ("0",)).digest for ids in (["a", "b", "a"], ["a", "b", "b"])]
    assert len({own.digest, *named}) == 3


# Splits


@given(st.integers(1, 40), st.floats(0, 0.99), st.integers(0, 99))
def test_somebody_else_s_examples_split_as_they_did(count: int, fraction: float, seed: int) -> None:
    def rng() -> np.random.Generator:
        return np.random.default_rng(seed)

    ids, own = np.random.default_rng(seed + 1).permutation(count), np.arange(count) + 5
    order = rng().permutation(count)
    cut = 0 if fraction == 0 else min(max(round(fraction * count), 1), count - 1)
    if count > 1 or fraction == 0:
        for persons in (None, ids):
            kept, aside = split(count, fraction, rng(), persons)
            assert [*aside, *kept] == [*order] and len(aside) == cut
    out = {*own[rng().permutation(count)[: min(round(fraction * count), count - 1)]]}
    for persons in (None, ids):
        kept, aside = hold_out(own, fraction, rng(), persons)
        assert kept.tolist() == [i for i in own if i not in out] and aside.tolist() == [i for i in own if i in out]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.floats(0.01, 0.99), st.integers(0, 99))
def test_a_person_is_on_one_side(ids: list[int], fraction: float, seed: int) -> None:
    persons, count, rng = np.array(ids), len(set(ids)), np.random.default_rng(seed)
    kept, aside = hold_out(np.arange(len(ids)) + 3, fraction, rng, persons)
    sides = set(persons[kept - 3].tolist()), set(persons[aside - 3].tolist())
    assert not sides[0] & sides[1] and sorted([*kept, *aside]) == [*range(3, len(ids) + 3)]
    assert len(sides[1]) == min(round(fraction * count), count - 1)
    if count == 1:
        with pytest.raises(UserError, match="at least two persons to split"):
            split(len(ids), fraction, rng, persons)
        return
    kept, aside = split(len(ids), fraction, rng, persons)
    sides = set(persons[kept].tolist()), set(persons[aside].tolist())
    assert not sides[0] & sides[1] and sorted([*kept, *aside]) == [*range(len(ids))]
    assert len(sides[1]) == min(max(round(fraction * count), 1), count - 1)


def test_whole_persons_are_held_out_of_a_client() -> None:
    data = data_of(config(test_fraction=0.34))
    assert data.test is not None and data.held_out and data.owners is not None
    for client, examples in enumerate(data.clients):
        kept, out = set(persons_of(examples)), set(np.array(persons_of(data.test))[data.owners == client].tolist())
        assert not kept & out and len(kept) == 4 and len(out) == 2  # of the six persons at each hospital
        assert len(examples) == 12
    assert data.digest != data_of(config(test_fraction=0.34), seed=1).digest


@pytest.mark.parametrize(
    "partition", [{"partition": "iid"}, {"partition": "dirichlet", "concentration": 0.3}, {"partition": "shards"}]
)
def test_examples_are_dealt_out_by_person(partition: dict[str, Any]) -> None:
    data = data_of(config(clients=6, test_fraction=0.2, **{**partition, "client": None, "features": ["age", "dose"]}))
    assert data.test is not None and data.persons is not None
    sides = [set(persons_of(examples)) for examples in (*data.clients, data.test)]
    assert sum(map(len, sides)) == PEOPLE == len(set.union(*sides)) and len(sides[-1]) == 6
    assert sum(len(examples) for examples in (*data.clients, data.test)) == ROWS
    if partition["partition"] == "iid":
        assert [len(examples) for examples in data.clients] == [12] * 6


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards"])
def test_persons_of_one_row_are_dealt_out_as_rows_are(partition: str) -> None:
    ids = RNG.permutation(ROWS)
    asked = {"source": "mine.npz", "partition": partition, "clients": 4, "classes": 2, **dict.fromkeys(TABLE)}
    np.savez("mine.npz", x=X, y=Y)
    before = data_of(config(**asked))
    np.savez("mine.npz", x=X, y=Y, person=ids)
    after = data_of(config(**asked))
    assert before.persons is None and after.persons is not None and before.test is not None and after.test is not None
    for one, other in zip((*before.clients, before.test), (*after.clients, after.test), strict=True):
        assert np.array_equal(one.x, other.x) and np.array_equal(one.y, other.y)


# Forms


def expected() -> list[list[str]]:
    return [[p for p, h in zip(OWNERS, FRAME["hospital"], strict=True) if h == f"h{k}"] for k in range(5)]


@pytest.mark.parametrize("source", ["mine.csv", "mine.parquet"])
def test_a_column_names_the_persons_and_is_no_feature(source: str) -> None:
    data = data_of(config(source=source, test_fraction=0.0))
    assert data.input_shape == (2,) and [persons_of(one) for one in data.clients] == expected()
    framed = from_frame(FRAME, "outcome", "hospital", scale={"age": (50, 20)}, person="patient", test=FRAME.head(4))
    assert [persons_of(one) for one in framed.clients] == expected()
    assert framed.test is not None and framed.test.person is None  # a public test set is nobody's


def test_ids_that_are_numbers_are_the_same_however_they_are_written() -> None:
    once = FRAME.assign(patient=[f"{int(p[1:])}.0" if k % 2 else f" {p[1:]}" for k, p in enumerate(OWNERS)])
    data = from_frame(once, "outcome", "hospital", person="patient")
    assert [[f"p{p}" for p in persons_of(one)] for one in data.clients] == expected()


def test_arrays_code_and_datasets_name_them() -> None:
    np.savez("mine.npz", x=X, y=Y, person=np.array(OWNERS), client=FRAME["hospital"].to_numpy(str))
    assert persons_of(read_npz("mine.npz").train) == OWNERS
    npz = data_of(config(source="mine.npz", test_fraction=0.0, **dict.fromkeys(TABLE)))
    assert [persons_of(one) for one in npz.clients] == expected()
    Path("each").mkdir()
    for name, part in FRAME.groupby("hospital"):
        np.savez(f"each/{name}.npz", x=part[["age", "dose"]], y=part["outcome"], person=part["patient"].to_numpy(str))
    assert [persons_of(one) for one in read_folder("each").clients] == expected()
    assert [persons_of(one) for one in data_of(config(source="each", **dict.fromkeys(TABLE))).clients] == expected()
    found = given_data((X, Y, FRAME["hospital"], OWNERS), "load.py:rows", Kind())
    assert not isinstance(found, FederatedData) and persons_of(found.train) == OWNERS
    rows = TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    one = fn.data.from_dataset(rows, client_ids=FRAME["hospital"].tolist(), persons=OWNERS)
    several = fn.data.from_datasets([rows, rows], persons=[OWNERS, OWNERS[::-1]])
    assert [persons_of(own) for own in one.clients] == expected()
    assert [persons_of(own) for own in several.clients] == [OWNERS, OWNERS[::-1]]
    with pytest.raises(UserError, match="expected persons for each of 2 clients, got them for 1"):
        fn.data.from_datasets([rows, rows], persons=[OWNERS])
    np.savez("each/h1.npz", x=X, y=Y)
    with pytest.raises(UserError, match="client h0 does and client h1 does not"):
        read_folder("each")
    np.savez("mine.npz", x=X, y=Y, person=np.arange(3))
    with pytest.raises(UserError, match="mine.npz: person must be one id for each of 90 examples"):
        read_npz("mine.npz")


@pytest.mark.parametrize("missing", ["", " ", "NA", "NaN", "null"])
def test_a_row_without_a_person_is_named(missing: str) -> None:
    FRAME.assign(patient=[missing if k == 7 else p for k, p in enumerate(OWNERS)]).to_csv("mine.csv", index=False)
    with pytest.raises(UserError, match="mine.csv, row 9, column patient: the row names no person; name it, or leave"):
        data_of(config())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"person": "hospital"}, "the column hospital is the client, and no person: name another column in person"),
        ({"person": "outcome"}, "the column outcome is the label, and no person"),
        ({"person": "patients"}, "unknown column of mine.csv 'patients'; did you mean 'patient'"),
        ({"features": ["age", "patient"]}, "the column patient is the person, and no feature"),
        ({"source": "digits", **dict.fromkeys(TABLE), "person": "p"}, r"\[data\] person is for tables and folders of"),
        ({"client": None, "features": ["age"], "pool": True, "test": "mine.csv"}, "nobody says whose it is"),
    ],
)
def test_mistakes_are_a_sentence(fednormec_: Command, settings: dict[str, Any], message: str) -> None:
    config(**settings)
    said = fednormec_("run", "asked.toml", "--out", "out")
    assert said.code == 2 and not Path("out").exists()
    with pytest.raises(UserError, match=message):
        raise UserError(sentence(said.err))


def test_a_trained_model_is_asked_without_persons() -> None:
    Path("run.toml").write_text(dump(assemble(config(test_fraction=0.0)).config), encoding="utf-8")
    trained = read("run.toml")["data"]
    assert trained["person"] == "patient" and trained["features"] == ["age", "dose"]
    FRAME.drop(columns=["hospital", "patient"]).to_csv("new.csv", index=False)
    how = Reading(classes=2, trained=trained)
    assert len(asked_about("new.csv", {}, how, Loading()).examples) == ROWS
    FRAME[["dose", "age"]].to_csv("new.csv", index=False)
    assert asked_inputs("new.csv", {}, how, Loading()).shape == (ROWS, 2)


def test_the_settings_are_listed(fednormec_: Command) -> None:
    said = fednormec_("settings", "data", "table")
    assert said.code == 0 and "person" in said.out and "one record" in " ".join(said.out.split())


# Records


def grouped(person: Any, name: str) -> tuple[Any, Examples]:
    """A problem of one client, and its examples."""
    own = Examples(X / 50, Y, person=person)
    if name == "logistic":
        return fn.Logistic([torch.as_tensor(own.x)], [torch.as_tensor(2.0 * own.y - 1)],
                           persons=None if person is None else [own.person]), own  # fmt: skip
    model = torch.nn.Linear(2, 2, dtype=torch.float64)
    persons = None if own.person is None else [own.person]
    return fn.NeuralProblem(model, [own], dtype=torch.float64, persons=persons), own


@pytest.mark.parametrize("name", ["logistic", "neural"])
def test_a_person_with_three_rows_moves_a_sum_by_tau_at_most(name: str) -> None:
    tau, rows = 0.3, np.zeros(1, dtype=np.int64)
    problem, own = grouped(OWNERS, name)
    x = torch.linspace(-1, 1, problem.dim, dtype=torch.float64)
    single, total, without = grouped(None, name)[0], np.zeros(problem.dim), np.zeros(problem.dim)
    clipped, each = 0, np.zeros(problem.dim)
    for k, person in enumerate(sorted(set(OWNERS))):
        gradient = np.zeros(problem.dim)
        for i in [i for i, one in enumerate(OWNERS) if one == person]:
            row = single.grad(x, rows, np.array([[i]]))[0].numpy()
            gradient += row / 3
            each += row * min(1, tau / np.linalg.norm(row)) if person == "p7" else 0
        clipped += np.linalg.norm(gradient) > tau
        gradient *= min(1, tau / np.linalg.norm(gradient))
        total += gradient
        without += gradient if person != "p7" else 0
        assert problem.examples_of(0, np.array([k])).size == 3
    assert 0 < clipped < PEOPLE, "the bound must matter to some, and not to all"
    everybody = np.arange(PEOPLE)
    at = list(dict.fromkeys(OWNERS)).index("p7")  # numbered as they come
    found = [bounded_sum(problem, x, 0, ids, clip(tau)).numpy() for ids in (everybody, np.delete(everybody, at))]
    np.testing.assert_allclose(found[0], total, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found[1], without, rtol=1e-12, atol=1e-14)
    assert np.linalg.norm(found[0] - found[1]) <= tau * (1 + 1e-12)
    rowwise = [i for i in range(ROWS) if OWNERS[i] != "p7"]
    apart = [bounded_sum(single, x, 0, np.array(ids), clip(tau)).numpy() for ids in (range(ROWS), rowwise)]
    np.testing.assert_allclose(apart[0] - apart[1], each, rtol=1e-9, atol=1e-12)
    assert np.linalg.norm(apart[0] - apart[1]) > tau, "rows by themselves would move it further"


@pytest.mark.parametrize("problem", [{"name": "neural"}, {"name": "logistic"}])
def test_the_records_of_a_run_are_persons(problem: dict[str, Any]) -> None:
    asked = config(private=True, test_fraction=0.0) | {"problem": problem}
    found = assemble(asked)
    assert found.privacy is not None
    assert record_sizes(found.problem).tolist() == [6] * 5 and found.problem.client_sizes.tolist() == [18] * 5
    plan = planned_for_records(found.problem, found.algorithm, found.privacy, 2)
    assert [silo.records for silo in plan.silos] == [6] * 5 and plan.record == "all rows of one person at a client"
    asked["data"] = {key: value for key, value in asked["data"].items() if key != "person"} | {"features": ["age"]}
    assert record_sizes(assemble(asked).problem).tolist() == [18] * 5


@pytest.mark.long
def test_without_privacy_for_records_they_change_no_model(fednormec_: Command) -> None:
    asked = config(test_fraction=0.0, features=["age", "dose"])
    asked["local"] = {"name": "gd", "step": 0.5}
    models = list[bytes]()
    for person in ("patient", None):
        asked["data"] = {key: value for key, value in asked["data"].items() if key != "person"}
        Path("asked.toml").write_text(dump(asked), encoding="utf-8")
        overrides = [] if person is None else ["--set", f"data.person={person}"]
        said = fednormec_("run", "asked.toml", "--out", f"out-{person}", "--quiet", *overrides)
        assert said.code == 0, said.err
        models.append(Path(f"out-{person}/model.safetensors").read_bytes())
    assert models[0] == models[1]
    assert 'person = "patient"' in Path("out-patient/config.toml").read_text()


def test_a_private_run_is_told_whose_records(fednormec_: Command) -> None:
    config(private=True)
    said = fednormec_("run", "asked.toml", "--out", "out", "--quiet")
    assert said.code == 0, said.err
    assert "all rows of one person at a client" in " ".join(Path("out/privacy.txt").read_text().split())


# A federation


def test_parties_that_agreed_on_persons_name_theirs() -> None:
    agreed = {"label": "outcome", "features": ["age", "dose"], "person": "patient"}
    assert persons_of(read_agreed("mine.csv", agreed, Kind(), 2)) == OWNERS
    public = read_agreed("mine.csv", agreed, Kind(), 2, owned=False)
    assert public.person is None
    FRAME.drop(columns="patient").to_csv("other.csv", index=False)
    assert len(read_agreed("other.csv", agreed, Kind(), 2, owned=False)) == ROWS
    with pytest.raises(UserError, match="unknown column of other.csv 'patient'"):
        read_agreed("other.csv", agreed, Kind(), 2)
    np.savez("other.npz", x=X, y=Y)
    with pytest.raises(UserError, match=r"other.npz does not say whose each example is, .* \(person = 'patient'\)"):
        read_agreed("other.npz", agreed, Kind(), 2)
    assert len(read_agreed("other.npz", agreed, Kind(), 2, owned=False)) == ROWS
    np.savez("other.npz", x=X, y=Y, person=np.array(OWNERS))
    assert persons_of(read_agreed("other.npz", agreed, Kind(), 2)) == OWNERS


def test_what_a_table_says_of_persons_stays_in_columns() -> None:
    columns = Columns("outcome", "hospital", person="patient")
    assert columns.owners == ("hospital", "patient") and Columns("outcome").owners == ()
    assert as_persons(np.array([True, False]), 2).tolist() == [True, False]
