"""Experiments of the Fed-α-NormEC paper: its four figures drawn anew, its five claims checked one by one.

The noise is the paper's, read as the norm of the whole vector: the only reading that trains, and NOT PRIVATE.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fednormec.config.assemble import assemble
from fednormec.config.schema import Config, changed
from fednormec.core.randomness import generator
from fednormec.engine.simulation import simulate
from fednormec.engine.threads import Threads
from fednormec.errors import UserError, at_least_one, known
from fednormec.files import to_json
from fednormec.privacy.calibrate import paper_noise_std
from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.privacy.mechanism import MOST
from fednormec.results.groups import Group
from fednormec.results.reading import Run, read_run
from fednormec.runs.progress import News
from fednormec.sweeps.pool import Cell, Outcome, ended, run_all, with_own_noise

WORK = {
    "epoch": "a round is a pass, an exchange for each of its {passes} mini-batches of {batch}, steps of length γ each",
    "gradient": "one gradient over all local data, a step of length γ",
    "pass": "one pass over the local data in batches of {batch}, steps of length γ in all",
    "steps": "{steps} steps on {batch} examples, each of length γ",
    "minibatch": "one gradient on {batch} examples, a step of length γ",
}
GAMMAS = BETAS = (0.001, 0.01, 0.1)
CLIENTS, ALPHA, BATCH = 20, 0.01, 32
EPSILON, DELTA, ROUNDS = 8.0, 1e-5, 300
EXAMPLES, TESTS = 54_000, 6_000  # nine tenths of CIFAR-10, and the rest
ACCURACY = "test_accuracy"
REACHED = 65 / 70  # the paper's target in figure 2, as a share of what full participation reaches
COMPENSATED, PLAIN = "Fed-α-NormEC", "FedAvg"

PAPER: Config = {
    "data": {
        "source": "cifar10", "pool": True, "test_fraction": 0.1, "partition": "iid", "clients": CLIENTS,
    },
    "privacy": {"delta": DELTA, "trust": "local", "noise_scale": "total_norm"},
    "run": {},
}  # fmt: skip
MODELS: dict[str, Config] = {
    "resnet20": {
        "model": {"name": "resnet20", "norm": "batch"},
        "problem": {"name": "neural", "statistics": "training", "loss_examples": 25},
    },
    "conv": {
        "model": {"name": "small_cnn", "channels": [8, 16], "norm": "none", "halving": "stride"},
        "problem": {"name": "neural", "loss_examples": 100, "tile": CLIENTS},  # all at once: a tenth faster
    },
}
MOST_POINTS, SHARE = 30, 0.08  # of a curve, and of a run's time that they may take
NOISES = {
    "stated": "K is the number of rounds",
    "exchanges": "K is the number of exchanges",
}


class Point(NamedTuple):
    """Point of the paper's grid: what sets the runs of the figures apart, but for their seeds."""

    method: str
    p: float
    beta: float
    gamma: float


