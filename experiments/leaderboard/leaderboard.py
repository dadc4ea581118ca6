"""Claim: which method is best at a true ε, and where, is measured. Each is tuned with the same number of runs, at every
ε by itself, and reported on seeds that did not tune.

A row is a task, an ε, a share p of clients per round and a method. Its tuning has 10 settings spread over the method's
space, then 3 near the best of these and 3 nearer to the best so far, all on one seed; the best of all by the last test
accuracy then runs on three others. The space has the bound, both steps, one or five local steps, the server's optimiser
and a schedule. An average over the last quarter is evaluated beside the last model, and tuning may prefer it. ε is that
of one run, client level, central, at δ = 1e-5; no ε covers the tuning, and the test set chose the settings, in every
row alike. Runs on the three seeds also measure why: how much of the server's direction is noise, how far it is off
without noise, and how far behind the clients' memories are. A study then tunes every optimiser of the server by itself,
with 20, 60 and 240 rounds.

Run it from the root of the project; it goes on where it was stopped:
        python experiments/leaderboard/leaderboard.py              (--task, --epsilon and --p choose some)
        python experiments/leaderboard/leaderboard.py --page       (results.md and the picture, from what is done)
        python experiments/leaderboard/leaderboard.py --quick      (a minute; digits)
Needs: fednormec data fetch fashion_mnist, cifar10 and movielens; pip install 'fednormec[vision]'
"""

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import heads
import numpy as np
from entries import (
    DRAWN,
    EPSILONS,
    FAMILIES,
    REFINED,
    SEEDS,
    SHARES,
    STUDY,
    TASKS,
    TUNING_SEED,
    Kind,
    Row,
    Settings,
    config,
    draw,
    near,
    rows_of,
    short,
    task_of,
)
from standings import Held, page, picture, table

RESULTS = Path(__file__).parent / "results"
Job = tuple[Row, Settings, int]  # and a seed


@lru_cache(maxsize=4)
def clients(name: str, seed: int) -> Any:
    """The clients of a task, dealt out by this seed, as heads or bags; made once by every worker."""
    from fednormec.config.assemble import assemble, extractor_of, rules
    from fednormec.config.datasets import federated_data
    from fednormec.config.own import Loading
    from fednormec.config.usual import with_usual
    from fednormec.data.features import with_features

    task = task_of(name)
    asked = with_usual({**task.sections, "local": {"step": 1.0}, "run": {"seed": seed}})
    resolved, load = rules(asked).config, Loading(Path())
    data = federated_data(asked, resolved, seed, load).data
    if task.inputs == "tokens":
        return heads.bags(data, assemble(asked, data).problem)
    with_them = with_features(data, extractor_of(asked, resolved, load)) if "features" in asked else data
    return heads.heads(with_them, task.width)


def run(job: Job) -> tuple[Job, dict[str, Any]]:
    """One run: how accurate the last model and the average are; why, too, if its seed is one of the three."""
    import torch

    import fednormec as fn
    from fednormec.config.assemble import rules

    torch.set_num_threads(1)
    row, settings, seed = job
    task, started, found = task_of(row.task), time.perf_counter(), clients(row.task, seed)
    asked = rules(config(task, row, settings, seed))
    family, problem = FAMILIES[row.family], found.problem
    steps = settings["local_steps"] if "local" in family.sections(settings) else 1
    algorithm = asked.algorithm._replace(local=found.gd(asked.algorithm.local.step, steps))
    assert (problem.dim, problem.num_clients) == (task.dim, task.clients), f"{row.task} is not as entries.py says"
    why = Why(algorithm, problem, family.kind)
    done = fn.train(
        problem, why.algorithm, asked.participation, asked.privacy, rounds=row.rounds, seed=seed,
        x0=torch.zeros(problem.dim), workers=1, evaluate_every=row.rounds,
        observers=[why.observer] if seed != TUNING_SEED else [],
    )  # fmt: skip
    records = [r | r.apart for r in done.history if r.evaluated]
    last = records[-1] if records and done.diverged is None else {}
    assert done.statement is not None
    return job, {
        "row": row.key, "settings": settings, "seed": seed, "last": last.get(task.figure, 0.0),
        "averaged": last.get(f"{task.figure}_averaged", 0.0), "epsilon": done.statement.epsilon,
        "noise_to_signal": short(done.statement.facts["noise_to_signal"]["per_round"]), **why.facts,
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
            "noise": short(noise / self._step.direction.double().norm()),
            "off": short((1 - cosine**2).clamp(0).sqrt()),
            **({"lag": short(behind / lengths)} if lengths else {}),
        }  # fmt: skip


