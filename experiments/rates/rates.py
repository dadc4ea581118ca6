"""Claim: with settings that follow the schedules of the paper's corollaries, the corrected guarantee falls as the
corollaries say, like (K+1)^(-1/2), (K+1)^(-1/6) and (K+1)^(-1/8); since the corrected lemma does not need the local
step in the server's step, schedules of our own give local steps (K+1)^(-1/6) too. What runs measure stays below.

Run it: python experiments/rates/rates.py            (a few minutes on two cores)
        python experiments/rates/rates.py --quick    (seconds; few and short runs)
Writes rates.svg and results.json to --out (default: beside this file), prints the table.
"""

import argparse
import json
import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fednormec as fn
from fednormec.theory.corrected import E, guarantee, largest_server_step, update_lipschitz
from fednormec.theory.guarantee import Guarantee
from fednormec.theory.setting import (
    Constants,
    Local,
    Noise,
    Settings,
    constants_of,
    round_noise,
)

CLIENTS, DIM, LOCAL_STEPS = 40, 20, 5
FEWEST = 64  # the least K + 1: from there on beta <= alpha, which is where the corrected lemma is simplest
COLOURS = {"one_step": "#0072B2", "gd": "#D55E00", "ig": "#009E73"}
MARKERS = {"one_step": "o", "gd": "s", "ig": "^"}
NAMES = {"one_step": "one step", "gd": f"local GD, T = {LOCAL_STEPS}", "ig": f"local IG, N = {LOCAL_STEPS}"}


class Powers(NamedTuple):
    """gamma, R, beta and eta fall with these powers of n = K + 1, and the guarantee like n^-rate."""

    title: str
    rate: float
    gamma: float
    R: float
    beta: float
    eta: float


FULL_PARTICIPATION = Powers("one local step, p = 1", 1 / 2, gamma=0, R=1 / 2, beta=0, eta=1 / 2)
ONE_STEP = Powers("one local step, p = 0.25", 1 / 6, gamma=0, R=1 / 6, beta=2 / 3, eta=5 / 6)
PRINTED = Powers("local steps, p = 0.25, printed powers", 1 / 8, gamma=1 / 8, R=1 / 8, beta=5 / 8, eta=7 / 8)
OURS = Powers("local steps, p = 0.25, our powers", 1 / 6, gamma=1 / 6, R=1 / 6, beta=2 / 3, eta=5 / 6)


class Schedule(NamedTuple):
    powers: Powers
    local: Local
    p: float

    @property
    def title(self) -> str:
        return self.powers.title.replace("local steps", NAMES[self.local])


SCHEDULES = [
    Schedule(FULL_PARTICIPATION, "one_step", 1.0),
    Schedule(ONE_STEP, "one_step", 0.25),
    Schedule(PRINTED, "gd", 0.25),
    Schedule(PRINTED, "ig", 0.25),
    Schedule(OURS, "gd", 0.25),
    Schedule(OURS, "ig", 0.25),
]


class Effort(NamedTuple):
    counts: list[int]  # the K + 1 of the runs
    seeds: int  # where p < 1


FULL = Effort([2**j for j in range(6, 14)], 3)
QUICK = Effort([64, 128, 256], 1)


def problem() -> fn.Quadratic:
    """Ill-conditioned: curvatures from 1e-4 to 1 along the axes, each up to twice or half of that in any f_{i,j}.

    Minimisers scatter as widely as the curvature is small, so that every axis has its share of the heterogeneity.
    """
    rng, axes = np.random.default_rng(1), np.geomspace(1e-4, 1, DIM)
    shape = (CLIENTS, LOCAL_STEPS, DIM)
    curvatures = torch.from_numpy(axes * 2.0 ** rng.uniform(-1, 1, shape))
    return fn.Quadratic(torch.diag_embed(curvatures), torch.from_numpy(rng.standard_normal(shape) / np.sqrt(axes)))


