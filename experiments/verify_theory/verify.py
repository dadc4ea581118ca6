"""The corrected guarantees hold on hundreds of random problems: what is measured never exceeds what is promised.

Run it: make verify-theory   (or: python experiments/verify_theory/verify.py; --only 17 repeats one case and tells all)

Three promises, each in closed form (`guarantee`) and round by round (`follow`):
  memory    max_i ||P_i(x^k) - v_i^k||, every client, round and seed;
  tracking  E||v^k - mean_i v_i^k||, every round, as a mean over seeds;
  gradient  min over the models that moved of E||grad f(x^k)||, as a mean over seeds.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fednormec as fn
from fednormec.core.local import Moment
from fednormec.core.randomness import generator
from fednormec.engine.planning import planned
from fednormec.theory.corrected import (
    error_after_warmup,
    follow,
    guarantee,
    largest_server_step,
    update_lipschitz,
)
from fednormec.theory.setting import (
    LOCALS,
    Constants,
    Local,
    Noise,
    Settings,
    constants_of,
    round_noise,
)
from fednormec.theory.watch import measure

Kind = Literal["quadratic", "logistic"]
Style = Literal["overshooting", "smooth", "limit", "useful", "beyond"]
CASES, SEEDS = 360, 16
ROUNDING = 1e-9  # relative, the only thing that may exceed a promise about every round
# How many standard errors a mean may exceed its bound by. There are some 200 tests of the first kind and 20,000 of the
# second, from few seeds: at 3 a true bound would be called violated in every third whole run.
ONE_TEST, EVERY_ROUND = 4.0, 6.0


class Group(NamedTuple):
    kind: Kind
    local: Local
    noisy: bool
    sampled: bool

    def __str__(self) -> str:
        noise, p = "noise" if self.noisy else "no noise", "p < 1" if self.sampled else "p = 1"
        return f"{self.kind} | {self.local} | {noise} | {p}"


GROUPS = [Group(*g) for g in product(("quadratic", "logistic"), LOCALS, (False, True), (False, True))]
# alpha far below beta; far above; eta at the lemma's limit; a bound that says something; conditions of the closed form
# broken, where only the round-by-round guarantee speaks
STYLES: tuple[Style, ...] = ("overshooting", "smooth", "limit", "useful", "beyond")


@dataclass(frozen=True)
class Case:
    """A problem, a start and settings. `start_error` as `guarantee` takes it."""

    seed: int
    index: int
    group: Group
    style: Style
    problem: Any
    x0: Tensor
    constants: Constants
    settings: Settings
    local_steps: int
    batch_size: int
    p: float
    privacy: fn.Privacy | None
    start_error: float | None

    @property
    def algorithm(self) -> fn.Algorithm:
        return self.settings.algorithm(self.local_steps, self.batch_size)

    @property
    def participation(self) -> Any:
        return fn.full() if self.p == 1 else fn.poisson(self.p)

    @property
    def noise(self) -> Noise:
        rounds = self.settings.rounds
        mechanism = self.privacy and planned(
            self.problem, self.algorithm, self.participation, self.privacy, rounds
        ).mechanism  # fmt: skip
        return round_noise(self.problem.num_clients, self.problem.dim, self.p, mechanism)

    @property
    def random(self) -> bool:
        return self.group.noisy or self.group.sampled


# The cases. A case depends on (seed, index) alone. Its group is index % 24; what must occur in every group takes turns,
# the rest is drawn.


GAMMAS = dict.fromkeys(STYLES, (1.0, 0.3, 0.05)) | {"useful": (0.03, 0.01), "beyond": (1.0, 2.0, 6.0)}  # times 1/(2L)


def case(index: int, seed: int = 0) -> Case:
    group, turn, rng = GROUPS[index % len(GROUPS)], index // len(GROUPS), generator(seed, "verify case", index)
    again, style = turn // len(STYLES), STYLES[turn % len(STYLES)]
    batch_size = (1, 2, 3)[turn % 3] if group.local == "ig" else 1
    local_steps = (2, 5, 20)[turn % 3] if group.local == "gd" else 1
    p = (0.5, 0.25)[turn % 2] if group.sampled else 1.0
    start = ("zero", "warm-up", "local_updates")[again % (2 if group.noisy else 3)]
    if start == "zero" and style == "useful":
        start = "warm-up"  # from zero the bound cannot be below ||grad f(x^0)||
    problem = _problem(rng, group, style, batch_size)
    x0 = _start(rng, problem, style)
    c = constants_of(problem, x0, group.local)
    gamma = float(rng.choice(GAMMAS[style])) / (2 * c.smoothness)
    at_start = _update_norm(problem, Settings(group.local, gamma, 1, 1, 1, 1).algorithm(local_steps, batch_size), x0)
    known = None if rng.random() < 0.5 else max(at_start, 1e-300)
    moving = int(rng.integers(40, 81) if style != "useful" else rng.integers(100, 141))
    settings = _settings(rng, c, group.local, gamma, style, start, moving, known)
    privacy = _privacy(rng, problem, p, settings.rounds, style, turn + 2 * again) if group.noisy else None
    return Case(seed, index, group, style, problem, x0, c, settings, local_steps, batch_size, p, privacy, known)


def _problem(rng: np.random.Generator, group: Group, style: Style, batch_size: int) -> Any:
    """Alike clients and many of them where the bound is to say something; else anything goes."""
    useful = style == "useful"
    m = int(rng.integers(30, 51) if useful else rng.integers(2, 41))
    d = int(rng.integers(1, 6) if useful else rng.integers(1, 31))
    h, seed = float(rng.choice([0.0, 0.3] if useful else [0.0, 0.3, 1.0, 3.0])), int(rng.integers(2**31))
    parts = batch_size * int(rng.integers(2, 4) if group.local == "ig" else rng.integers(1, 7))
    if group.kind == "quadratic":
        condition = float(rng.choice([1.0, 2.0] if useful else [1.0, 10.0, 100.0]))
        if style == "limit":
            h = float(rng.choice([0.0, 0.3]))  # clients that move alike can meet the lemma with equality
        return fn.random_quadratic(m, d, parts=parts, heterogeneity=h, condition=condition, seed=seed)
    regularizer = float(rng.choice([0.0, 0.01, 0.3][: 2 if useful else 3]))
    if useful or rng.random() < 0.5:
        return _unequal(rng, m, d, batch_size, h, regularizer, unit=useful)
    parts = max(4, 2 * parts)
    return fn.random_logistic(m, d, examples=parts, heterogeneity=h, regularizer=regularizer, seed=seed)


def _unequal(
    rng: np.random.Generator, m: int, d: int, batch_size: int, h: float, regularizer: float, unit: bool
) -> Any:
    """Clients of different sizes, each a multiple of the batch; labels mostly agree with the first feature's sign.
    Features of length 1 keep L small."""
    sizes = batch_size * rng.integers(1, 6, size=m)
    features = [rng.standard_normal((n, d)) + h * rng.standard_normal(d) for n in sizes]
    if unit:
        features = [a / np.linalg.norm(a, axis=1, keepdims=True) for a in features]
    labels = [np.where(3 * a[:, 0] + rng.logistic(size=len(a)) > 0, 1.0, -1.0) for a in features]
    data = [list(map(torch.from_numpy, each)) for each in (features, labels)]
    return fn.Logistic(*data, regularizer=regularizer)


def _start(rng: np.random.Generator, problem: Any, style: Style) -> Tensor:
    """A random start; for the limit, along the most curved direction of a quadratic, where its gradient turns least."""
    normal = torch.from_numpy(rng.standard_normal(problem.dim))
    if not isinstance(problem, fn.Quadratic):
        if style == "useful":
            normal[0] -= 3.0  # the wrong side
        return normal * (1.0 if style == "useful" else float(rng.choice([0.0, 0.5, 2.0])))
    away = normal * float(rng.choice([3.0, 10.0] if style == "useful" else [1.0, 3.0, 10.0]))
    if style != "limit":
        return away
    top = torch.linalg.eigh(problem.curvatures.mean((0, 1))).eigenvectors[:, -1]
    return problem.minimisers.mean((0, 1)) + top * away.norm()


def _settings(
    rng: np.random.Generator, c: Constants, local: Local, gamma: float, style: Style, start: str, moving: int,
    known: float | None,
) -> Settings:  # fmt: skip
    """Chooses R, then beta and alpha for which Corrected Lemma 1 can keep R, then eta up to its limit, then warm-up."""
    Lambda, first = update_lipschitz(local, c.smoothness), c.start_error(local, gamma) if known is None else known
    R = first * (rng.uniform(1, 1.5) if start == "zero" else 10 ** rng.uniform(-1.5, -0.3))
    if style == "useful":  # near the best for 2R + V/(eta n), where eta is about R/(2 Lambda)
        R = max(math.sqrt(c.gap * Lambda / moving), 0.01 * first)
        beta = R * rng.uniform(0.3, 0.9)
        alpha = beta * rng.uniform(0.5, 2.0)
    elif style == "beyond":
        beta = R * 10 ** rng.uniform(-1, 0.5)
        alpha = beta * 10 ** rng.uniform(-2, 1)
    elif style == "smooth" or (style == "limit" and rng.random() < 0.4):
        beta = R * 10 ** rng.uniform(-1, 0.3)
        alpha = beta * 10 ** rng.uniform(0.5, 1.5)
    else:
        share = 10 ** -rng.uniform(1, 3)
        if style == "limit" and start == "zero":  # start where the overshoot is largest: sqrt(alpha beta) - alpha
            R = rng.uniform(1, 1.2) * first / (math.sqrt(share) - share)
            beta = first / (math.sqrt(share) - share)
        else:
            beta = R * rng.uniform(0.3, 0.95)
        alpha = share * beta
    if style == "beyond":
        eta = rng.uniform(0.3, 2) * beta / Lambda
    else:
        limit = largest_server_step(R, alpha, beta, Lambda)
        eta = limit if style in ("limit", "useful") else rng.uniform(0.05, 1) * limit
    warmup = _warmup(first, R, alpha, beta) if start == "warm-up" else 0
    memory: Any = "local_updates" if start == "local_updates" else "zero"
    return Settings(local, gamma, alpha, beta, eta, warmup + moving, warmup, memory)


def _warmup(first: float, R: float, alpha: float, beta: float) -> int:
    """Rounds until the memories' error is R, if 60 will do."""
    return next((k for k in range(1, 60) if error_after_warmup(first, alpha, beta, k) <= R), 60)


