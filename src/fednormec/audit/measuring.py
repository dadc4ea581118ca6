"""Measures of what an audit saw: scores of canaries, p-values of messages, of noise and of cohorts."""

import math
from typing import Any

import numpy as np
from scipy.stats import binom, norm

from fednormec.audit import checks
from fednormec.audit.canaries import signs
from fednormec.audit.checks import least, levels, two_sided
from fednormec.audit.evidence import curve_p_value, gaussian_epsilon
from fednormec.audit.playing import Seen, Watched
from fednormec.privacy import accounting
from fednormec.privacy.accounting import Open
from fednormec.privacy.mechanism import Mechanism

SEVERAL = 96  # clients of whom any three are looked at


# Canaries


def log_ratios(y: np.ndarray, sent: np.ndarray, sizes: Any, mechanism: Mechanism) -> np.ndarray:
    """Returns how much likelier the projections y (..., m) of a round are with the canary in than out, as a logarithm.

    central: nobody sees who was drawn, so that both are mixtures. Elsewhere that is known, and so is the noise.
    """
    mirrored, variance = mechanism.adjacency == "replace_one", mechanism.noise_std**2
    if mechanism.trust != "central":
        variance = variance * np.maximum(sizes, 1)[..., None]
        return np.asarray(np.where(sent, (2 * y if mirrored else y - 0.5) / variance, 0.0))
    p = mechanism.participation.rate(mechanism.num_clients)
    absent, drawn = math.log1p(-p) if p < 1 else -math.inf, math.log(p)
    ratios = np.logaddexp(absent, drawn + (y - 0.5) / variance)
    return np.asarray(ratios - np.logaddexp(absent, drawn + (-y - 0.5) / variance) if mirrored else ratios)


def expected_estimate(mechanism: Mechanism, rounds: int, delta: float) -> float:
    """Returns what `two_gaussians` comes to with endless trials of a right implementation.

    Rounds add to mean and variance.
    """
    release = mechanism.release()
    if isinstance(release, Open):
        weights, mus = np.array(release.weights), np.array(release.mus)
        gap = (weights * mus**2).sum()
        variance = (weights * (mus**2 + mus**4 / 4)).sum() - gap**2 / 4
    else:
        z = np.linspace(-12, 12, 20_001)
        absent, drawn, opposite = (log_ratios(z / release.mu + y, np.array(True), 1, mechanism) for y in (0, 1, -1))
        ratios = np.array([absent, drawn, absent, opposite if release.mirrored else absent])
        law = np.outer([1 - release.p, release.p], norm.pdf(z) / norm.pdf(z).sum()).ravel()
        pair = ratios.reshape(2, -1)  # in, out
        gap = pair[0] @ law - pair[1] @ law
        variance = (((pair - (pair @ law)[:, None]) ** 2) @ law).mean()
    return gaussian_epsilon(math.sqrt(rounds / variance) * gap, delta)


def against_the_curve(
    scores: np.ndarray, present: np.ndarray, mechanism: Mechanism, releases: int, claimed: float
) -> float:
    """Tests the error rates of guesses by these scores against all that is claimed for so many releases."""
    points = [min(claimed, 20.0) * share for share in (0.0, 0.125, 0.25, 0.5)]  # where a few trials can tell something
    return curve_p_value(scores, present, [(e, accounting.delta(mechanism.release(), releases, e)) for e in points])


def too_long(seen: Seen, mechanism: Mechanism) -> float:
    """Tests whether the messages of canaries are longer than the radius on the average."""
    heard = seen.canaries_sent * signs(seen.present, mechanism.adjacency)[:, None]
    run, k, _ = np.nonzero(heard)
    excess = (seen.along * heard - 1)[heard != 0] / seen.std[run, k]
    return float(norm.sf(excess.sum() / math.sqrt(max(1, excess.size))))