def start(of: fn.Quadratic) -> Tensor:
    """From the optimum along every axis until f(x^0) - f^inf is a tenth of f^inf - mean f_i^inf, in equal shares.

    On the way to the optimum the gradient is then about f(x^0) - f^inf over the distance gone, no better than what the
    theorems use. Only the ratio of one tenth matters: the settings below scale with the problem.
    """
    curvatures = of.curvatures.diagonal(dim1=-2, dim2=-1)
    mean = curvatures.mean((0, 1))
    optimum = (curvatures * of.minimisers).mean((0, 1)) / mean
    spread = of.infimum.upper - of.client_infima[0].mean().item()
    return optimum + torch.sqrt(0.2 * spread / of.dim / mean)


def settings(schedule: Schedule, c: Constants, n: int) -> tuple[Settings, float]:
    """The schedule's settings for n = K + 1 rounds, and its R.

    With alpha = D1 the corrected lemma allows eta_hat = D2/(2 Lambda). D2 makes c0 V/eta_hat + 2 D2 sqrt(nu) least, but
    keeps eta_hat where the drift's condition, with sqrt(Delta), wants it; D1 = D2/64^b gives beta <= alpha.
    """
    w, L, lipschitz = schedule.powers, c.smoothness, update_lipschitz(schedule.local, c.smoothness)
    nu, c0 = noise(schedule, c).variance, 1.0 if schedule.local == "one_step" else E
    D2 = math.sqrt(c0 * c.gap * lipschitz / (math.sqrt(nu) if nu > 0 else 1.0))
    if schedule.local != "one_step":
        D2 = min(D2, 2 * lipschitz * math.sqrt(c.spread(schedule.local)) / (2 * math.sqrt(2 * L)))
    D1 = D2 / FEWEST**w.beta
    gamma, R, beta = n**-w.gamma / (2 * L), D1 * n**-w.R, D2 * n**-w.beta
    eta = D2 / (2 * lipschitz) * n**-w.eta
    assert eta <= largest_server_step(R, D1, beta, lipschitz) * (1 + 1e-12)
    return Settings(schedule.local, gamma, D1, beta, eta, n, memory="local_updates"), R


def noise(schedule: Schedule, c: Constants) -> Noise:
    return round_noise(c.clients, c.dim, schedule.p)


def guaranteed(schedule: Schedule, c: Constants, n: int) -> Guarantee:
    """The corrected bound with the schedule's own R, which the lemma keeps; memories start within it, at error 0."""
    s, R = settings(schedule, c, n)
    from_zero = Settings(s.local, s.local_step, s.alpha, s.beta, s.server_step, n)
    return guarantee(c, from_zero, noise(schedule, c), start_error=R)


def measured(schedule: Schedule, n: int, seeds: int) -> float:
    """min over k = 0..K of the mean over seeds of ||grad f(x^k)||."""
    torch.set_num_threads(1)
    q = problem()
    x0, everyone = start(q), np.arange(q.num_clients)
    s, _ = settings(schedule, constants_of(q, x0), n)
    algorithm = s.algorithm(LOCAL_STEPS if s.local == "gd" else 1)
    norms = np.zeros((seeds if schedule.p < 1 else 1, n))
    for seed, row in enumerate(norms):
        row[0] = q.grad(x0, everyone).mean(0).norm().item()
        for r in fn.simulate(q, algorithm, fn.poisson(schedule.p), rounds=n, seed=seed, x0=x0, on=fn.Threads(1)):
            if r.number < n:  # x^{K+1} is not among the models of the theorem
                row[r.number] = q.grad(r.x, everyone).mean(0).norm().item()
    return float(norms.mean(0).min())


def slope(counts: list[int], values: list[float]) -> float:
    """Least squares on logarithmic axes, over the last half of the points."""
    half = len(counts) // 2
    return float(np.polyfit(np.log(counts[half:]), np.log(values[half:]), 1)[0])


def below_start(schedule: Schedule, c: Constants) -> int:
    """The least power of two K + 1 from which the guarantee is below ||grad f(x^0)||."""
    n = FEWEST
    while guaranteed(schedule, c, n).bound >= c.gradient_norm:
        n *= 2
    return n


