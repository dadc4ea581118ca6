"""Claim: silos that protect each of their records learn more together than alone, at the same ε.

Each silo guards its own records: its local steps are DP-SGD (privacy.unit = "record"), and whatever leaves it is
private for each record at the same ε, whoever sees it. All rows of a person are one record. Compared are federated
methods, each silo alone, and all records in one silo, which no federation has: what is lost by the walls.

Run it: python experiments/hospitals/hospital_silos.py             (some minutes; goes on where it was stopped)
        python experiments/hospitals/hospital_silos.py --smoke     (the sets of scikit-learn alone)
        python experiments/hospitals/hospital_silos.py --choose    (how the settings below were chosen)
        python experiments/hospitals/hospital_silos.py --show      (tables and pictures of what results.json has)
Needs: fednormec data fetch chem97
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product, repeat, zip_longest
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from silo_data import REAL, SETS, SMOKE, TUNED, Set

import fednormec as fn
from fednormec.core.local import LocalUpdate
from fednormec.data import Examples, hold_out
from fednormec.drawing import empty_figure, look, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
EPSILONS = (0.5, 1.0, 3.0, 8.0, None)
DELTA = 1e-5
SEEDS = range(10)
CHOOSING = range(100, 105)  # seeds on which settings were chosen, on the sets of scikit-learn alone
ASIDE = 0.3  # share of a silo's persons that is held out


class Settings(NamedTuple):
    """Settings of a method, for every ε.

    Attributes:
        step: sum of the local steps in a round.
        steps: number of local steps in a round.
        rounds: number of rounds.
        rate: probability with which a record is in a batch.
        tau: largest norm of a record's gradient.
        server_step: step of Fed-α-NormEC's server.
        beta: factor with which a message of Fed-α-NormEC enters the memories.
        pull: strength of the pull to the mean of MR-MTL.
    """

    step: float
    steps: int = 2
    rounds: int = 20
    rate: float = 0.25
    tau: float = 0.25
    server_step: float = 32.0
    beta: float = 0.1
    pull: float = 0.1

    @property
    def local(self) -> LocalUpdate:
        """Local steps of every method."""
        return fn.dp_sgd(self.step, self.steps, rate=self.rate, tau=self.tau)


POOLED = "pooled"  # one silo with all records: no federation
EXACT, CONSTANT = "exact", "constant"  # without ε: the best linear model of all records; each silo's usual answer
SHARED = {  # chosen on breast cancer, and on diabetes
    "accuracy": Settings(16.0, rate=0.5), "RMSE": Settings(4.0, server_step=4.0, pull=0.3),
}  # fmt: skip
OWN_STEP = {  # where a method's own is another
    ("accuracy", "local_training"): 8.0, ("accuracy", "mr_mtl"): 8.0, ("RMSE", "local_training"): 1.0,
    ("RMSE", POOLED): 8.0,
}  # fmt: skip
METHODS: dict[str, Callable[[Settings], fn.Algorithm]] = {
    "fed_avg": lambda s: fn.fed_avg(s.local),
    "scaffold": lambda s: fn.scaffold(s.local),
    "fed_normec": lambda s: fn.fed_normec(
        s.local, beta=s.beta, server_step=s.server_step, server_normalization=False
    ),
    "mr_mtl": lambda s: fn.mr_mtl(s.local, pull=s.pull),
    "local_training": lambda s: fn.local_training(s.local),
    POOLED: lambda s: fn.fed_avg(s.local),
}  # fmt: skip


class Split(NamedTuple):
    """Records of the silos that are trained on, and those that are held out of each."""

    train: list[Examples]
    test: list[Examples]

    @property
    def together(self) -> "Split":
        """All records in one silo; the test stays as it is."""
        ids = [np.array([f"{k}.{one}" for one in own.person]) for k, own in enumerate(self.train)]
        x, y = (np.concatenate([getattr(own, name) for own in self.train]) for name in ("x", "y"))
        return Split([Examples(x, y, self.train[0].kind, np.concatenate(ids))], self.test)


@cache
def split(one: Set, seed: int) -> Split:
    """Returns the silos with whole persons held out."""
    own = one.load(seed)
    pairs = [
        hold_out(np.arange(len(silo)), ASIDE, np.random.default_rng([seed, k]), silo.person)
        for k, silo in enumerate(own)
    ]
    kept, aside = ([silo.take(pair[k]) for silo, pair in zip(own, pairs, strict=True)] for k in (0, 1))
    return Split(kept, aside)


def problem(one: Set, train: Sequence[Examples]) -> fn.Problem:
    """Returns the linear model's problem: logistic where right and wrong are counted, else of least squares."""
    persons = [own.person for own in train if own.person is not None]
    if one.figure == "accuracy":
        x, y = [torch.as_tensor(own.x) for own in train], [torch.as_tensor(2 * own.y - 1) for own in train]
        return fn.Logistic(x, y, persons=persons)
    model = torch.nn.Linear(train[0].x.shape[1], 1, bias=False)  # the last column is 1
    torch.nn.init.zeros_(model.weight)
    return fn.NeuralProblem(model, train, loss="mse", persons=persons)