def _privacy(rng: np.random.Generator, problem: Any, p: float, rounds: int, style: Style, turn: int) -> fn.Privacy:
    """Noise of a size that its sum over the rounds is between a tenth and ten messages long, shorter where useful."""
    trust = ("central", "local", "secagg")[turn % 3]
    total = 10 ** (rng.uniform(-1.5, -1) if style == "useful" else rng.uniform(-1, 1))
    senders = p * problem.num_clients
    std = total / math.sqrt(rounds * problem.dim) * (senders if trust == "central" else math.sqrt(senders))
    return fn.Privacy(noise_std=std, trust=trust)


def _update_norm(problem: Any, algorithm: fn.Algorithm, x: Tensor) -> float:
    """max_i ||P_i(x)||."""
    rows = algorithm.local.run(problem, x, np.arange(problem.num_clients), Moment(0, 0), None)
    return rows.norm(dim=1).max().item()


# What is measured, what is promised, and the comparison.


class Run(NamedTuple):
    """Figures after k = 0..rounds rounds, one row per seed."""

    memory: np.ndarray
    tracking: np.ndarray
    gradient: np.ndarray


class Promise(NamedTuple):
    """Bounds after k = 0..rounds rounds, nan where nothing is promised.

    gradient[j] is for the least over the first j models that moved; it starts at 0, where it is inf.
    """

    memory: np.ndarray
    tracking: np.ndarray
    gradient: np.ndarray


