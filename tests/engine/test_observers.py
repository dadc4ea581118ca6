"""Observers hear of every round and of the end once, however it comes; nothing of a run depends on them."""

import itertools

import pytest
import torch

import fednormec as fn
from fednormec.config.schema import read
from fednormec.config.settings import QUICKSTART
from fednormec.engine.observers import watching
from fednormec.runs.records import finished
from fednormec.runs.runner import go_on, perform

PROBLEM = fn.random_quadratic(7, 5, parts=3, heterogeneity=1.0, seed=0)
METHOD = fn.fed_normec(fn.gd(0.1))


class Heard:
    def __init__(self, fails_after: int | None = None, fails_at_the_end: bool = False) -> None:
        self.rounds, self.ends = list[int](), list[fn.End]()
        self._fails_after, self._fails_at_the_end = fails_after, fails_at_the_end

    @property
    def observer(self) -> fn.Observer:
        return fn.Observer(self.after, self.close)

    def after(self, r: fn.Round, record: fn.Record) -> None:
        assert record["round"] == r.number
        self.rounds.append(r.number)
        if r.number == self._fails_after:
            raise RuntimeError("an observer fails")

    def close(self, end: fn.End) -> None:
        self.ends.append(end)
        if self._fails_at_the_end:
            raise OSError("no room for the last line")


def test_they_hear_every_round_and_the_end() -> None:
    heard = [Heard(), Heard()]
    trained = fn.train(PROBLEM, METHOD, rounds=4, observers=[one.observer for one in heard])
    assert all(one.rounds == [1, 2, 3, 4] and one.ends == [fn.End(4)] for one in heard)
    assert torch.equal(trained.x, fn.train(PROBLEM, METHOD, rounds=4).x), "watching changes nothing"


def test_either_function_may_be_left_out() -> None:
    ends = list[fn.End]()
    fn.train(PROBLEM, METHOD, rounds=2, observers=[fn.Observer(), fn.Observer(close=ends.append)])
    assert ends == [fn.End(2)]


def test_they_hear_why_a_run_ended_early() -> None:
    heard = Heard()
    stop = fn.train(PROBLEM, METHOD, rounds=9, observers=[heard.observer],
                    stop_when=lambda public: "enough" if public["round"] == 3 else None)  # fmt: skip
    assert stop.stopped == "enough" and heard.ends == [fn.End(3, "stopped on request: enough")]
    heard = Heard()
    diverged = fn.train(PROBLEM, fn.fed_avg(fn.gd(1e300)), rounds=9, observers=[heard.observer]).diverged
    assert diverged is not None and [end.why for end in heard.ends] == [str(diverged)]
    assert heard.ends[0].rounds == len(heard.rounds) == diverged.round - 1


def test_one_that_fails_ends_the_run_and_all_are_closed_once() -> None:
    heard = [Heard(), Heard(fails_after=2, fails_at_the_end=True), Heard()]
    with pytest.raises(RuntimeError, match="an observer fails"):
        fn.train(PROBLEM, METHOD, rounds=4, observers=[one.observer for one in heard])
    assert [one.rounds for one in heard] == [[1, 2], [1, 2], [1]]
    assert all(one.ends == [fn.End(2, "an observer fails")] for one in heard)


def test_one_that_cannot_be_closed_says_so_and_the_others_are_closed() -> None:
    heard = [Heard(fails_at_the_end=True), Heard()]
    with pytest.raises(OSError, match="no room"):
        fn.train(PROBLEM, METHOD, rounds=2, observers=[one.observer for one in heard])
    assert [one.ends[0].rounds for one in heard] == [2, 2] and all(len(one.ends) == 1 for one in heard)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, OSError])
def test_the_error_that_ends_a_run_comes_first(raised) -> None:
    def fail(end: fn.End) -> None:
        raise raised

    heard = Heard()
    with pytest.raises(ZeroDivisionError), watching([fn.Observer(close=fail), heard.observer]):
        raise ZeroDivisionError
    assert len(heard.ends) == 1


def test_what_they_change_in_a_record_stays_theirs() -> None:
    seen = list[set[str]]()

    def change(r: fn.Round, record: fn.Record) -> None:
        record.apart["train_loss"] = record["secret"] = record.apart["left_out"]

    trained = fn.train(PROBLEM, METHOD, rounds=3, evaluate_every=1, observers=[fn.Observer(change)],
                       stop_when=lambda public: seen.append(set(public)))  # fmt: skip
    assert trained.history == fn.train(PROBLEM, METHOD, rounds=3, evaluate_every=1).history
    assert seen == [{"round"}, {"round"}]


@pytest.mark.parametrize("given", [[print], fn.Observer(print), iter([None])])
def test_what_is_no_observer_is_refused_in_a_sentence(given) -> None:
    with pytest.raises(fn.UserError, match=r"observers is a list of fn.Observer\(after=..., close=...\), not of"):
        fn.train(PROBLEM, METHOD, rounds=2, observers=given)


def test_any_iterable_of_them_will_do() -> None:
    heard = Heard()
    fn.train(PROBLEM, METHOD, rounds=2, observers=(one for one in [heard.observer]))
    assert heard.rounds == [1, 2] and heard.ends == [fn.End(2)]


def test_an_interrupt_closes_them_too() -> None:
    heard = Heard()
    with pytest.raises(KeyboardInterrupt), watching([heard.observer]):
        raise KeyboardInterrupt
    assert heard.ends == [fn.End(0, "KeyboardInterrupt")]


def test_a_run_folder_has_them_as_well(tmp_path) -> None:
    heard, lines = Heard(), list[int]()
    seen = fn.Observer(lambda r, record: lines.append((tmp_path / "out" / "metrics.jsonl").read_bytes().count(b"\n")))
    config = read(QUICKSTART, ["model.name=linear", "data.clients=6", "run.rounds=3"])
    perform(config, "test", tmp_path / "out", quiet=True, observers=[heard.observer, seen])
    assert heard.rounds == [1, 2, 3] and heard.ends == [fn.End(3)]
    assert lines == [1, 2, 3], "a round is on record before anybody hears of it"


@pytest.mark.long
def test_one_that_fails_leaves_a_run_fit_to_resume_to_the_same_bits(tmp_path) -> None:
    config = read(QUICKSTART, ["model.name=linear", "data.clients=6", "run.rounds=4", "run.checkpoint_rounds=1"])
    perform(config, "test", tmp_path / "whole", quiet=True)
    with pytest.raises(RuntimeError, match="an observer fails"):
        perform(config, "test", tmp_path / "out", quiet=True, observers=[Heard(fails_after=2).observer])
    assert (tmp_path / "out" / "checkpoint-2.safetensors").exists(), "before anybody hears of the round"
    go_on(tmp_path / "out", quiet=True)
    with pytest.raises(fn.UserError, match="no room"):
        perform(config, "test", tmp_path / "last", quiet=True, observers=[Heard(fails_at_the_end=True).observer])
    for out, name in itertools.product(("out", "last"), ("model.safetensors", "ledger.jsonl", "metrics.jsonl")):
        assert (tmp_path / out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert finished(tmp_path / "last") is not None, "all is stored before they are told of the end"
