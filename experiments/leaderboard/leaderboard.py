"""Claim: which method is best at a true ε, and where, is measured. Each is tuned with the same number of runs, at every
ε by itself, and reported on seeds that did not tune.

A row is a task, an ε, a share p of clients per round and a method. Its tuning has 10 settings drawn at random from the
method's space, then 6 near the best of these, all on one seed; the best of all by the last test accuracy then runs on
three others. The space has the bound, both steps, one or five local steps, the server's optimiser and a schedule. An
average over the last quarter is evaluated beside the last model, and tuning may prefer it. ε is that of one run, client
level, central, at δ = 1e-5; no ε covers the tuning, and the test set chose the settings, in every row alike. Runs on
the three seeds also measure why: how much of the server's direction is noise, how far it is off without noise, and how
far behind the clients' memories are.

Run it from the root of the project; it goes on where it was stopped:
        python experiments/leaderboard/leaderboard.py              (--task, --epsilon and --p choose some)
        python experiments/leaderboard/leaderboard.py --table      (what results.jsonl says)
        python experiments/leaderboard/leaderboard.py --quick      (a minute; digits)
Needs: fednormec data fetch fashion_mnist, cifar10 and movielens; pip install 'fednormec[vision]'
"""

import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import heads
import numpy as np

RESULTS = Path(__file__).parent / "results.jsonl"
TUNING_SEED, SEEDS = 0, (1, 2, 3)
DRAWN, REFINED = 10, 6
EPSILONS, SHARES, DELTA = (1.0, 2.0, 8.0), (1.0, 0.1), 1e-5
Config = dict[str, dict[str, Any]]
Settings = dict[str, Any]


class Task(NamedTuple):
    """A federation to train.

    Attributes:
        rounds: number of rounds.
        sections: sections of a config.
        model: a linear one on "features" or on "tokens", which heads.py computes, or "any" other.
        figure: the figure that counts.
        width: number of directions, drawn at random, that features are projected to; None: they stay.
    """

    rounds: int
    sections: Config
    model: Literal["features", "tokens", "any"] = "features"
    figure: str = "test_accuracy"
    width: int | None = None


Kind = Literal["messages", "memories", "server"]


class Family(NamedTuple):
    """A method with the space that it is tuned in.

    Attributes:
        sections: method and local work from the settings that were drawn.
        kind: where the server's direction comes from: the clients' "messages", their "memories" (error feedback), or
            the memory of the "server", against which clients measure (centred feedback).
        bound: range of the bound, τ or β; of an adaptive one its start.
        step: range of the server's step; momentum takes a tenth, and Adam a hundredth.
        local: range of the local step.
    """

    sections: Callable[[Settings], Config]
    kind: Kind
    bound: tuple[float, float] = (0.03, 3.0)
    step: tuple[float, float] = (0.1, 10.0)
    local: tuple[float, float] = (0.3, 10.0)


def on_updates(name: str, bound: str, s: Settings, **more: Any) -> Config:
    local = {"name": "gd", "step": s["local_step"], "steps": s["local_steps"]}
    return {"method": {"name": name, bound: s["bound"], "server_step": s["step"], **more}, "local": local}


def on_gradients(name: str, s: Settings, **more: Any) -> Config:
    return {"method": {"name": name, "tau": s["bound"], "server_step": s["step"], **more}}