class Check(NamedTuple):
    """One promise against one run: the largest measured/promised, at which round, and the standard error if a mean."""

    quantity: str
    form: str
    ratio: float
    error: float
    round: int
    holds: bool


def run(case: Case, seeds: int | None = None) -> Run:
    """The real engine, with every seed; one is enough where nothing is random."""
    count = (SEEDS if seeds is None else seeds) if case.random else 1
    return Run(*np.array([list(_figures(case, seed)) for seed in range(count)]).transpose(2, 0, 1))


def _figures(case: Case, seed: int) -> Iterator[tuple[float, ...]]:
    algorithm, s = case.algorithm, case.settings
    seed = int(generator(case.seed, "verify run", case.index, seed).integers(2**62))
    gradient = case.problem.grad(case.x0, np.arange(case.problem.num_clients)).mean(0).norm().item()
    yield 0.0 if s.memory == "local_updates" else _update_norm(case.problem, algorithm, case.x0), 0.0, gradient
    for r in fn.simulate(
        case.problem,
        algorithm,
        case.participation,
        case.privacy,
        rounds=s.rounds,
        seed=seed,
        x0=case.x0,
        on=fn.Threads(1),
    ):
        yield measure(case.problem, algorithm, r, seed)


def promised(case: Case, noise: Noise | None = None) -> dict[str, Promise]:
    """What each form of the guarantee says about a case, if anything; another `noise` shows what a slip would do."""
    s, noise = case.settings, noise or case.noise
    course = follow(case.constants, s, noise, case.start_error)
    found = {"round by round": Promise(course.memory_error, course.tracking_error, course.gradient_norm)}
    whole = guarantee(case.constants, s, noise, case.start_error)
    if not whole.holds:
        assert case.style == "beyond", whole.broken
        return found
    k = np.arange(s.rounds + 1)
    memory = np.where(k < s.warmup_rounds, math.nan, whole.settings["memory_error"])
    tracking = s.beta * np.sqrt(noise.variance * k)
    gradient = np.append(np.full(s.steps, math.inf), whole.bound)
    return {"closed form": Promise(memory, tracking, gradient), **found}


