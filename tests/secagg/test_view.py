"""What the server sees of masked vectors is what can be simulated from the sum alone; the same tests find bad masks."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from scipy.stats import chi2, chi2_contingency
from summed import Attempt, Drawn, stream, terms_of

from fednormec.secagg import masks
from fednormec.secagg.ciphers import Words, derived, keystream
from fednormec.secagg.terms import Terms

WIDTH = 2**15
PASSES, FAILS = 1e-4, 1e-12  # one test in so many fails by chance; what is wrong is far beyond
SOME = (3, 10, 17)


def small_vectors(terms: Terms) -> dict[int, Words]:
    """Messages with noise: small numbers of both signs, so that a high byte says much."""
    drawn = np.random.default_rng(3)
    return {one: drawn.integers(-1000, 1000, terms.width).astype(np.uint32) for one in terms.cohort}


def transcript(seed: object = 0, **other: object) -> tuple[Attempt, list[Words]]:
    """An attempt, and its masked vectors without the own masks, which the server takes away in the end."""
    attempt = Attempt(terms_of(3, 2, width=WIDTH, **other), seed=seed)
    attempt.vectors = small_vectors(attempt.terms)
    attempt.goes_to("agree")
    seeds = {one: Drawn(stream((seed, one, "draws"))).seed for one in SOME}
    sent = {one: np.frombuffer(attempt.sent["masked"][one][: 4 * WIDTH], "<u4") for one in SOME}
    return attempt, [sent[one] - attempt.server._attempt.own_mask(one, seeds[one]) for one in SOME]


def simulated(total: Words, seed: int = 1) -> list[Words]:
    """What a simulator makes that knows nothing but the sum."""
    drawn = np.random.default_rng(seed)
    first = [drawn.integers(0, 2**32, total.size, dtype=np.uint32) for _ in SOME[1:]]
    return [*first, total - sum(first, np.zeros_like(total))]


def features(seen: Sequence[Words], vectors: Iterable[Words]) -> dict[str, Words]:
    """Bytes in which a server that even knows the vectors could see something."""
    found = dict[str, Words]()
    known = list(vectors)
    for i, view in enumerate(seen):
        rest = view - known[i]
        found |= {f"high {i}": view >> 24, f"low {i}": view & 255, f"rest {i}": rest >> 24, f"last {i}": rest & 255}
        found |= {f"step {lag} {i}": (rest[lag:] - rest[:-lag]) & 255 for lag in (1, 4, 256)}
        found |= {f"pair {i} {j}": (view - seen[j]) >> 24 for j in range(i)}
        found |= {f"both {i} {j}": (view + seen[j]) >> 24 for j in range(i)}
    return found


def suspicion(real: Sequence[Words], other: Sequence[Words], vectors: Iterable[Words]) -> float:
    """The smallest probability, over all features, that two samples of one law differ so much; times their number."""
    known = list(vectors)
    mine, theirs = features(real, known), features(other, known)
    return len(mine) * min(_two_samples(mine[name], theirs[name]) for name in mine)


def _two_samples(a: Words, b: Words) -> float:
    table = np.array([np.bincount(one, minlength=256) for one in (a, b)])
    return float(chi2_contingency(table[:, table.sum(0) > 0]).pvalue) if (table.sum(0) > 0).sum() > 1 else 1.0


def total_of(attempt: Attempt) -> Words:
    return sum(attempt.vectors.values(), np.zeros(WIDTH, np.uint32))


@pytest.mark.parametrize("seed", range(3))
def test_a_transcript_could_be_simulated_from_the_sum(seed: int) -> None:
    attempt, seen = transcript(seed)
    assert (sum(seen, np.zeros(WIDTH, np.uint32)) == total_of(attempt)).all()
    assert suspicion(seen, simulated(total_of(attempt), seed), attempt.vectors.values()) > PASSES


def test_the_masked_vectors_as_they_are_sent_are_uniform() -> None:
    """Of zeros; each of them, and their differences."""
    attempt = Attempt(terms_of(3, 2, width=WIDTH))
    attempt.vectors = {one: np.zeros(WIDTH, np.uint32) for one in SOME}
    attempt.goes_to("agree")
    sent = [np.frombuffer(attempt.sent["masked"][one][:-64], "<u4") for one in SOME]
    for words in (*sent, sent[0] - sent[1], sent[1] + sent[2]):
        assert 1e-5 < uniformity(words) < 1 - 1e-5
    assert uniformity(np.zeros(WIDTH, np.uint32)) < FAILS
    assert uniformity(np.arange(WIDTH, dtype=np.uint32)) < FAILS


def uniformity(words: Words) -> float:
    counts = np.bincount(words.astype("<u4").view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), 255))


def constant(key: bytes, width: int) -> Words:
    return np.zeros(width, np.uint32)


def congruential(key: bytes, width: int) -> Words:
    """A generator of 32 bits of state, whose last byte comes again after 256 steps."""
    factor, step, words = 1664525, 1013904223, np.empty(width, np.uint32)
    state = int.from_bytes(key[:4], "big")
    for i in range(width):
        words[i] = state = (state * factor + step) % 2**32
    return words


def short_period(key: bytes, width: int) -> Words:
    """One block of the right stream, again and again."""
    return np.resize(keystream(key, 4), width)


@pytest.mark.long
@pytest.mark.parametrize("bad", [constant, congruential, short_period])
def test_bad_masks_are_found(bad: Callable[[bytes, int], Words], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "keystream", bad)
    attempt, seen = transcript()
    assert (sum(seen, np.zeros(WIDTH, np.uint32)) == total_of(attempt)).all(), "though the sum is right"
    assert suspicion(seen, simulated(total_of(attempt)), attempt.vectors.values()) < FAILS


def test_the_same_draws_in_another_attempt_give_other_masks() -> None:
    before, first = transcript()
    attempt, second = transcript(attempt=1)
    twice = [one - other for one, other in zip(first, second, strict=True)]
    zeros = [np.zeros(WIDTH, np.uint32)] * 3
    assert suspicion(twice, simulated(zeros[0]), zeros) > PASSES
    own = [one.server._attempt.own_mask(SOME[0], b"s" * 32) for one in (before, attempt)]
    assert uniformity(own[0] - own[1]) > 1e-5


def test_a_context_that_is_used_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks then cancel in the difference, which is the one of the vectors."""
    monkeypatch.setattr(Terms, "context", b"always the same")
    _, first = transcript()
    _, second = transcript(attempt=1)
    twice = [one - other for one, other in zip(first, second, strict=True)]
    zeros = [np.zeros(WIDTH, np.uint32)] * 3
    assert suspicion(twice, simulated(zeros[0]), zeros) < FAILS