def chosen(one: Set, name: str) -> Settings:
    """Returns the settings of a method: those that all share, and a step of its own."""
    shared = SHARED[one.figure]
    return shared._replace(step=OWN_STEP.get((one.figure, name), shared.step))


def figure(one: Set, model: np.ndarray, test: Examples) -> float:
    """Returns the accuracy in %, or the root mean square error, of a model on a silo's held-out records."""
    score = test.x @ model
    if one.figure == "accuracy":
        return 100 * float(np.mean((score > 0) == (test.y > 0)))
    return one.unit * float(np.sqrt(np.mean((score - test.y) ** 2)))


def exact(one: Set, train: Examples) -> np.ndarray:
    """Returns the linear model that fits all records best, without privacy, bounds or rounds."""
    if one.figure == "RMSE":
        return np.asarray(np.linalg.lstsq(train.x, train.y)[0])
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped, unused-ignore]

    fitted = LogisticRegression(C=1.0 * len(train), fit_intercept=False, max_iter=10_000).fit(train.x, train.y > 0)
    return np.asarray(fitted.coef_[0])


def constant(own: Examples) -> np.ndarray:
    """Returns the model that says the same of everybody: a silo's mean, by which most are on one side or the other."""
    shift = 0.5 if set(own.y.tolist()) <= {0.0, 1.0} else 0.0
    return np.append(np.zeros(own.x.shape[1] - 1), (own.y.mean() - shift) * np.sqrt(own.x.shape[1]))


def measured(one: Set, name: str, epsilon: float | None, seed: int, settings: Settings | None = None) -> list[float]:
    """Returns the figure of each silo, on its own held-out records."""
    if name in (EXACT, CONSTANT):
        found, many = split(one, seed), name == CONSTANT
        models = [constant(own) for own in found.train] if many else repeat(exact(one, found.together.train[0]))
        return [figure(one, model, test) for model, test in zip(models, found.test, strict=False)]
    settings = chosen(one, name) if settings is None else settings
    dealt, algorithm = split(one, seed), METHODS[name](settings)
    about = problem(one, (dealt.together if name == POOLED else dealt).train)
    privacy = None if epsilon is None else fn.Privacy(epsilon=epsilon, delta=DELTA, unit="record")
    try:
        *_, last = fn.simulate(about, algorithm, None, privacy, rounds=settings.rounds, seed=seed, on=fn.Threads(1))
    except fn.Diverged:
        return [float("nan")] * len(dealt.test)
    own = None if algorithm.own is None else algorithm.own(last.server, last.memory)
    models = [(last.x if own is None else own[k]).numpy() for k in range(len(dealt.test))]
    return [figure(one, model, test) for model, test in zip(models, dealt.test, strict=True)]