class Scale(NamedTuple):
    """Scale of the experiments, and how the paper's text is read.

    Attributes:
        name: "paper" or "small".
        model: a key of MODELS.
        examples: number of training images.
        tests: number of test images.
        seeds: the seeds.
        rounds: number of rounds, as the figures count them.
        local_work: a key of WORK.
        local_steps: number of local steps, for the local work "steps".
        noise: a key of NOISES.
        device: what to compute on.
    """

    name: str
    model: str
    examples: int
    tests: int
    seeds: tuple[int, ...]
    rounds: int = ROUNDS
    local_work: str = "minibatch"
    local_steps: int = 8
    noise: str = "stated"
    device: str = "cpu"

    @property
    def work(self) -> str:
        """Local work in words."""
        return WORK[self.local_work].format(steps=self.local_steps, batch=BATCH, passes=self._passes)

    @property
    def exchanges(self) -> int:
        """Number of exchanges between clients and server in a round."""
        return self._passes if self.local_work == "epoch" else 1

    @property
    def visits(self) -> int:
        """Number of images of which a client takes a gradient in a round."""
        per_round = {"minibatch": BATCH, "steps": BATCH * self.local_steps}
        return per_round.get(self.local_work, self.examples // CLIENTS)

    @property
    def _passes(self) -> int:
        return max(1, self.examples // CLIENTS // BATCH)

    @property
    def evaluate_every(self) -> int:
        """Number of exchanges between two points of a curve.

        There are 30 points, or as many as take 8 % of the time: a gradient costs about as much as three evaluations.
        """
        looked_at = CLIENTS * int(MODELS[self.model]["problem"]["loss_examples"])
        point = self.tests + looked_at * (2 if self.model == "resnet20" else 1)  # once for the statistics
        affordable = SHARE * 3 * self.rounds * CLIENTS * self.visits / point
        points = max(1, min(MOST_POINTS, self.rounds, int(affordable)))
        return -(-self.rounds // points) * self.exchanges

    def config(self, p: float) -> Config:
        """Returns what all runs with this p share."""
        data = {} if self.examples == EXAMPLES else {"data.examples": self.examples}
        data |= {} if self.tests == TESTS else {"data.test_examples": self.tests}
        rounds = self.rounds * self.exchanges
        if self.noise == "stated" and self.exchanges > 1:
            noise: dict[str, Any] = {"privacy.noise_std": paper_noise_std(EPSILON, DELTA, p, self.rounds)}
        else:
            noise = {"privacy.epsilon": EPSILON, "privacy.calibration": "paper"}
        run = {"run.device": self.device, "run.rounds": rounds, "run.evaluate_every": self.evaluate_every}
        return changed({**PAPER, **MODELS[self.model]}, {**data, **noise, **run})

    def facts(self) -> dict[str, Any]:
        """Returns scale and reading as data."""
        return {**self._asdict(), "exchanges": self.exchanges, "work": self.work}


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


def _grid(method: str, ps: Iterable[float], betas: Iterable[float] = BETAS) -> list[Point]:
    return [Point(method, p, beta, gamma) for p, beta, gamma in itertools.product(ps, betas, GAMMAS)]


FIGURES: dict[str, list[Point]] = {
    "figure1": _grid(COMPENSATED, (1.0, 0.25)),
    "figure2": _grid(COMPENSATED, (1.0, 0.5, 0.25), betas=(0.01,)),
    "figure3": _grid(COMPENSATED, (1.0,)) + _grid(PLAIN, (1.0,)),
    "figure4": _grid(PLAIN, (1.0,)),
}


def scale(
    name: str = "paper",
    model: str | None = None,
    examples: int | None = None,
    seeds: Sequence[int] | None = None,
    local_work: str | None = None,
    local_steps: int = 8,
    noise: str = "stated",
    rounds: int | None = None,
    device: str = "cpu",
) -> Scale:
    """Returns the paper's own scale, or a small one.

    The paper's is ResNet20 on all of CIFAR-10 with seed 42. The small one is a test of the whole command: a small
    convolutional net on 2,000 images, with three seeds.

    Args:
        name: "paper" or "small".
        model: a key of MODELS; by default "resnet20", for the small scale "conv".
        examples: number of training images.
        seeds: other seeds.
        local_work: a key of WORK; by default "minibatch".
        local_steps: number of local steps, for the local work "steps".
        noise: a key of NOISES.
        rounds: number of rounds; by default 300.
        device: what to compute on.
    """
    known("scale", name, ("paper", "small"))
    small, work = name == "small", local_work or "minibatch"
    model = model or ("conv" if small else "resnet20")
    known("model", model, MODELS)
    known("local work", work, WORK)
    known("noise", noise, NOISES)
    rounds = ROUNDS if rounds is None else at_least_one("rounds", rounds)
    images = at_least_one("examples", (2000 if small else EXAMPLES) if examples is None else examples)
    if not CLIENTS <= images <= EXAMPLES:
        raise UserError(f"examples must lie between {CLIENTS} and {EXAMPLES:,}, not {images:,}.")
    chosen = tuple(seeds or ((42, 43, 44) if small else (42,)))
    found = Scale(
        name, model, images, 2000 if small else TESTS, chosen, rounds, work, at_least_one("local steps", local_steps),
        noise, device,
    )  # fmt: skip
    if rounds * found.exchanges > MOST:
        raise UserError(f"accounting goes up to {MOST:,} rounds, not {rounds * found.exchanges:,}.")
    return found


class Reproduction:
    """Runs of some figures, asked for by point."""

    def __init__(self, scale: Scale, outcomes: Sequence[Outcome]) -> None:
        self.scale = scale
        self.runs: dict[Point, dict[int, Run]] = {}
        for outcome in outcomes:
            if outcome.summary is None:
                raise UserError(f"{outcome.cell.name} failed: {outcome.error}; the same command tries it again.")
            *point, seed = outcome.cell.settings.values()
            self.runs.setdefault(Point(*point), {})[seed] = read_run(outcome.path)

    def final(self, point: Point, seed: int) -> float:
        """Returns the last accuracy, 0 for a model that diverged."""
        run = self.runs[point][seed]
        return 0.0 if run.status == "diverged" else run.final(ACCURACY) or 0.0

    def highest(self, point: Point, seed: int) -> float:
        """Returns the highest accuracy over the rounds."""
        return self.runs[point][seed].best(ACCURACY) or 0.0

    def mean(self, point: Point, of: Callable[[Point, int], float] | None = None) -> float:
        """Returns the mean over the seeds, by default of the last accuracy."""
        return float(np.mean([(of or self.final)(point, seed) for seed in self.scale.seeds]))

    def tuned(self, method: str, p: float, beta: float) -> Point:
        """Returns the point with the γ whose last accuracy is best, over all seeds."""
        return max((Point(method, p, beta, gamma) for gamma in GAMMAS), key=self.mean)

    def group(self, point: Point) -> Group:
        return Group(tuple(self.runs[point].values()), "")

    def transmissions(self, point: Point, seed: int, target: float) -> float:
        """Returns k·p·M at the first round k that was evaluated with at least this accuracy; inf if none was."""
        reached = (k for k, value in self.runs[point][seed].values(ACCURACY) if value >= target)
        return next(reached, math.inf) / self.scale.exchanges * point.p * CLIENTS

    def target(self) -> float:
        """Returns the accuracy to reach in figure 2.

        It is as far below what full participation reaches as the paper's 65 % are below its 70 %.
        """
        return REACHED * self.mean(self.tuned(COMPENSATED, 1.0, 0.01))

    def records(self) -> list[dict[str, Any]]:
        """Returns the curves of every run with its true ε, few enough numbers to keep."""
        return [
            {
                **point._asdict(), "seed": seed, "status": run.status, "true_epsilon": run.epsilon,
                **{name: [[k / self.scale.exchanges, float(f"{value:.4g}")] for k, value in run.values(name)]
                   for name in (ACCURACY, "train_loss")},
            }
            for point, runs in self.runs.items() for seed, run in runs.items()
        ]  # fmt: skip

    def true_epsilons(self, points: Iterable[Point] | None = None) -> tuple[float, float]:
        """Returns the least and the largest ε of these points' runs, or of all."""
        chosen = self.runs if points is None else points
        found = [run.epsilon or math.inf for point in chosen for run in self.runs[point].values()]
        return min(found), max(found)


def cells(figures: Iterable[str], scale: Scale) -> list[Cell]:
    """Returns the runs that these figures need, each once."""
    points = dict.fromkeys(point for figure in figures for point in FIGURES[figure])
    return [_cell(point, seed, scale) for point in points for seed in scale.seeds]


def hours(figures: Iterable[str], scale: Scale, folder: Path, workers: int) -> float:
    """Estimates how long the runs that are missing will take, from some exchanges and an evaluation here and now.

    Raises UserError for what is missing, once and not for every run.
    """
    import torch

    missing = [cell for cell in cells(figures, scale) if not ended(cell, folder)]
    if not missing:
        return 0.0
    problem, algorithm, participation, privacy, run, _, _ = assemble(missing[0].config)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    try:
        rounds = simulate(problem, algorithm, participation, privacy, rounds=run.rounds, on=Threads(1))
        next(rounds)  # the first takes longer
        started, done = time.perf_counter(), 0
        while done < run.rounds - 1 and (done < 2 or time.perf_counter() - started < 1) and done < 50:
            last = next(rounds)
            done += 1
        exchange = (time.perf_counter() - started) / max(1, done)
        started = time.perf_counter()
        problem.evaluate(last.x if done else problem.init(generator(0, "init")))
        point = time.perf_counter() - started
        rounds.close()
    finally:
        torch.set_num_threads(threads)
    every = run.evaluate_every or 1
    seconds = len(missing) * (run.rounds * exchange + math.ceil(run.rounds / every) * point)
    return seconds / min(workers, len(missing)) / 3600


def reproduce(
    figures: Sequence[str], scale: Scale, folder: Path, workers: int, tell: Callable[[News[Outcome]], None]
) -> "Findings":
    """Runs what is missing, draws the figures and checks the claims they carry: all in the folder."""
    from fednormec.sweeps.paper_figures import draw

    asked = cells(figures, scale)
    done = Reproduction(scale, run_all(asked, folder, workers, tell))
    for figure in figures:
        draw(figure, done, folder)
    claims = [check(done) for check, figure in CLAIMS.items() if figure in figures]
    (folder / "claims.md").write_text(markdown(claims, done), encoding="utf-8")
    lines = "".join(to_json(line) + "\n" for line in done.records())
    (folder / "records.jsonl").write_text(lines, encoding="utf-8")
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
    points = _grid(PLAIN, (1.0,))

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


# the runs


def _cell(point: Point, seed: int, scale: Scale) -> Cell:
    local, k = _local(point.gamma, scale)
    steps = {"server_step": point.gamma * k, "alpha": ALPHA / k, "beta": point.beta / k}
    if point.method == COMPENSATED:
        method: dict[str, Any] = {"name": "fed_normec", "server_normalization": False, **steps}
    else:
        method = {"name": "dp_fed_avg_normalized", "bounded": "update", **steps}
    who = {"name": "full"} if point.p == 1 else {"name": "poisson", "p": point.p, "idle": "advance"}
    shared = scale.config(point.p)
    run = {**shared["run"], "seed": seed}
    config: Config = {**shared, "local": local, "method": method, "participation": who, "run": run}
    short = "normec" if point.method == COMPENSATED else "fedavg"
    name = f"{short}_p={point.p:g}_beta={point.beta:g}_gamma={point.gamma:g}_seed={seed}"
    return with_own_noise(Cell(name, {**point._asdict(), "seed": seed}, config), mark=name)


def _local(gamma: float, scale: Scale) -> tuple[dict[str, Any], int]:
    """Returns the local operator, and by how much P_i is larger in the paper's letters than here.

    Here γ is the length of all local steps together: the factor is 1 unless each of them is γ long.
    """
    k = scale.local_steps
    readings: dict[str, tuple[dict[str, Any], int]] = {
        "epoch": ({"name": "sgd", "step": gamma, "steps": 1, "batch_size": BATCH, "order": "passes"}, 1),
        "gradient": ({"name": "gd", "step": gamma}, 1),
        "pass": ({"name": "ig", "step": gamma, "batch_size": BATCH}, 1),
        "minibatch": ({"name": "sgd", "step": gamma, "steps": 1, "batch_size": BATCH}, 1),
        "steps": ({"name": "sgd", "step": gamma * k, "steps": k, "batch_size": BATCH}, k),
    }
    return readings[scale.local_work]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