def follow_all(effort: Effort, jobs: int) -> list[dict[str, Any]]:
    q = problem()
    c = constants_of(q, start(q))
    tasks = [(schedule, n, effort.seeds) for n in effort.counts[::-1] for schedule in SCHEDULES]
    values = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else _Here() as pool:
        for task, value in zip(tasks, pool.map(measured, *zip(*tasks, strict=True)), strict=True):
            values[task[:2]] = value
            print(f"{len(values)}/{len(tasks)} {task[0].title}, K + 1 = {task[1]}: {value:.3g}", file=sys.stderr)
    return [_summary(schedule, c, effort, [values[schedule, n] for n in effort.counts]) for schedule in SCHEDULES]


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """A panel for each set of powers: markers are measured, lines guaranteed."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(dict.fromkeys(r["powers"] for r in results))
    for axes, title in zip(figure.subplots(2, 2, sharex=True).flat, panels, strict=True):
        shown = [r for r in results if r["powers"] == title]
        for r in shown:
            n, name, look = r["counts"], NAMES[r["local"]], {"color": COLOURS[r["local"]]}
            axes.plot(n, r["bound"], **look, label=f"{name}: guaranteed, slope {_signed(r['slope_bound'])}")
            marks = {**look, "marker": MARKERS[r["local"]], "markersize": 9, "fillstyle": "none", "linestyle": "none"}
            axes.plot(n, r["measured"], **marks, label=f"{name}: measured, slope {_signed(r['slope_measured'])}")
        axes.axhline(shown[0]["start"], color="#888888", linestyle=":", label="‖∇f(x⁰)‖")
        low, high = min(min(r["measured"]) for r in shown), max(max(r["bound"]) for r in shown)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", title=f"{title}: rate {_fraction(shown[0]['rate'])}")
        axes.set_ylim(low / 1.5, high * (high / low) ** 0.5)  # with room for the legend
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, edgecolor="none", loc="upper right")
    figure.supxlabel("rounds K + 1 (each point is a run with the settings of its K)")
    figure.supylabel("min over k ≤ K of E‖∇f(xᵏ)‖")
    with matplotlib.rc_context({"svg.hashsalt": "rates"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: the rates and both slopes; what the last run measured and was guaranteed, relative to the start."""
    last = f"K + 1 = {results[0]['counts'][-1]:,}"
    lines = [
        f"| schedule | rate | slope of the guarantee | slope measured | guaranteed at {last} | measured there | "
        "guarantee below the start from K + 1 = |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        ends = f"{r['bound'][-1] / r['start']:.2g} | {r['measured'][-1] / r['start']:.2g}"
        slopes = f"{_fraction(r['rate'])} | {_signed(r['slope_bound'])} | {_signed(r['slope_measured'])}"
        lines.append(f"| {r['schedule']} | {slopes} | {ends} | 2^{math.log2(r['below_start_from']):.0f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small version, in seconds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    options = parser.parse_args(arguments)
    effort, jobs = (QUICK, 1) if options.quick else (FULL, os.cpu_count() or 1)
    results = follow_all(effort, jobs)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(results, options.out / "rates.svg")
    about = {"seeds": effort.seeds, "clients": CLIENTS, "dim": DIM}
    (options.out / "results.json").write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    print(table(results))
    return results


def _summary(schedule: Schedule, c: Constants, effort: Effort, values: list[float]) -> dict[str, Any]:
    counts = effort.counts
    bounds = [guaranteed(schedule, c, n) for n in counts]
    least = [guarantee(c, settings(schedule, c, n)[0], noise(schedule, c)).bound for n in counts]
    return {
        "schedule": schedule.title,
        "powers": schedule.powers.title,
        "local": schedule.local,
        "p": schedule.p,
        "rate": schedule.powers.rate,
        "counts": counts,
        "measured": values,
        "bound": [g.bound for g in bounds],
        "bound_holds": all(g.holds for g in bounds),
        "bound_with_least_memory_error": least,
        "last_terms": bounds[-1].terms,
        "slope_measured": slope(counts, values),
        "slope_bound": slope(counts, [g.bound for g in bounds]),
        "slope_bound_with_least_memory_error": slope(counts, least),
        "start": c.gradient_norm,
        "below_start_from": below_start(schedule, c),
        "last_settings": settings(schedule, c, counts[-1])[0].__dict__,
    }


class _Here:
    """Runs in this process, with the face of a pool."""

    map = staticmethod(map)

    def __enter__(self) -> "_Here":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _signed(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _fraction(rate: float) -> str:
    return f"1/{round(1 / rate)}"


if __name__ == "__main__":
    main()