def choose(name: str) -> None:
    """Prints what candidates reach on a set, the mean of ε = 1 and no privacy, on seeds of its own.

    FedAvg decides what all share: of the candidates within half a point of the best the one that can move furthest,
    since larger silos have less noise, and a way that is too short ends halfway. Then each method gets the step, and
    what else it has, that suits it best. All have several local steps: with one there is nothing to correct or pull.

    Args:
        name: name of the set, one of scikit-learn's.
    """
    one, steps = SETS[name], (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    worth = 1 if one.figure == "accuracy" else -1

    def score(method: str, settings: Settings) -> float:
        cases = product((1.0, None), CHOOSING)
        return mean(mean(measured(one, method, epsilon, seed, settings)) for epsilon, seed in cases)

    def best(method: str, candidates: Iterable[Settings], slack: float = 0.0) -> Settings:
        found = {settings: score(method, settings) for settings in candidates}
        ranked = sorted(found, key=lambda settings: -worth * found[settings])
        for settings in ranked[:4]:
            print(f"{name}, {method}: {found[settings]:.1f} with {settings}", flush=True)
        near = [settings for settings in ranked if abs(found[settings] - found[ranked[0]]) <= slack]
        furthest = max(near, key=lambda settings: settings.step * settings.tau * settings.rounds)
        print(f"{name}, {method}: taken {found[furthest]:.1f} with {furthest}", flush=True)
        return furthest

    grid = product(steps, (2, 4), (10, 20), (0.1, 0.25, 0.5), (0.25, 0.5, 1.0))
    shared = best("fed_avg", [Settings(*values) for values in grid], slack=0.5)
    for method in ("scaffold", "local_training", POOLED):
        best(method, [shared._replace(step=step) for step in steps])
    server = product((0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0), (0.1, 0.2, 0.5, 1.0))
    best("fed_normec", [shared._replace(server_step=step, beta=beta) for step, beta in server])
    pulls = ((step, pull) for step in steps for pull in (0.01, 0.03, 0.1, 0.3, 1.0) if step * pull < shared.steps)
    best("mr_mtl", [shared._replace(step=step, pull=pull) for step, pull in pulls])


def cases(names: Sequence[str]) -> Iterator[tuple[str, str, float | None]]:
    """Yields set, method and ε of all that is to be measured."""
    for name in names:
        yield from ((name, *case) for case in product(METHODS, EPSILONS))
        yield from ((name, EXACT, None), (name, CONSTANT, None))


def measure(names: Sequence[str]) -> None:
    """Computes what results.json lacks: ten runs for each set, method and ε."""
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, method, epsilon in cases(names):
        own = done.setdefault(name, {}).setdefault(method, {})
        if (key := shown(epsilon)) not in own:
            values = np.array([measured(SETS[name], method, epsilon, seed) for seed in SEEDS])  # (seeds, silos)
            own[key] = {
                "seeds": values.mean(1).round(3).tolist(), "silos": values.mean(0).round(2).tolist(),
                "spread": values.std(0, ddof=1).round(2).tolist(),
            }  # fmt: skip
            RESULTS.write_text(json.dumps(done) + "\n")
            print(f"{name}, {method}, ε {key}: {values.mean():.1f}", flush=True)


def shown(epsilon: float | None) -> str:
    """Returns ε as results.json and the tables call it."""
    return "none" if epsilon is None else f"{epsilon:g}"


def tables() -> str:
    """Returns what results.json has, for the README: the mean over silos, its mean and deviation over the seeds."""
    done, parts = json.loads(RESULTS.read_text()), []
    for name, one in ((name, SETS[name]) for name in SETS if name in done):
        better = "higher" if one.figure == "accuracy" else "lower"
        rows = [f"**{name}** ({one.about}; {one.silos}): {one.figure}, {better} is better.", ""]
        heads = " | ".join("no privacy" if epsilon is None else f"ε = {epsilon:g}" for epsilon in EPSILONS)
        rows += [f"| | {heads} |", "|---" * 6 + "|"]
        for method in (*METHODS, EXACT, CONSTANT):
            own = [done[name].get(method, {}).get(shown(epsilon)) for epsilon in EPSILONS]
            cells = ["" if c is None else f"{mean(c['seeds']):.1f} ± {stdev(c['seeds']):.1f}" for c in own]
            rows.append(f"| `{method}` | " + " | ".join(cells) + " |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def draw() -> None:
    """Draws what results.json has: the mean over silos, and each silo (of many, fifths of them by size)."""
    done = {name: own for name, own in json.loads(RESULTS.read_text()).items() if name not in SMOKE}
    figure = empty_figure((3.2 * len(done), 3.4))
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(done))), done, strict=True):
        runs = {method: [done[name][method][shown(e)]["seeds"] for e in EPSILONS] for method in METHODS}
        _lines(axes, {m: ([mean(one) for one in own], [stdev(one) for one in own]) for m, own in runs.items()})
        axes.set(title=name, ylabel=SETS[name].figure)
    _finish(figure, "accuracy.png")
    panels = [panel for name in done if name in ("breast cancer", *REAL) for panel in _panels(name, done[name])]
    figure = empty_figure((12, 8))
    for axes, (title, own) in zip_longest(figure.subplots(-(-len(panels) // 6), 6).flat, panels, fillvalue=("", None)):
        if own is None:
            axes.remove()
            continue
        _lines(axes, own)
        axes.set_title(title, fontsize=9)
    _finish(figure, "silos.png")


Lines = dict[str, tuple[list[float], list[float]]]  # by method: means and deviations, for each ε


def _panels(name: str, done: dict[str, Any]) -> Iterator[tuple[str, Lines]]:
    """Yields title and lines of each silo of a set; of more than ten, of each fifth by size."""
    sizes = [len(set(own.person.tolist())) for own in SETS[name].load(0) if own.person is not None]
    groups = np.array_split(np.argsort(sizes), 5) if len(sizes) > 10 else np.argsort(sizes)[:, None]
    for group in groups:
        low, high = sizes[group[0]], sizes[group[-1]]
        lines: Lines = {
            method: tuple([float(np.mean(np.array(done[method][shown(e)][key])[group])) for e in EPSILONS]
                          for key in ("silos", "spread"))
            for method in METHODS
        }  # type: ignore[misc]  # fmt: skip
        yield f"{name}, {low}" + (f" to {high}" if high > low else ""), lines


def _lines(axes: "Axes", own: Lines) -> None:
    for place, (method, (means, deviations)) in enumerate(own.items()):
        colour, dash, marker = look(place)
        at = np.arange(len(EPSILONS)) + 0.06 * (place - len(own) / 2)
        axes.errorbar(at, means, deviations, label=method, color=colour, ls=dash, marker=marker, ms=3, lw=1, capsize=2)
    axes.set_xticks(range(len(EPSILONS)), ["none" if e is None else f"{e:g}" for e in EPSILONS])
    axes.set_xlabel("ε")
    axes.grid(alpha=0.3)


def _finish(figure: "Figure", name: str) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), edgecolor="none")
    save_figure(figure, HERE / name)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("smoke", "choose", "show"):
        asked.add_argument(f"--{option}", action="store_true")
    given = asked.parse_args()
    if given.choose:
        for name in TUNED:
            choose(name)
    else:
        if not given.show:
            measure((*TUNED, *SMOKE, *(() if given.smoke else REAL)))
        draw()
        print(tables())