FAMILIES: dict[str, Family] = {
    "DP-FedAvg (clip)": Family(partial(on_updates, "dp_fed_avg_clip", "tau"), "messages"),
    "DP-FedAvg (normalised)": Family(partial(on_updates, "dp_fed_avg_normalized", "beta"), "messages"),
    "DP-FedAvg (adaptive clip)": Family(
        partial(on_updates, "dp_fed_avg_adaptive", "start"), "messages", bound=(0.003, 0.3)
    ),
    "DP-SCAFFOLD": Family(partial(on_updates, "dp_scaffold", "tau"), "messages"),
    "Fed-α-NormEC": Family(partial(on_updates, "fed_normec", "beta", server_normalization=False), "memories"),
    "Fed-α-NormEC (adaptive)": Family(
        partial(on_updates, "fed_normec_adaptive", "beta", server_normalization=False), "memories", bound=(0.03, 1.0)
    ),
    "Clip21": Family(partial(on_gradients, "clip21"), "memories"),
    "Clip21-SGD2M": Family(partial(on_gradients, "clip21_sgd2m", client_momentum=0.5), "memories"),
    "EF21-SGDM": Family(partial(on_updates, "ef21_sgdm", "tau", client_momentum=0.5), "memories"),
    "EControl": Family(partial(on_updates, "econtrol", "tau"), "memories"),
    "centred feedback": Family(partial(on_updates, "centred", "beta"), "server"),
}
OPTIMIZERS: dict[str, tuple[float, Settings]] = {
    "sgd": (1.0, {}),
    "momentum": (0.1, {"decay": 0.9}),
    "adam": (0.01, {}),
    "low_pass": (1.0, {}),
    "disk": (1.0, {}),
}

GRADIENTS = {"name": "experiments/private-at-scale/gradients.py:extract", "bins": 6}
FASHION: dict[str, Any] = {"source": "fashion_mnist", "clients": 2000}
CIFAR10: dict[str, Any] = {"source": "cifar10", "clients": 5000}
HISTOGRAMS: Config = {"features": GRADIENTS}
TASKS: dict[str, Task] = {
    "fashion-one-class": Task(60, {"data": FASHION | {"partition": "shards", "shards_per_client": 1}, **HISTOGRAMS}),
    "fashion-iid": Task(60, {"data": FASHION | {"partition": "iid"}, **HISTOGRAMS}),
    "fashion-dirichlet": Task(60, {"data": FASHION | {"partition": "dirichlet", "concentration": 0.3}, **HISTOGRAMS}),
    "movielens": Task(60, {"data": {"source": "movielens"}}, "tokens", "test_auc"),
    "cifar10-features": Task(60, {
        "data": CIFAR10 | {"partition": "shards", "shards_per_client": 2},
        "features": {"name": "efficientnet_lite0", "size": 64},
    }, width=256),
    "cifar10-scratch": Task(60, {
        "data": CIFAR10 | {"partition": "iid"}, "problem": {"name": "neural", "loss_examples": 2},
        "model": {"name": "small_cnn", "channels": [8, 16], "norm": "none", "halving": "stride"},
    }, "any"),
}  # fmt: skip
QUICK = Task(4, {"data": {"source": "digits", "partition": "shards", "shards_per_client": 1, "clients": 60}})


class Row(NamedTuple):
    """A row of the leaderboard."""

    task: str
    epsilon: float
    p: float
    family: str

    @property
    def key(self) -> str:
        return f"{self.task} ε={self.epsilon:g} p={self.p:g} {self.family}"


# settings, drawn and refined


def draw(row: Row, number: int) -> Settings:
    """The settings of one tuning run: of its number alone, so that methods with the same ranges get the same."""
    family, rng = FAMILIES[row.family], np.random.default_rng([TUNING_SEED, number])
    bound, step, within = (_log_uniform(rng, *ends) for ends in (family.bound, family.step, family.local))
    name = str(rng.choice([*OPTIMIZERS]))
    return {
        "bound": bound, "step": step * OPTIMIZERS[name][0], "local_step": within,
        "local_steps": int(rng.choice([1, 5])), "server": name, "schedule": str(rng.choice(["constant", "cooldown"])),
    }  # fmt: skip


def near(best: Settings, number: int) -> Settings:
    """Settings near the best so far: each length within a factor of 2.5, the rest as it is."""
    rng = np.random.default_rng([TUNING_SEED, 1, number])
    lengths = {name: best[name] * _log_uniform(rng, 0.4, 2.5) for name in ("bound", "step", "local_step")}
    return best | lengths


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")