def level_beside_messages(seen: Seen, mechanism: Mechanism) -> float:
    """Tests the level of noise along the vectors of canaries that said nothing, in rounds where it is due."""
    silent = seen.canaries_sent * signs(seen.present, mechanism.adjacency)[:, None] == 0
    silent &= seen.std[:, :, None] > 0
    std = np.broadcast_to(seen.std[:, :, None], silent.shape)[silent]
    return levels(((seen.along[silent] / std) ** 2).sum(), std.size) if std.size else 1.0


# Noise


def noise_checks(seen: Watched, others: list[Watched], step: float | None) -> dict[str, float]:
    """Tests noise of a long run, and that of other runs beside it.

    Args:
        seen: the long run.
        others: runs whose noise must be independent of it.
        step: distance between two numbers that noise can be, at most; None: it is any numbers.
    """
    due, counts = seen.squares[seen.due], int(seen.due.sum()) * seen.sizes
    sample = seen.sample[seen.due]
    some = sample[:, : checks.SOME]
    return {
        "noise level": levels(due.sum(), due.shape[0] * seen.sizes.sum()),
        "noise level by coordinates": least(
            levels(seen.by_coordinate, len(due) * np.ones(1)), levels(due.sum(0), counts)
        ),
        "noise level by rounds": least(levels(due.sum(1), seen.sizes.sum()), levels(due, seen.sizes)),
        "noise shape": checks.shape(sample),
        "noise of any two rounds": checks.any_two(sample),
        "noise of any two coordinates": checks.any_two(sample.T),
        "noise of any three": least(checks.any_three(some), checks.any_three(sample[: checks.SOME].T)),
        "noise drawn once": least(
            checks.repeated(sample, *(o.sample for o in others), step=step),
            checks.repeated(seen.first[None], step=step),
        ),
        "noise of two runs": least(*(checks.between(seen.sample, o.sample) for o in others)),
    }


def level_unheard(seen: Watched) -> float:
    """Tests the level of noise in rounds in which nobody was drawn."""
    unheard = seen.squares[~seen.sent.any(1)]
    return levels(unheard.sum(), unheard.shape[0] * seen.sizes.sum())


# Cohorts


def cohort_checks(seen: Watched, other: Watched, rare: Watched, p: float, rare_p: float) -> dict[str, float]:
    """Tests the coins of a long run, beside its noise, too.

    Args:
        seen: the long run, with coins of probability p.
        other: a run whose coins must be independent of it.
        rare: a run with coins of probability rare_p.
        p: probability of being drawn.
        rare_p: that in `rare`.
    """
    together = [checks.cohorts_and_noise(w.sent[w.due], w.sample[w.due], q) for w, q in ((seen, p), (rare, rare_p))]
    return {
        **counts(seen.sent[None], p),
        **dependence(seen.sent, p),
        "cohorts of two runs": checks.sets_between(seen.sent, other.sent, p),
        "cohorts and noise": least(*together),
    }


def counts(sent: np.ndarray, p: float) -> dict[str, float]:
    """Tests whether (R, K, M) draws are coins: how many, and how evenly over clients and over rounds.

    Neither more nor less evenly than coins would be.
    """
    return {
        "sampling rate": float(two_sided(binom(sent.size, p), sent.sum())),
        "draws per client": checks.dispersion(sent.sum(1), sent.shape[1], p),
        "cohort sizes": checks.dispersion(sent.sum(2), sent.shape[2], p),
    }


def dependence(sent: np.ndarray, p: float) -> dict[str, float]:
    """Tests whether (K, M) draws are independent: any two rounds, any two clients, and any three of either."""
    clients = sent[:, : 4 * checks.SOME]
    triples = (
        checks.any_three_sets(sent, p),
        checks.any_three_sets(clients.T, p),
        checks.any_three_columns(sent[:, :SEVERAL], p),
    )
    return {
        "any two cohorts": checks.any_two_sets(sent, p),
        "any two clients": checks.any_two_sets(clients.T, p),
        "any three cohorts or clients": least(*triples),
    }