def _moment(number: int) -> Any:
    from fednormec.core.local import Moment

    return Moment(0, number)


class Runs(NamedTuple):
    """Runs that are done, and where those that are missing are computed.

    Attributes:
        held: what is done.
        pool: processes that compute.
        tell: takes a sentence about each run.
    """

    held: Held
    pool: Any
    tell: Callable[[str], None]

    def do(self, jobs: list[Job]) -> None:
        """Computes what is missing, in any order."""
        missing = [job for job in jobs if not self.held.has(*job)]
        for number, (job, found) in enumerate(self.pool.imap_unordered(run, missing), 1):
            self.held.add(job[0], found)
            self.tell(f"{number}/{len(missing)} {found['row']}: {found['last']:.1%} in {found['seconds']} s")

    def compete(self, rows: list[Row], drawn: int, refined: int) -> None:
        """Tunes every row, and runs what was best on the other seeds."""
        tried = {row: [draw(row, number) for number in range(drawn)] for row in rows}
        for stage in (range(refined // 2), range(refined // 2, refined)):
            self._tune(tried)
            for row, own in tried.items():
                best = self._best(row, own)
                own += [near(best, number) for number in stage]
        self._tune(tried)
        winners = {row: self._best(row, own) for row, own in tried.items()}
        self.do([(row, settings, seed) for row, settings in winners.items() for seed in SEEDS])

    def _tune(self, tried: dict[Row, list[Settings]]) -> None:
        self.do([(row, settings, TUNING_SEED) for row, own in tried.items() for settings in own])

    def _best(self, row: Row, among: list[Settings]) -> Settings:
        """The best of these settings alone: so that what is tried next does not depend on where it was stopped."""
        best = self.held.best(row, among)
        assert best is not None
        settings: Settings = best["settings"]
        return settings


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits, few clients, few rounds: a minute")
    parser.add_argument("--page", action="store_true", help="run nothing; write results.md and leaderboard.png")
    parser.add_argument("--task", action="append", choices=[*TASKS], help="only these")
    parser.add_argument("--epsilon", action="append", type=float, help="only these")
    parser.add_argument("--p", action="append", type=float, help="only these")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(given)
    tasks = ["quick"] if asked.quick else asked.task or [*TASKS]
    epsilons, shares = (EPSILONS[-1:], (0.5,)) if asked.quick else (asked.epsilon or EPSILONS, asked.p or SHARES)
    rows = list(rows_of(tasks, epsilons, shares))
    studied = [] if asked.quick or asked.task else STUDY
    held = Held(asked.results)
    if not asked.page:
        drawn, refined = (2, 1) if asked.quick else (DRAWN, REFINED)
        with multiprocessing.get_context("spawn").Pool(asked.workers) as pool:
            runs = Runs(held, pool, lambda said: print(said, file=sys.stderr, flush=True))
            for _, some in itertools.groupby([*rows, *studied], lambda row: (row.file, row.p, row.rounds)):
                runs.compete([*some], drawn, refined)
    print(table(held, rows))
    if not asked.quick:
        everything = list(rows_of(TASKS, EPSILONS, SHARES))
        asked.results.with_suffix(".md").write_text(page(held, everything), encoding="utf-8")
        picture(held, everything, asked.results.with_name("leaderboard.png"))


if __name__ == "__main__":
    main()