def config(task: Task, row: Row, settings: Settings, seed: int) -> Config:
    """The config of one run; noise and cohorts of no two runs are the same."""
    name = settings["server"]
    server = {"name": name, **OPTIMIZERS[name][1], "schedule": settings["schedule"], "average": "tail"}
    who = {"name": "full"} if row.p == 1 else {"name": "poisson", "p": row.p, "idle": "sleep"}
    mark = hashlib.sha256(json.dumps([row, settings, seed]).encode()).digest()
    return {
        **task.sections, **FAMILIES[row.family].sections(settings), "server": server, "participation": who,
        "privacy": {"epsilon": row.epsilon, "delta": DELTA, "stream": int.from_bytes(mark[:4], "little")},
        "run": {"rounds": task.rounds, "seed": seed},
    }  # fmt: skip


# runs


@lru_cache(maxsize=4)
def clients(name: str, seed: int) -> Any:
    """The clients of a task, dealt out by this seed, as heads, bags or a problem; made once by every worker."""
    from fednormec.config.assemble import assemble, extractor_of, rules
    from fednormec.config.datasets import federated_data
    from fednormec.config.own import Loading
    from fednormec.config.usual import with_usual
    from fednormec.data.features import with_features

    task = _task(name)
    asked = with_usual({**task.sections, "local": {"step": 1.0}, "run": {"seed": seed}})
    if task.model == "any":
        return assemble(asked).problem
    resolved, load = rules(asked).config, Loading(Path())
    data = federated_data(asked, resolved, seed, load).data
    if task.model == "tokens":
        return heads.bags(data, assemble(asked, data).problem)
    with_them = with_features(data, extractor_of(asked, resolved, load)) if "features" in asked else data
    return heads.heads(with_them, task.width)


