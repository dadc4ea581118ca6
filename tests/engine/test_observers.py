"""Observers hear of every round and of the end once, however it comes; nothing of a run depends on them."""

import pytest
import torch

import fednormec as fn
from fednormec.config.schema import read
from fednormec.config.settings import QUICKSTART
from fednormec.engine.observers import watching
from fednormec.runs.runner import perform

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
