"""Terms: every one of them is in the context, and those that cannot keep the promise are refused."""

import itertools

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from summed import private_key, terms_of

from fednormec.errors import UserError
from fednormec.secagg.aggregator import Aggregator
from fednormec.secagg.ciphers import joined
from fednormec.secagg.terms import Terms


def test_every_term_is_in_the_context() -> None:
    plain = terms_of(12, 6, 2, 7, neighbours=4)
    roster = dict(plain.roster)
    others = [
        plain._replace(run="b run"), plain._replace(agreed="beee"), plain._replace(run="a runbeef", agreed=""),
        plain._replace(round=5), plain._replace(attempt=4), plain._replace(round=0, attempt=4),
        plain._replace(floor=7), plain._replace(colluders=3), plain._replace(width=8), plain._replace(neighbours=6),
        plain._replace(roster={one: key for one, key in roster.items() if one != 3}),
        plain._replace(roster=roster | {3: roster[10], 10: roster[3]}),
        plain._replace(roster={one + (one == 3): key for one, key in roster.items()}),
        plain._replace(run="\ud800"),
    ]  # fmt: skip
    contexts = [terms.context for terms in (plain, *others)]
    assert len(set(contexts)) == len(contexts)
    assert plain._replace(roster=dict(reversed(roster.items()))).context == plain.context


def test_no_two_lists_of_parts_give_the_same_bytes() -> None:
    parts = [b"", b"a", b"aa", b"\0" * 8, b"\0" * 7 + b"\1"]
    lists = [some for size in range(4) for some in itertools.product(parts, repeat=size)]
    assert len({joined("label", *some) for some in lists} | {joined("labe", *some) for some in lists}) == 2 * len(lists)


BAD = {
    "floor must lie between 2 and the 5 members of the cohort, not 1": {"floor": 1},
    "floor must lie between 2 and the 5 members of the cohort, not 6": {"floor": 6},
    "colluders must lie between 0 and 2, below the floor, not 3": {"floor": 3, "colluders": 3},
    "colluders must lie between 0 and 2, below the floor, not -1": {"floor": 3, "colluders": -1},
    "width must lie between 1": {"width": 0},
    "width must lie between 1 and 268,435,456": {"width": 2**30},
    "round must be a count": {"round": -1},
    "attempt must be a count": {"attempt": 2**63},
    "neighbours must be even": {"neighbours": 3},
    "between 2 and 100,000 members, not 1": {"roster": {3: private_key(3).public_key()}},
    "number of a member must lie between 0 and": {"roster": {n: private_key(n % 9).public_key() for n in (1, 2**32)}},
    "on P-256": {"roster": {1: private_key(1).public_key(), 2: ec.derive_private_key(9, ec.SECP384R1()).public_key()}},
    "two members have the same key": {"roster": dict.fromkeys((1, 2, 3), private_key(1).public_key())},
}


@pytest.mark.parametrize("why", BAD)
def test_terms_that_cannot_be(why: str) -> None:
    terms = terms_of(5)._replace(**BAD[why])
    with pytest.raises(UserError, match=why):
        terms.checked()
    with pytest.raises(UserError, match=why):
        Aggregator(terms)


@pytest.mark.parametrize(
    ("n", "floor", "colluders", "threshold"),
    [(2, 2, 1, 2), (3, 2, 0, 3), (10, 2, 0, 7), (10, 9, 0, 9), (10, 7, 6, 9), (10, 10, 9, 10), (100, 70, 50, 76)],
)
def test_the_number_of_signatures(n: int, floor: int, colluders: int, threshold: int) -> None:
    terms: Terms = terms_of(n, floor, colluders).checked()
    assert terms.threshold == terms.neighbourhood.shares_needed == threshold
