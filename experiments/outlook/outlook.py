"""Claim: one ratio of noise to signal tells, whatever the method, when a private run can learn nothing.

The ten classes of the digits, dealt out to M clients who all take part. The noise is set so that the noise-to-signal
ratio of a round, r = σ √d/M, divided by the root of the number of rounds K takes one of nine values. Each method gets
three server steps, and the best accuracy on the test set counts, so that what fails fails with every step. Chance is
10 %. The best of three is chosen on the test set and no ε is stated: this is about noise, not about privacy.

Run it: python experiments/outlook/outlook.py              (some minutes; goes on where it was stopped)
        python experiments/outlook/outlook.py --table      (what results.json says, for the README)
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from statistics import median

import numpy as np

import fednormec as fn
from fednormec.data.partition import iid
from fednormec.data.sources import digits
from fednormec.privacy.outlook import ENOUGH, LITTLE, NOTHING, Outlook

RESULTS = Path(__file__).parent / "results.json"
RATIOS = (0.03, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # r/√K
STEPS = (0.05, 0.2, 0.8)
SETTINGS = [  # widths of hidden layers, M, K
    ((), 20, 15), ((), 20, 60), ((), 20, 240), ((), 200, 60), ((32,), 20, 60), ((256,), 20, 60),
]  # fmt: skip
LOCAL = fn.gd(step=0.5, steps=5)
METHODS: dict[str, Callable[[float], fn.Algorithm]] = {
    "dp_fed_avg_clip": lambda step: fn.dp_fed_avg_clip(LOCAL, server_step=step),
    "dp_fed_avg_normalized": lambda step: fn.dp_fed_avg_normalized(LOCAL, server_step=step),
    "fed_normec": lambda step: fn.fed_normec(LOCAL, beta=0.1, server_step=step, server_normalization=False),
    "centred": lambda step: fn.centred(LOCAL, server_step=step),
}


def problem(hidden: tuple[int, ...], clients: int) -> fn.NeuralProblem:
    """Returns the digits, 360 of them as a test set, with a net of these hidden widths."""
    examples, order = digits(), np.random.default_rng(0).permutation(1797)
    train, test = examples.take(order[360:]), examples.take(order[:360])
    model = fn.models.mlp((1, 8, 8), 10, hidden) if hidden else fn.models.linear((1, 8, 8), 10)
    fn.models.reset(model, np.random.default_rng(0))
    parts = iid(len(train), clients, np.random.default_rng(0))
    return fn.NeuralProblem(model, [train.take(part) for part in parts], test)


def accuracy(problem: fn.NeuralProblem, method: fn.Algorithm, rounds: int, ratio: float) -> float:
    """Returns the accuracy after the last round, with noise of this r/√K."""
    width = method.message_slots * problem.dim
    noise = fn.Privacy(noise_std=ratio * math.sqrt(rounds) * problem.num_clients / math.sqrt(width))
    try:
        *_, last = fn.simulate(problem, method, privacy=noise, rounds=rounds, evaluate_every=rounds)
    except fn.Diverged:
        return 0.0
    assert last.metrics is not None
    return last.metrics.public["test_accuracy"]


def measure() -> None:
    """Computes what results.json lacks."""
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for hidden, clients, rounds in SETTINGS:
        case = problem(hidden, clients)
        about = f"d = {case.dim:,}, M = {clients}, K = {rounds}"
        for name, ratio in product(METHODS, RATIOS):
            own = done.setdefault(about, {}).setdefault(name, {})
            if str(ratio) not in own:
                own[str(ratio)] = [round(accuracy(case, METHODS[name](step), rounds, ratio), 4) for step in STEPS]
                RESULTS.write_text(json.dumps(done, indent=1) + "\n")
        print(about, flush=True)


def found() -> Iterator[tuple[str, str, float, float]]:
    """Yields setting, method, r/√K and the best accuracy."""
    for about, methods in json.loads(RESULTS.read_text()).items():
        for name, own in methods.items():
            yield from ((about, name, float(ratio), max(accuracies)) for ratio, accuracies in own.items())


def decisive(about: str, name: str, ratio: float) -> float:
    """Returns the ratio by which fednormec warns."""
    d, _, k = (int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", about))
    return Outlook(ratio * math.sqrt(k), d, k, "central", name in ("fed_normec", "centred")).decisive


def bands() -> str:
    """Returns what was reached by the decisive ratio, for the README."""
    edges = (0, ENOUGH, 1, LITTLE, NOTHING, 8, math.inf)
    rows = ["| decisive ratio | number of cases | least | median | largest |", "|---|---|---|---|---|"]
    for low, high in pairwise(edges):
        own = [100 * best for about, name, ratio, best in found() if low <= decisive(about, name, ratio) < high]
        rows.append(f"| {low:g} to {high:g} | {len(own)} | {min(own):.0f} | {median(own):.0f} | {max(own):.0f} |")
    return "\n".join(rows)


def table() -> str:
    """Returns results.json for the README: the best of three server steps, in %."""
    cells = {(about, name, ratio): f"{100 * best:.0f}" for about, name, ratio, best in found()}
    rows = ["| setting | method | " + " | ".join(f"{ratio:g}" for ratio in RATIOS) + " |", "|---" * 11 + "|"]
    for about, name in dict.fromkeys(key[:2] for key in cells):
        own = " | ".join(cells.get((about, name, ratio), "–") for ratio in RATIOS)
        rows.append(f"| {about} | `{name}` | {own} |")
    return "\n".join(rows)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--table", action="store_true")
    if asked.parse_args().table:
        print(bands(), table(), sep="\n\n")
    else:
        measure()