def compare(case: Case, run: Run, promises: dict[str, Promise]) -> list[Check]:
    """Every promise against the run. What is shown of the memory is from the first move on: before it, a promise that
    is met with equality says little."""
    s, checks = case.settings, []
    floor = 1e-12 * (case.constants.start_error(s.local, s.local_step) + s.beta)
    moved = run.gradient.mean(0)[s.warmup_rounds : s.rounds]
    least = np.append(0.0, np.minimum.accumulate(moved))
    for form, promise in promises.items():
        memory = _ratio(run.memory.max(0), promise.memory, floor)
        checks.append(_never_above("memory", form, memory, s.warmup_rounds + 1))
        checks.append(_mean_below("tracking", form, _ratio(run.tracking, promise.tracking, floor)))
        checks.append(_never_above("gradient", form, _ratio(least, promise.gradient, floor)))
    return checks


def _ratio(measured: np.ndarray, bound: np.ndarray, floor: float) -> np.ndarray:
    """measured/bound, less the rounding of what was measured; nothing where nothing was promised."""
    beyond = np.where(measured <= floor, 0.0, measured - floor)  # what is not a number stays so
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isnan(bound) | (beyond == 0), 0.0, beyond / bound)


def _never_above(quantity: str, form: str, ratio: np.ndarray, shown_from: int = 0) -> Check:
    """The worst round is the worst of those shown, unless another one breaks the promise."""
    holds = bool((ratio <= 1 + ROUNDING).all())
    worst = shown_from + int(ratio[shown_from:].argmax()) if holds else int(ratio.argmax())
    return Check(quantity, form, float(ratio[worst]), 0.0, worst, holds)


def _mean_below(quantity: str, form: str, ratio: np.ndarray) -> Check:
    """Rows are seeds. The mean over the rounds is one number per seed and a sharp test; the rounds one by one are
    many tests at once, so each is given more room."""
    ratio = ratio[:, 1:]
    overall, error = ratio.mean(), _standard_error(ratio.mean(1, keepdims=True))[0]
    rounds = ratio.mean(0) - EVERY_ROUND * _standard_error(ratio)
    holds = max(overall - ONE_TEST * error, rounds.max()) <= 1 + ROUNDING
    return Check(quantity, form, float(overall), float(error), int(rounds.argmax()) + 1, bool(holds))


def _standard_error(rows: np.ndarray) -> np.ndarray:
    return rows.std(0, ddof=1) / math.sqrt(len(rows)) if len(rows) > 1 else np.zeros(rows.shape[1])


# The script.


class Outcome(NamedTuple):
    """A case as the report knows it. `says_something`: the round-by-round bound is below ||grad f(x^0)||."""

    index: int
    group: Group
    style: str
    says_something: bool
    checks: list[Check]
    facts: dict[str, Any]

    @property
    def violated(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]


def outcome(index: int, seed: int = 0, seeds: int | None = None) -> Outcome:
    torch.set_num_threads(1)
    it = case(index, seed)
    promises = promised(it)
    says = bool(promises["round by round"].gradient[-1] < it.constants.gradient_norm)
    return Outcome(index, it.group, it.style, says, compare(it, run(it, seeds), promises), facts(it))


