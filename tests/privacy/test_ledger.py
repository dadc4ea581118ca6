"""The ledger: on disk before the release it pays for, enough to compute ε anew, and never read as less than it says."""

import contextlib
import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fednormec as fn
from fednormec.privacy.ledger import Ledger
from fednormec.privacy.mechanism import plan

PROBLEM, ROUNDS = fn.random_quadratic(6, 5, seed=0), 5
ASKED = {
    "hidden": fn.Privacy(noise_std=3.0),
    "mirrored": fn.Privacy(noise_std=3.0, adjacency="replace_one"),
    "local": fn.Privacy(noise_std=3.0, trust="local"),
    "secagg": fn.Privacy(noise_std=3.0, trust="secagg", colluders=1, min_cohort=2),
    "tuned": fn.Privacy(epsilon=4.0, tuning_runs=3),
}


def written(path, asked, rounds=ROUNDS, clients=6):
    done = plan(asked, clients, fn.poisson(0.4), 1.0, 5, rounds)
    with contextlib.closing(Ledger(path, done)) as ledger:
        for number in range(1, rounds + 1):
            ledger.add(number)
    return done


def releases(text):
    """The complete lines that say a round, whatever comes before them."""
    count = 0
    for line in text.split("\n")[1:-1]:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            count += "round" in json.loads(line)
    return count


def test_a_line_is_on_disk_before_its_release_is_seen(tmp_path, monkeypatch):
    path, sync, synced, begun = tmp_path / "ledger.jsonl", os.fsync, [], []
    algorithm = fn.clip21()

    def fsync(descriptor):
        sync(descriptor)
        synced.append(path.read_text())

    def server(state, mean, weights):
        if begun:  # before that the method is tried, on made-up updates
            paid = synced[-1].splitlines()
            assert len(paid) == 2 + state.round  # the first line, and one for each round with this one
            assert json.loads(paid[-1])["round"] == state.round + 1
        return algorithm.server(state, mean, weights)

    monkeypatch.setattr(os, "fsync", fsync)
    agreed = plan(ASKED["hidden"], 6, fn.poisson(0.4), 1.0, 5, ROUNDS)
    with contextlib.closing(Ledger(path, agreed)) as ledger:
        rounds = fn.simulate(
            PROBLEM, algorithm._replace(server=server), fn.poisson(0.4), ASKED["hidden"], rounds=ROUNDS,
            before_release=lambda number, plan: ledger.add(number),
        )  # fmt: skip
        assert releases(path.read_text()) == 0
        begun.append(True)
        for number, r in enumerate(rounds, 1):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert len(lines) == 1 + number
            assert lines[-1] == {"round": number, "epsilon": r.epsilon, "delta": 1e-5}
    assert number == ROUNDS


def test_what_was_not_paid_for_is_never_released():
    seen, used, algorithm = [], [], fn.clip21()

    def pay(number, plan):
        if number == 3:
            raise OSError("the disk is full")

    def server(state, mean, weights):
        used.append(state.round + 1)
        return algorithm.server(state, mean, weights)

    rounds = fn.simulate(
        PROBLEM, algorithm._replace(server=server), None, ASKED["hidden"], rounds=ROUNDS, before_release=pay
    )  # fmt: skip
    used.clear()  # the method was tried, on made-up updates
    with pytest.raises(OSError, match="the disk is full"):
        for r in rounds:
            seen.append(r.number)
    assert seen == used == [1, 2]
    assert next(rounds, None) is None


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_epsilon_is_computed_anew_from_the_file_alone(tmp_path, asked):
    path = tmp_path / "ledger.jsonl"
    done, spent = written(path, asked), fn.read_ledger(path)
    assert (spent.rounds, spent.rounds_before) == (ROUNDS, done.rounds_before)
    assert spent.release == done.mechanism.release()
    assert spent.epsilon(1e-5) == done.epsilon(ROUNDS)
    assert spent.epsilon(1e-7) == done.mechanism.epsilon(done.rounds_before + ROUNDS, 1e-7) > spent.epsilon(1e-5)
    assert [json.loads(line)["epsilon"] for line in path.read_text().splitlines()[1:]] == [
        done.spent(k) for k in range(1, ROUNDS + 1)
    ]
    for bad in (0, 1, math.nan):
        with pytest.raises(fn.UserError, match="delta"):
            spent.epsilon(bad)


def test_joined_cohort_sizes_survive_the_file(tmp_path):
    path = tmp_path / "ledger.jsonl"
    done = written(path, fn.Privacy(noise_std=1.0, trust="secagg"), clients=1000)
    assert fn.read_ledger(path).release == done.mechanism.release()
    assert done.mechanism.release().unsure > 0


