"""Claims of the paper, all five, checked against our runs."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fednormec.files import to_json
from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.results.reading import Run
from fednormec.runs.progress import News
from fednormec.sweeps.paper import BETAS, COMPENSATED, GAMMAS, NOISES, PLAIN, Point, Scale, cells, grid, point_of
from fednormec.sweeps.paper_figures import draw
from fednormec.sweeps.paper_runs import Reproduction
from fednormec.sweeps.pool import Outcome, earlier, run_all

RECORDS = "records.jsonl"


class Part(NamedTuple):
    """Part of a claim: an inequality, with the margin by which it holds for each seed.

    A margin is in points of accuracy, or a ratio less 1.
    """

    text: str
    margins: tuple[float, ...]
    unit: str = "points"

    @property
    def verdict(self) -> str:
        """Verdict over the seeds: holds, holds on average, or does not hold."""
        if all(margin > 0 for margin in self.margins):
            return "holds"
        return "holds on average" if float(np.mean(self.margins)) > 0 else "does not hold"


class Claim(NamedTuple):
    """Claim of the paper, with what was found."""

    name: str
    text: str
    parts: tuple[Part, ...]

    @property
    def verdict(self) -> str:
        """Verdict of all its parts, or how many have which."""
        found = [part.verdict for part in self.parts]
        kinds = [kind for kind in ("holds", "holds on average", "does not hold") if kind in found]
        if len(kinds) == 1:
            return kinds[0]
        return ", ".join(f"{kind} in {found.count(kind)}" for kind in kinds) + f" of {len(found)} parts"


def reproduce(
    figures: Sequence[str],
    scale: Scale,
    folder: Path,
    workers: int,
    tell: Callable[[News[Outcome]], None],
    past: Mapping[tuple[Point, int], Run] | None = None,
) -> "Findings":
    """Runs what is missing, draws the figures and checks the claims they carry: all in the folder.

    Args:
        figures: keys of FIGURES.
        scale: the scale.
        folder: where runs, figures and findings are stored.
        workers: number of runs at once.
        tell: called with news of the runs.
        past: runs of an earlier reproduction, which are not run again.
    """
    asked = [cell for cell in cells(figures, scale) if point_of(cell) not in (past or {})]
    done = Reproduction(scale, [end for cell in asked if (end := earlier(cell, folder)) is not None], past)

    def told(news: News[Outcome]) -> None:
        if news.ended is not None and news.ended.summary is not None:  # what has ended is kept if it is stopped now
            done.add(news.ended)
            done.write(folder / RECORDS)
        tell(news)

    for outcome in run_all(asked, folder, workers, told):
        done.add(outcome)
    for figure in figures:
        draw(figure, done, folder)
    claims = [check(done) for check, figure in CLAIMS.items() if figure in figures]
    (folder / "claims.md").write_text(markdown(claims, done), encoding="utf-8")
    done.write(folder / RECORDS)
    found = Findings(claims, done.true_epsilons(), done.scale)
    (folder / "claims.json").write_text(to_json(found.facts(), indent=2) + "\n", encoding="utf-8")
    return found


class Findings(NamedTuple):
    """Findings about each claim, and what the noise was worth.

    Attributes:
        claims: the claims with their verdicts.
        true_epsilons: the least and the largest ε of the runs.
        scale: the scale that was run.
    """

    claims: list[Claim]
    true_epsilons: tuple[float, float]
    scale: Scale

    @property
    def warning(self) -> str:
        """Warning that the runs are not private, with their true ε."""
        low, high = map(up, self.true_epsilons)
        return (
            f"{NOT_PRIVATE}: the noise has the paper's size as a whole vector; its true ε is {low}"
            + (f" to {high}" if high != low else "")
            + " at δ = 1e-05."
        )

    def facts(self) -> dict[str, Any]:
        """Returns the findings as data."""
        claims = [
            {
                "name": claim.name,
                "text": claim.text,
                "verdict": claim.verdict,
                "parts": [{**part._asdict(), "verdict": part.verdict} for part in claim.parts],
            }
            for claim in self.claims
        ]
        return {
            "label": NOT_PRIVATE, "true_epsilon": list(self.true_epsilons), "scale": self.scale.facts(),
            "claims": claims,
        }  # fmt: skip

    def text(self) -> str:
        """Returns the findings as text, for a terminal."""
        lines = [self.warning]
        for claim in self.claims:
            lines += [f"{claim.name}  {claim.verdict}: {claim.text}"]
            lines += [f"      {part.verdict:<17} {_margins(part):<34} {part.text}" for part in claim.parts]
        return "\n".join(lines)


def markdown(claims: Sequence[Claim], done: Reproduction) -> str:
    """Returns claims and tables in Markdown, for a document."""
    seeds = ", ".join(map(str, done.scale.seeds))
    lines = [
        Findings([], done.true_epsilons(), done.scale).warning,
        f"Scale: {done.scale.name}; model: {done.scale.model}, {done.scale.examples:,} training images; "
        f"local work: {done.scale.work}; noise: {NOISES[done.scale.noise]}; seeds {seeds}.",
        _table(["claim", "part", "verdict", "by how much (mean; each seed)"],
               [[claim.name, part.text, part.verdict, _margins(part)] for claim in claims for part in claim.parts]),
    ]  # fmt: skip
    tuned = dict.fromkeys((point.method, point.p, point.beta) for point in done.runs)
    whole = [key for key in tuned if all(Point(*key, gamma) in done.runs for gamma in GAMMAS)]
    rows = []
    for key in whole:
        best = done.tuned(*key)
        spread = [done.final(best, seed) for seed in done.scale.seeds]
        others = [f"{done.mean(Point(*key, gamma)):.1%}" for gamma in GAMMAS]
        rows.append([key[0], f"{key[1]:g}", f"{key[2]:g}", f"{best.gamma:g}", f"{np.mean(spread):.1%}",
                     f"{min(spread):.1%} to {max(spread):.1%}", *others])  # fmt: skip
    head = ["method", "p", "β", "best γ", "last accuracy", "over seeds", *(f"γ = {gamma:g}" for gamma in GAMMAS)]
    return "\n\n".join([*lines, _table(head, rows)]) + "\n"


# the claims, each with the figure that carries it


def _c1(done: Reproduction) -> Claim:
    parts = []
    for p in (1.0, 0.25):
        best, slow, loud = (done.tuned(COMPENSATED, p, beta) for beta in (0.01, 0.001, 0.1))
        parts += [
            _above(done, best, slow, f"p = {p:g}: β = 0.01 above β = 0.001"),
            _above(done, best, loud, f"p = {p:g}: β = 0.01 above β = 0.1"),
            _above(done, slow, loud, f"p = {p:g}: β = 0.1 is the worst, below β = 0.001"),
        ]
    return Claim("C1", "with noise β = 0.01 is best for p = 1 and p = 0.25, β = 0.1 worst", tuple(parts))


def _c2(done: Reproduction) -> Claim:
    parts = [
        _above(done, done.tuned(COMPENSATED, 1.0, beta), done.tuned(COMPENSATED, 0.25, beta), f"β = {beta:g}")
        for beta in BETAS
    ]
    return Claim("C2", "at equal β, p = 1 beats p = 0.25 per round", tuple(parts))


def _c3(done: Reproduction) -> Claim:
    whole, target = done.tuned(COMPENSATED, 1.0, 0.01), done.target()
    parts = []
    for p in (0.5, 0.25):
        few = done.tuned(COMPENSATED, p, 0.01)
        ratios = [_ratio(done.transmissions(whole, s, target), done.transmissions(few, s, target)) - 1
                  for s in done.scale.seeds]  # fmt: skip
        label = f"{target:.1%} accuracy after fewer transmissions with p = {p:g} than with p = 1 (β = 0.01)"
        parts.append(Part(label, tuple(ratios), "ratio"))
    return Claim(
        "C3", "per transmission from client to server small p wins (the paper: 3.75 times fewer)", tuple(parts)
    )


def _c4(done: Reproduction) -> Claim:
    parts = [
        _above(done, done.tuned(COMPENSATED, 1.0, beta), done.tuned(PLAIN, 1.0, beta), f"β = {beta:g}")
        for beta in BETAS
    ]
    return Claim("C4", "error compensation beats none (FedAvg with Norm_α, p = 1) at every β", tuple(parts))


def _c5(done: Reproduction) -> Claim:
    points = grid(PLAIN, (1.0,))

    def best(seed: int, betas: Iterable[float]) -> float:
        return max(done.highest(point, seed) for point in points if point.beta in betas)

    def along(seed: int, product: float) -> float:
        near = [done.highest(p, seed) for p in points if math.isclose(p.beta * p.gamma, product, rel_tol=1e-6)]
        return float(np.mean(near))

    seeds = done.scale.seeds
    others = [(b, g) for b, g in itertools.product(BETAS, GAMMAS) if not math.isclose(b * g, 1e-3, rel_tol=1e-6)]
    products = sorted({float(f"{b * g:.3g}") for b, g in others})
    parts = (
        Part("best at β = 0.1", tuple(best(s, (0.1,)) - best(s, (0.01, 0.001)) for s in seeds)),
        Part("the diagonal βγ = 0.001 above every other", tuple(
            along(s, 1e-3) - max(along(s, product) for product in products) for s in seeds)),
    )  # fmt: skip
    return Claim("C5", "FedAvg's highest accuracy: best at β = 0.1, good along βγ = 0.001", parts)


CLAIMS: Mapping[Callable[[Reproduction], Claim], str] = {
    _c1: "figure1",
    _c2: "figure1",
    _c3: "figure2",
    _c4: "figure3",
    _c5: "figure4",
}


def _above(done: Reproduction, better: Point, worse: Point, label: str) -> Part:
    return Part(label, tuple(done.final(better, seed) - done.final(worse, seed) for seed in done.scale.seeds))


def _ratio(many: float, few: float) -> float:
    """Returns how many times fewer: 0 if the target was not reached with few, otherwise inf if not with many."""
    return 0.0 if math.isinf(few) else many / few


def _margins(part: Part) -> str:
    mean, *each = (_amount(margin, part.unit) for margin in (float(np.mean(part.margins)), *part.margins))
    return mean if len(each) == 1 else f"{mean}; {', '.join(each)}"


def _amount(margin: float, unit: str) -> str:
    if unit == "ratio":
        return "not reached" if margin <= -1 else "only with fewer" if math.isinf(margin) else f"{margin + 1:.2f} x"
    return f"{100 * margin:+.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