def run(job: tuple[Row, Settings, int]) -> dict[str, Any]:
    """One run: how accurate the last model and the average are; why, too, if its seed is one of the three."""
    import torch

    import fednormec as fn
    from fednormec.config.assemble import rules

    torch.set_num_threads(1)
    row, settings, seed = job
    task, started, found = _task(row.task), time.perf_counter(), clients(row.task, seed)
    asked = rules(config(task, row, settings, seed))
    algorithm, problem, start = asked.algorithm, found, None
    if task.model != "any":
        steps = settings["local_steps"] if "local" in FAMILIES[row.family].sections(settings) else 1
        algorithm, problem = algorithm._replace(local=found.gd(algorithm.local.step, steps)), found.problem
        start = torch.zeros(problem.dim)
    why = Why(algorithm, problem, FAMILIES[row.family].kind)
    done = fn.train(
        problem, why.algorithm, asked.participation, asked.privacy, rounds=task.rounds, seed=seed, x0=start,
        workers=1, evaluate_every=max(1, task.rounds // 6), observers=[why.observer] if seed != TUNING_SEED else [],
    )  # fmt: skip
    records = [r | r.apart for r in done.history if r.evaluated]
    last = records[-1] if records and done.diverged is None else {}
    assert done.statement is not None
    return {
        "row": row.key, "settings": settings, "seed": seed, "last": last.get(task.figure, 0.0),
        "averaged": last.get(f"{task.figure}_averaged", 0.0),
        "curve": [[r["round"], round(r[task.figure], 4)] for r in records], "epsilon": done.statement.epsilon,
        "noise_to_signal": done.statement.facts["noise_to_signal"]["per_round"], **why.facts,
        "seconds": round(time.perf_counter() - started, 2),
    }  # fmt: skip


class Why:
    """What the server's direction is made of at the end of a run, measured on all clients.

    noise: length of the privacy noise in the direction of the last round, over the length of the direction.
    off: sine of the angle between the direction without that noise and the mean of all clients' updates, at the last
        model. In centred feedback the noise cannot be taken out.
    lag: mean distance between a client's update and its memory, over the mean length of an update.
    """

    def __init__(self, algorithm: Any, problem: Any, kind: Kind) -> None:
        from fednormec import Observer

        self.facts: dict[str, float] = {}
        self._method, self._problem, self._kind = algorithm, problem, kind
        self.algorithm, self.observer = algorithm._replace(server=self._server), Observer(after=self._after)

    def _server(self, server: Any, mean: Any, weights: Any) -> Any:
        self._step = self._method.server(server, mean, weights)
        return self._step

    def _after(self, state: Any, record: Any) -> None:
        if not state.last:
            return
        import torch

        method, problem, server = self._method, self._problem, state.server
        wanted, given, d = torch.zeros(problem.dim).double(), torch.zeros(problem.dim).double(), problem.dim
        behind = lengths = 0.0
        for ids in np.split(np.arange(problem.num_clients), range(problem.tile, problem.num_clients, problem.tile)):
            rows = state.memory[torch.as_tensor(ids)]
            correction = None if method.correction is None else method.correction(server, rows)
            updates = method.local.run(problem, server.x, ids, _moment(state.number), correction)
            wanted += updates.double().sum(0)
            messages, _ = method.client(server, rows, updates)
            given += (rows if self._kind == "memories" else messages)[:, :d].double().sum(0)
            if self._kind == "memories":
                behind += float((updates - rows[:, :d]).norm(dim=1).sum())
                lengths += float(updates.norm(dim=1).sum())
        given = server.memory.double() if self._kind == "server" else given
        noise = torch.as_tensor(self._step.noise).double().expand(d).sum().sqrt()
        cosine = torch.nn.functional.cosine_similarity(given, wanted, dim=0)
        self.facts = {
            "noise": _short(noise / self._step.direction.double().norm()),
            "off": _short((1 - cosine**2).clamp(0).sqrt()),
            **({"lag": _short(behind / lengths)} if lengths else {}),
        }  # fmt: skip


def _moment(number: int) -> Any:
    from fednormec.core.local import Moment

    return Moment(0, number)


def _short(value: Any) -> float:
    return float(f"{float(value):.3g}")


def _task(name: str) -> Task:
    return QUICK if name == "quick" else TASKS[name]


class Held:
    """The runs that are done, in a file that is only ever added to."""

    def __init__(self, path: Path) -> None:
        self._path, self._runs = path, dict[str, dict[str, Any]]()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            self._add(json.loads(line))

    def _add(self, found: dict[str, Any]) -> None:
        self._runs[self._key(found["row"], found["settings"], found["seed"])] = found

    @staticmethod
    def _key(row: str, settings: Settings, seed: int) -> str:
        return json.dumps([row, sorted(settings.items()), seed])

    def of(self, row: Row, seeds: Iterable[int]) -> list[dict[str, Any]]:
        return [run for run in self._runs.values() if run["row"] == row.key and run["seed"] in seeds]

    def do(self, jobs: list[tuple[Row, Settings, int]], pool: Any, tell: Callable[[str], None]) -> None:
        """Runs what is missing, in any order."""
        missing = [job for job in jobs if self._key(job[0].key, job[1], job[2]) not in self._runs]
        for number, found in enumerate(pool.imap_unordered(run, missing), 1):
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found, ensure_ascii=False) + "\n")
            self._add(found)
            tell(f"{number}/{len(missing)} {found['row']}: {found['last']:.1%} in {found['seconds']} s")


def score(found: dict[str, Any]) -> float:
    """What tuning goes by: the better of the last model and the average."""
    return max(float(found["last"]), float(found["averaged"]))


def best_of(held: Held, row: Row) -> dict[str, Any] | None:
    return max(held.of(row, [TUNING_SEED]), key=score, default=None)


def compete(rows: list[Row], held: Held, pool: Any, tell: Callable[[str], None], drawn: int, refined: int) -> None:
    """Tunes every row, and runs what was best on the other seeds."""
    held.do([(row, draw(row, number), TUNING_SEED) for row in rows for number in range(drawn)], pool, tell)
    firsts = {row: _chosen(held, row, [draw(row, number) for number in range(drawn)]) for row in rows}
    held.do([(row, near(firsts[row], n), TUNING_SEED) for row in rows for n in range(refined)], pool, tell)
    winners = [(row, best_of(held, row)) for row in rows]
    held.do([(row, won["settings"], seed) for row, won in winners if won for seed in SEEDS], pool, tell)