def test_a_line_that_was_cut_off_counts_wherever_it_was(tmp_path):
    path, cut = tmp_path / "ledger.jsonl", tmp_path / "cut.jsonl"
    written(path, ASKED["hidden"])
    text = path.read_text()
    head = text.index("\n")
    for end in range(len(text)):
        cut.write_text(text[:end])
        if end < head:
            with pytest.raises(fn.UserError, match="is not a ledger that can be read"):
                fn.read_ledger(cut)
        else:
            begun = text[head + 1 : end].count("\n") + (end > head + 1 and text[end - 1] != "\n")
            assert fn.read_ledger(cut).rounds == begun
    assert fn.read_ledger(path).rounds == ROUNDS


@pytest.mark.parametrize("garbage", [
    b"", b"\n", b"\n\n\n", b"hello", b"{}", b"[]", b"null", b"7", b'"release"', b'{"release": 3, "rounds_before": 0}',
    b"\xff\xfe\x00", b"[" * 100_000, b'{"release": {"kind": "open"}, "rounds_before": 0}\n', b"\x00" * 50,
    b'{"release": {"kind": "hidden", "p": 0.5, "mu": 1.0, "mirrored": false}}\n',
], ids=range(15))  # fmt: skip
def test_garbage_is_said(tmp_path, garbage):
    (tmp_path / "ledger.jsonl").write_bytes(garbage)
    with pytest.raises(fn.UserError, match="is not a ledger that can be read"):
        fn.read_ledger(tmp_path / "ledger.jsonl")


def test_a_missing_file_or_a_folder_is_said(tmp_path):
    for path in (tmp_path, tmp_path / "none.jsonl", str(tmp_path / "none.jsonl")):
        with pytest.raises(fn.UserError, match="is not a ledger that can be read"):
            fn.read_ledger(path)


HIDDEN = {"kind": "hidden", "p": 0.5, "mu": 1.0, "mirrored": False}
OPEN = {"kind": "open", "weights": [0.2, 0.3], "mus": [0.5, 0.4], "unsure": 0.0}


@pytest.mark.parametrize(("change", "before"), [
    *(({**HIDDEN, "p": bad}, 0) for bad in (0, 1.5, -0.5, math.nan, "half", None)),
    *(({**HIDDEN, "mu": bad}, 0) for bad in (0, -1.0, math.nan, "one", [1.0])),
    ({**HIDDEN, "kind": "shut"}, 0), ({**HIDDEN, "mirrored": "no"}, 0),
    *(({**OPEN, "weights": bad}, 0) for bad in ([], [0.2], [0.7, 0.7], [-0.1, 0.3], [0.2, math.nan], 0.2, [[0.2], 0])),
    *(({**OPEN, "mus": bad}, 0) for bad in ([], [0.5], [0.5, -0.4], [0.5, math.nan], ["a", "b"], None)),
    *(({**OPEN, "unsure": bad}, 0) for bad in (-1e-3, 2.0, math.nan, "no", None)),
    *((HIDDEN, bad) for bad in (-3, math.inf, math.nan, "three", None, 1.5, [2])),
])  # fmt: skip
def test_impossible_facts_are_said(tmp_path, change, before):
    """A ledger that nobody can have written would otherwise give an ε that is too small, or a traceback."""
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps({"release": change, "rounds_before": before}) + '\n{"round": 1}\n')
    with pytest.raises(fn.UserError, match="is not a ledger that can be read"):
        fn.read_ledger(path)


# going on with a ledger


def test_rounds_that_were_paid_for_are_not_paid_for_again(tmp_path):
    path = tmp_path / "ledger.jsonl"
    done = written(path, ASKED["hidden"])
    text = path.read_text()
    written(path, ASKED["hidden"])
    assert path.read_text() == text
    with contextlib.closing(Ledger(path, done)) as ledger:
        ledger.add(3)
        ledger.add(ROUNDS + 1)
        assert ledger.releases == ROUNDS + 1
    assert path.read_text().startswith(text)
    assert releases(path.read_text()) == ROUNDS + 1


def test_with_secure_noise_a_round_again_is_one_more_release(tmp_path):
    path, asked = tmp_path / "ledger.jsonl", fn.Privacy(noise_std=3.0, randomness="secure")
    done = written(path, asked)
    with contextlib.closing(Ledger(path, done)) as ledger:
        ledger.add(4)
        ledger.add(5)
        assert ledger.releases == ROUNDS + 2
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 4, 5]
    assert [line["epsilon"] for line in lines] == [done.epsilon(k) for k in range(1, 8)]
    assert fn.read_ledger(path).epsilon(1e-5) == done.epsilon(7)


