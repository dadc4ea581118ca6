"""Runs that are killed: at random moments, and before and after every call that changes a file.

    python tests/slow/crashes.py FOLDER random [KILLS]
    python tests/slow/crashes.py FOLDER calls

Each child is forked from here, so that a death costs no import of torch, and is killed by SIGKILL: from here by its
process id, or by itself in the middle of what it does. Afterwards the same folder is gone on with and compared with one
that was never interrupted. Prints a JSON line: kills, those that left a checkpoint half written, folders compared, and
those that differ, of which there must be none.
"""

import contextlib
import gc
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting  # noqa: F401 (what runs import late is imported here, once for all children)
import sklearn.datasets  # noqa: F401
import torch.fx.experimental.symbolic_shapes  # noqa: F401

import fednormec.theory.answer  # noqa: F401
from fednormec.config.schema import Config
from fednormec.runs.runner import go_on, perform

SAME = ("config.toml", "metrics.jsonl", "ledger.jsonl", "model.safetensors", "privacy.txt", "privacy.json")
KEPT = {"keep_checkpoint": True, "checkpoint_rounds": 1}
PRIVATE: Config = {
    "data": {"clients": 60},
    "model": {"name": "mlp", "hidden": [256]},
    "method": {"name": "fed_normec", "beta": 0.1},
    "local": {"name": "gd", "step": 0.1, "steps": 2},
    "participation": {"name": "poisson", "p": 0.5},
    "privacy": {"noise_std": 2.0},
    "run": {"rounds": 20, "evaluate_every": 3, **KEPT},
}
MAPPED: Config = {
    "data": {"clients": 60},
    "method": {"name": "clip21_sgd2m"},
    "participation": {"name": "poisson", "p": 0.5, "idle": "sleep"},
    "privacy": {"epsilon": 50.0, "trust": "local"},
    "run": {"rounds": 20, "memories": "file", **KEPT},
}
NOT_PRIVATE: Config = {
    "problem": {"name": "quadratic"},
    "method": {"name": "scaffold"},
    "local": {"name": "ig", "step": 0.01, "order": "reshuffle"},
    "run": {"rounds": 200, "memories": "file", "checkpoint_rounds": 7, "keep_checkpoint": True},
}
SCENARIOS = {"private": PRIVATE, "mapped": MAPPED, "not-private": NOT_PRIVATE}
TINY: Config = MAPPED | {
    "problem": {"name": "quadratic", "clients": 6, "dim": 5},
    "run": {"rounds": 4, "memories": "file", "evaluate_every": 2, **KEPT},
}
del TINY["data"]


def run(config: Config, out: Path) -> None:
    """Begins a run, or goes on with it. What was killed before it knew what it is for holds nothing to go on with."""
    if (out / "config.toml").exists():
        go_on(out, quiet=True)
    else:
        shutil.rmtree(out, ignore_errors=True)
        perform(config, "crash", out, quiet=True)


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work()
        os._exit(0)
    except BaseException:
        os._exit(1)


def ended(pid: int) -> str:
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return "killed" if os.WTERMSIG(status) == signal.SIGKILL else "signal"
    return "done" if os.WEXITSTATUS(status) == 0 else "failed"


def half_written(out: Path) -> set[tuple[str, int]]:
    """Checkpoints that did not come to their end, by name and number of the file."""
    found = set()
    for path in out.glob("checkpoint-*.part"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """What must not depend on interruptions; the kept checkpoint has the server's and all clients' memories."""
    kept = [path.name for path in folder.glob("checkpoint-*")]
    assert len(kept) == 1 and not list(folder.glob("*.part")), f"{folder}: nothing half written may stay"
    assert json.loads((folder / "environment.json").read_text())["versions"]
    return {name: (folder / name).read_bytes() for name in (*SAME, *kept) if (folder / name).exists()}


def compare(done: dict[str, Any], whole: Path, killed: Path) -> None:
    done["compared"] += 1
    if contents(killed) != contents(whole):
        done["different"].append(killed.name)


def nothing_done() -> dict[str, Any]:
    return {"kills": 0, "during_checkpoint": 0, "compared": 0, "different": []}


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.0002)


def rounds_in(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for_some_moment(out: Path, rounds: int, seconds: float, rng: random.Random) -> None:
    """Anywhere in what is left of a run that takes so long: when some round is done, and a part of the next."""
    done = rounds_in(out)
    last = rng.randint(done, rounds)
    wait_for(lambda: rounds_in(out) >= last or (out / "summary.json").exists(), 60)
    time.sleep(rng.uniform(0, seconds / (4 if last == done else rounds)))  # it takes a while to begin


def at_random(folder: Path, kills: int) -> dict[str, Any]:
    """Kills until there were so many, a dozen to a folder, at moments all over a run's life and within checkpoints."""
    rng, names = random.Random(), list(SCENARIOS)
    done, seconds = nothing_done(), {}
    for name in names:
        began = time.perf_counter()
        assert ended(forked(lambda name=name: run(SCENARIOS[name], folder / f"{name}-whole"))) == "done"
        seconds[name] = time.perf_counter() - began
    number = 0
    while done["kills"] < kills:
        name, out, own = names[number % len(names)], folder / f"killed-{number}", 0
        number += 1
        while True:
            before = half_written(out)
            pid = forked(lambda: run(SCENARIOS[name], out))  # noqa: B023 (waited for at once)
            if own < 12:
                wait_for_some_moment(out, SCENARIOS[name]["run"]["rounds"], seconds[name], rng)
                if own % 3 == 2:  # some in the middle of a checkpoint, which takes no more than a few ms
                    wait_for(lambda: bool(half_written(out) - before), 0.5)  # noqa: B023
                os.kill(pid, signal.SIGKILL)
            how = ended(pid)
            if how != "killed":
                break
            own, done["kills"] = own + 1, done["kills"] + 1
            done["during_checkpoint"] += bool(half_written(out) - before)
        assert how == "done", f"{out} could not be gone on with"
        compare(done, folder / f"{name}-whole", out)
    return done


def at_every_call(folder: Path) -> dict[str, Any]:
    """Kills before and after each call that changes a file; a write is also left half done."""
    done = nothing_done()
    assert ended(forked(lambda: run(TINY, folder / "whole"))) == "done"
    call = 0
    while True:
        for when in ("before", "after"):
            out = folder / f"{when}-{call}"
            how = ended(forked(lambda: dying(lambda: run(TINY, out), call, when)))  # noqa: B023 (waited for at once)
            if how == "done":
                return done
            assert how == "killed"
            done["kills"] += 1
            done["during_checkpoint"] += bool(half_written(out))
            assert ended(forked(lambda: run(TINY, out))) == "done", f"{out} could not be gone on with"  # noqa: B023
            compare(done, folder / "whole", out)
        call += 1


def dying(work: Callable[[], None], last: int, when: str) -> None:
    """Works until call number `last` of those that change files, and dies before or after it."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls - 1 < last:
                return real(*arguments, **named)
            if when == "after":
                real(*arguments, **named)
            elif real is write:
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    write = os.write
    for name in ("write", "fsync", "replace", "ftruncate", "unlink", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    work()


if __name__ == "__main__":
    gc.freeze()  # what nobody looks at need not be copied for each child
    where, mode = Path(sys.argv[1]), sys.argv[2]
    found = at_every_call(where) if mode == "calls" else at_random(where, int((sys.argv[3:] or ["36"])[0]))
    print(json.dumps(found))
    sys.exit(1 if found["different"] else 0)
