"""The pool of threads: order, bounds, one arithmetic thread each."""

import threading

import pytest
import torch

from fednormec.engine.threads import Pool


def test_results_come_in_order_whoever_is_first():
    others = threading.Event()

    def first_last(items):
        if items[0] == 0:
            assert others.wait(60)
        if items[0] == 8:
            others.set()
        return items

    with Pool(3, 4).threads() as submit:
        results = list(Pool(3, 4).in_order(submit, first_last, list(range(9)), per_item=2))
    assert results == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_chunks_hold_at_least_one_item():
    with Pool(1, 1).threads() as submit:
        assert list(Pool(1, 1).in_order(submit, list, [1, 2], per_item=50)) == [[1], [2]]
        assert list(Pool(1, 1).in_order(submit, list, [], per_item=50)) == []


def test_each_thread_does_its_arithmetic_alone_and_the_callers_setting_stays():
    torch.set_num_threads(2)
    try:
        with Pool(3, 1).threads() as submit:
            work = Pool(3, 1).in_order(submit, lambda items: torch.get_num_threads(), list(range(9)), per_item=1)
            assert set(work) == {1}
            assert torch.get_num_threads() == 2
        seen = []
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert seen == [2]
    finally:
        torch.set_num_threads(1)


def test_no_more_than_two_chunks_per_thread_are_under_way():
    asked, done = [], []

    def counted(submit):
        def ask(work, items):
            asked.append(items[0])
            assert len(asked) - len(done) <= 4
            return submit(work, items)

        return ask

    with Pool(2, 1).threads() as submit:
        for result in Pool(2, 1).in_order(counted(submit), list, list(range(100)), per_item=1):
            done += result
    assert asked == done == list(range(100))


def test_an_error_in_a_thread_reaches_the_caller():
    with Pool(2, 1).threads() as submit, pytest.raises(ZeroDivisionError):
        list(Pool(2, 1).in_order(submit, lambda items: 1 / items[0], [1, 0, 2], per_item=1))