@pytest.mark.long
@pytest.mark.parametrize("asked", [ASKED["hidden"], fn.Privacy(noise_std=3.0, randomness="secure")])
def test_wherever_it_was_cut_off_a_ledger_goes_on_and_never_says_less(tmp_path, asked):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "ledger.jsonl"
    done = written(whole, asked)
    content = whole.read_bytes()
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        before = len(content[:size].split(b"\n")) - (content[:size].endswith(b"\n") or not size) - 1
        with contextlib.closing(Ledger(path, done)) as ledger:
            assert ledger.releases == max(0, before)
            assert path.read_bytes().startswith(content[:size])
            for number in range(ledger.releases + 1, ROUNDS + 1):
                ledger.add(number)
        if asked.randomness == "seeded":
            assert path.read_bytes() == content
        assert fn.read_ledger(path).rounds == ROUNDS


def test_a_ledger_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "ledger.jsonl"
    written(path, ASKED["hidden"])
    text = path.read_text()
    other = plan(ASKED["local"], 6, fn.poisson(0.4), 1.0, 5, ROUNDS)
    with pytest.raises(fn.UserError, match="of another mechanism"):
        Ledger(path, other)
    path.write_text(text + "{never written}")
    with pytest.raises(fn.UserError, match="last line of ledger.jsonl is damaged"):
        written(path, ASKED["hidden"])
    assert path.read_text() == text + "{never written}"
    path.write_text(text.replace('"round": 2, "epsilon": ', '"round": 2, "epsilon": 0'))
    with pytest.raises(fn.UserError, match="another line for round 2"):
        written(path, ASKED["hidden"])
    with (
        contextlib.closing(Ledger(tmp_path / "new.jsonl", other)),
        pytest.raises(fn.UserError, match="another process"),
    ):
        Ledger(tmp_path / "new.jsonl", other)


nasty = st.one_of(
    st.sampled_from([None, True, -1, 0, 1, 2.5, 10**400, "x", "1", [], {}, [1], [None], 1e-300, 1e300]),
    st.floats(), st.integers(-5, 5000), st.lists(st.floats(0, 1), max_size=3), st.text(max_size=3),
)  # fmt: skip
edits = st.one_of(
    st.tuples(st.just("byte"), st.floats(0, 1), st.binary(min_size=1, max_size=3)),
    st.tuples(st.just("cut"), st.floats(0, 1), st.integers(1, 40)),
    st.tuples(st.just("repeat"), st.floats(0, 1), st.integers(1, 200)),
    st.tuples(st.just("fact"), st.sampled_from(["kind", "p", "mu", "mirrored", "weights", "mus", "unsure"]), nasty),
    st.tuples(st.just("top"), st.sampled_from(["release", "rounds_before"]), nasty),
)


def edited(data, edit):
    kind, where, what = edit
    at = int(where * len(data)) if isinstance(where, float) else 0
    if kind == "byte":
        return data[:at] + what + data[at + len(what) :]
    if kind == "cut":
        return data[:at] + data[at + what :]
    if kind == "repeat":
        return data[: at + what] + data[at:]
    try:
        first, _, rest = data.partition(b"\n")
        head = json.loads(first)
        (head["release"] if kind == "fact" else head)[where] = what
        return json.dumps(head).encode() + b"\n" + rest
    except (ValueError, KeyError, TypeError):
        return data


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ledgers")
    for name, asked in ASKED.items():
        written(folder / name, asked)
    return folder


@pytest.mark.long
@settings(max_examples=300, deadline=None, derandomize=True)
@given(name=st.sampled_from(list(ASKED)), changes=st.lists(edits, min_size=1, max_size=3))
def test_a_damaged_ledger_is_refused_or_read_in_full(ledgers, name, changes):
    data = (ledgers / name).read_bytes()
    for change in changes:
        data = edited(data, change)
    path = ledgers / "damaged"
    path.write_bytes(data)
    try:
        spent = fn.read_ledger(path)
        assert spent.rounds >= releases(data.decode(errors="replace"))
        assert spent.rounds_before >= 0
        if spent.rounds_before + spent.rounds <= 10_000:
            assert spent.epsilon(1e-5) >= 0  # a number, inf perhaps; nan fails
    except fn.UserError as said:
        assert "\n" not in str(said)