def _chosen(held: Held, row: Row, among: list[Settings]) -> Settings:
    """The best of the settings that were drawn, whatever was tried after them."""
    tried = [found for found in held.of(row, [TUNING_SEED]) if found["settings"] in among]
    best: Settings = max(tried, key=score)["settings"]
    return best


# the page


def table(held: Held, rows: list[Row]) -> str:
    """Accuracy of every row on the three seeds; of each column the best, and what is within its spread, in bold."""
    parts = []
    for task, p in itertools.product(dict.fromkeys(row.task for row in rows), sorted({row.p for row in rows})):
        mine = [row for row in rows if (row.task, row.p) == (task, p)]
        found = {row: _figures(held, row) for row in mine}
        epsilons = sorted({row.epsilon for row in mine})
        top = {
            e: max((f for row, f in found.items() if row.epsilon == e and f), key=np.mean, default=[]) for e in epsilons
        }
        lines = [["method", *(f"ε = {e:g}" for e in epsilons), *(f"tuned, ε = {e:g}" for e in epsilons)]]
        lines.append(["---"] * len(lines[0]))
        for family in dict.fromkeys(row.family for row in mine):
            cells = {row.epsilon: row for row in mine if row.family == family}
            lines.append([family, *(_cell(found[cells[e]], top[e]) for e in epsilons),
                          *(_tuned(best_of(held, cells[e])) for e in epsilons)])  # fmt: skip
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"### {task}, p = {p:g}\n\n{body}")
    return "\n\n".join(parts)


def _figures(held: Held, row: Row) -> list[float]:
    """The accuracy on each seed, of the model that tuning preferred: the last or the average."""
    won = best_of(held, row)
    if won is None:
        return []
    which = "averaged" if won["averaged"] > won["last"] else "last"
    return [found[which] for found in held.of(row, SEEDS) if found["settings"] == won["settings"]]


def _cell(values: list[float], best: list[float]) -> str:
    if len(values) < 2:
        return "–"
    text = f"{np.mean(values):.1%} ± {np.std(values, ddof=1):.1%}"
    return f"**{text}**" if np.mean(values) >= np.mean(best) - np.std(best, ddof=1) else text


def _tuned(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    s, averaged = found["settings"], ", average" if found["averaged"] > found["last"] else ""
    return (f"bound {s['bound']:g}, step {s['step']:g}, T = {s['local_steps']}, {s['server']}, {s['schedule']}"
            f"{averaged}")  # fmt: skip


def rows_of(tasks: Iterable[str], epsilons: Iterable[float], shares: Iterable[float]) -> Iterator[Row]:
    for task, epsilon, p in itertools.product(tasks, epsilons, shares):
        yield from (Row(task, epsilon, p, family) for family in FAMILIES)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits, few clients, few rounds: a minute")
    parser.add_argument("--table", action="store_true", help="only say what there is")
    parser.add_argument("--task", action="append", choices=[*TASKS], help="only these")
    parser.add_argument("--epsilon", action="append", type=float, help="only these")
    parser.add_argument("--p", action="append", type=float, help="only these")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(given)
    tasks = ["quick"] if asked.quick else asked.task or [*TASKS]
    epsilons, shares = (EPSILONS[-1:], (0.5,)) if asked.quick else (EPSILONS, SHARES)
    rows = list(rows_of(tasks, asked.epsilon or epsilons, asked.p or shares))
    held = Held(asked.results)
    if not asked.table:
        with multiprocessing.get_context("spawn").Pool(asked.workers) as pool:
            for task in tasks:  # one after another: a worker holds the data of a few
                mine = [row for row in rows if row.task == task]
                drawn, refined = (2, 1) if asked.quick else (DRAWN, REFINED)
                compete(mine, held, pool, lambda said: print(said, file=sys.stderr, flush=True), drawn, refined)
    print(table(held, rows))


if __name__ == "__main__":
    main()