@pytest.mark.parametrize("known", [False, True])
def test_who_drops_out_is_hidden_by_its_own_mask_alone(known: bool) -> None:
    """Its mask key is recovered, so that of its masks only its own is left; the server must not know that seed too."""
    attempt, seen = transcript()
    gone, drawn = SOME[1], Drawn(stream((0, SOME[1], "draws")))
    started = attempt.server._attempt
    view = seen[1].copy()
    for other in (SOME[0], SOME[2]):
        mask = started.pair_mask(drawn.mask_key, gone, other)
        view = view - mask if gone < other else view + mask
    if not known:
        view = view + started.own_mask(gone, drawn.seed)
    vector = attempt.vectors[gone]
    anything = np.random.default_rng(2).integers(0, 2**32, WIDTH, dtype=np.uint32)
    found = suspicion([view], [anything], [vector])
    assert found < FAILS if known else found > PASSES
    assert (view == vector).all() == known


def test_masks_of_different_purposes_have_nothing_in_common() -> None:
    keys = {
        derived(b"s" * 32, *way) for way in (("own mask", b"a"), ("pair mask", b"a"), ("own mask", b"b"), ("box", b"a"))
    }
    assert len(keys) == 4
    streams = [keystream(key, WIDTH) for key in sorted(keys)]
    for i, one in enumerate(streams):
        assert all(uniformity(one ^ other) > 1e-5 for other in streams[:i])
