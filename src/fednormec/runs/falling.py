"""Curves that end clearly below their best: found by a rule, and told with what to change."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fednormec.engine.figures import figure_of

TOGETHER = 3  # evaluations of which a mean is taken
LEAST = 5  # evaluations below which nothing is said
POINTS, SHARE = 0.03, 0.1  # least fall: of a share, and of anything else relative to how far it had come
SPREADS = 4.0  # least fall relative to the curve's own scatter: names 1 flat noisy curve in 100 or fewer


class Falling(NamedTuple):
    """Fall of a figure from its best to the end of a run.

    Attributes:
        metric: name of the figure.
        round: round of the best evaluation.
        best: the figure after that round.
        end: the figure after the last evaluation.
        not_private: whether it looks at clients' data.
    """

    metric: str
    round: int
    best: float
    end: float
    not_private: bool

    def sentence(self, private: bool) -> str:
        """Returns what happened and what to change; `private` is whether the run had noise calibrated or given."""
        words, form, _ = figure_of(self.metric)
        looks = " (a look at the clients' data: not private)" if self.not_private else ""
        less = "which at the same ε have less noise each, " if private else ""
        return (
            f"{words} got worse: {self.best:{form}} after round {self.round}, {self.end:{form}} at the end{looks}. "
            f"Take fewer rounds, {less}such as run.rounds={self.round}, or smaller steps (method.server_step), or, "
            "with a public test set, store the best model (run.keep=best)."
        )


def falling(metric: str, rounds: Sequence[int], values: Sequence[float], not_private: bool) -> Falling | None:
    """Returns how a figure fell from its best; None if it did not, or no more than it scatters anyway.

    The mean of the last three evaluations is compared with the best mean of three neighbours. The fall must exceed four
    times the scatter of the evaluations (by their second differences, which a steady trend does not enter), and
    3 points of a share or a tenth of the way from the first evaluation to the best of any other figure.

    Args:
        metric: name of the figure.
        rounds: rounds after which it was evaluated.
        values: the figure; what is not finite is left away.
        not_private: whether it looks at clients' data.
    """
    figure, kept = figure_of(metric), np.isfinite(values)
    at, y = np.asarray(rounds)[kept], np.asarray(values, float)[kept]
    if len(y) < LEAST:
        return None
    up = y if figure.higher else -y
    means = np.convolve(up, np.full(TOGETHER, 1 / TOGETHER), "valid")
    scatter = np.median(np.abs(np.diff(up, 2))) / (0.6745 * np.sqrt(6))
    least = POINTS if figure.is_share else SHARE * (means.max() - up[0])
    if means.max() - means[-1] <= max(SPREADS * scatter, least, 0.0):
        return None
    first = int(means.argmax())
    best = first + int(up[first : first + TOGETHER].argmax())
    return Falling(metric, int(at[best]), float(y[best]), float(y[-1]), not_private)