def facts(case: Case) -> dict[str, Any]:
    s, c = case.settings, case.constants
    trust = None if case.privacy is None else case.privacy.trust
    return {
        "settings": {n: getattr(s, n) for n in s.__dataclass_fields__},
        "constants": {n: getattr(c, n) for n in c.__dataclass_fields__},
        "local_steps": case.local_steps, "batch_size": case.batch_size, "p": case.p, "trust": trust,
        "noise": case.noise._asdict(), "start_error": case.start_error,
    }  # fmt: skip


def table(outcomes: list[Outcome]) -> str:
    """Markdown, one row per group. The ratios are those to the round-by-round guarantee, the smaller of the two."""
    lines = [
        "| problem | local | noise | participation | cases | bound says something | violations | memory | tracking "
        "| gradient |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for group in GROUPS:
        if rows := [o for o in outcomes if o.group == group]:
            lines.append(f"| {group} | {_cells(rows)} |")
    lines.append(f"| all |  |  |  | {_cells(outcomes)} |")
    return "\n".join(lines)


def _cells(rows: list[Outcome]) -> str:
    worst = [max((c for o in rows for c in _sharp(o, q)), key=lambda c: c.ratio) for q in ("memory", "tracking")]
    gradient = max((c.ratio for o in rows if o.says_something for c in _sharp(o, "gradient")), default=math.nan)
    tracking = f"{worst[1].ratio:.2f} ± {worst[1].error:.2f}" if worst[1].ratio > 0 else "–"
    numbers = [len(rows), sum(o.says_something for o in rows), sum(bool(o.violated) for o in rows)]
    last = "–" if math.isnan(gradient) else f"{gradient:.2f}"
    return " | ".join([*map(str, numbers), f"{worst[0].ratio:.4f}", tracking, last])


def _sharp(o: Outcome, quantity: str) -> list[Check]:
    return [c for c in o.checks if c.form == "round by round" and c.quantity == quantity]


def _all(indices: list[int], seed: int, seeds: int | None, processes: int) -> list[Outcome]:
    """In several processes, each with one arithmetic thread; a line of progress as they come in."""
    done = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        for each in pool.map(outcome, indices, [seed] * len(indices), [seeds] * len(indices)):
            done.append(each)
            if sys.stderr.isatty() or len(done) % 24 == 0:
                end = "" if sys.stderr.isatty() and len(done) < len(indices) else "\n"
                bad = sum(bool(o.violated) for o in done)
                print(f"\r{len(done)} of {len(indices)} cases, {bad} violated", end=end, file=sys.stderr, flush=True)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=CASES, help=f"how many, spread over the groups (default {CASES})")
    parser.add_argument("--seed", type=int, default=0, help="of the cases; another seed gives other problems")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of the runs of a random case (default {SEEDS})")
    parser.add_argument("--only", type=int, metavar="INDEX", help="this case alone, with all its figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="store every case's figures")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    if min(chosen.cases, chosen.seeds - 1, chosen.processes, 1 if chosen.only is None else chosen.only + 1) < 1:
        parser.error("--cases and --processes are at least 1, --seeds at least 2, and INDEX starts at 0")
    began = time.monotonic()
    if chosen.only is None:
        outcomes = _all(list(range(chosen.cases)), chosen.seed, chosen.seeds, chosen.processes)
    else:
        outcomes = [outcome(chosen.only, chosen.seed, chosen.seeds)]
    if chosen.json is not None:
        stored = [{**o._asdict(), "group": str(o.group), "checks": [c._asdict() for c in o.checks]} for o in outcomes]
        chosen.json.write_text(json.dumps(stored, indent=1) + "\n")
    if chosen.only is not None:
        print(json.dumps(outcomes[0].facts, indent=1))
        print("\n".join(map(str, outcomes[0].checks)))
    print(table(outcomes))
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    violated = [o for o in outcomes if o.violated]
    for o in violated:
        print(f"VIOLATED: case {o.index} ({o.group}; repeat it with --seed {chosen.seed} --only {o.index})")
        print("\n".join(f"  {check}" for check in o.violated))
    sys.exit(1 if violated else 0)


if __name__ == "__main__":
    main()
