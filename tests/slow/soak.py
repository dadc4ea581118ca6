"""A long run: neither memory nor open files grow, and the metrics can be read while they are written.

    python tests/slow/soak.py [ROUNDS]

A private run on real data with all that a run writes: ledger, metrics, checkpoints four times a second. Prints a JSON
line and exits with 1 if something grew. `make soak` runs 20,000 rounds, some minutes.
"""

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import fednormec as fn
from fednormec.config.schema import read
from fednormec.config.settings import QUICKSTART
from fednormec.runs.runner import perform

ALLOWED_MB = 16.0  # between a tenth of the rounds and the end: the accountant's arrays grow with the root of the rounds


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Reader(threading.Thread):
    """Reads what is new in the metrics again and again, as a dashboard would: up to the last line end."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path, self.trouble, self.stop = path, list[str](), threading.Event()
        self.reads, self.lines, self.cut_off = 0, 0, 0

    def run(self) -> None:
        at = 0
        while not self.stop.wait(0.05):
            if not self.path.exists():
                continue
            with open(self.path, "rb") as file:
                file.seek(at)
                whole, end, cut = file.read().rpartition(b"\n")
            self.reads, self.cut_off = self.reads + 1, self.cut_off + bool(cut)
            at += len(whole + end)
            for line in whole.split(b"\n") if end else []:
                try:
                    self.lines += 1
                    assert json.loads(line)["round"] == self.lines
                except (ValueError, AssertionError):
                    self.trouble.append(repr(line))
                    return


def soak(rounds: int, out: Path) -> dict[str, Any]:
    asked = [f"run.rounds={rounds}", "data.clients=50", "model.name=linear", "local.steps=1",
             "run.checkpoint_seconds=0.25", "run.evaluate_every=500"]  # fmt: skip
    watched: list[tuple[int, float, int]] = []

    def watch(r: fn.Round, record: fn.Record) -> None:
        number = r.number
        if number % max(1, rounds // 20) == 0:
            watched.append((number, round(resident_mb(), 1), open_files()))
            print(f"round {number}: {watched[-1][1]} MB, {watched[-1][2]} files", file=sys.stderr, flush=True)

    reader, began = Reader(out / "metrics.jsonl"), time.monotonic()
    reader.start()
    summary = perform(read(QUICKSTART, asked), "soak", out, quiet=True, observers=[fn.Observer(watch)])
    reader.stop.set()
    reader.join()
    settled = [row for row in watched if row[0] >= rounds // 10]
    return {
        "rounds": summary["rounds"],
        "seconds": round(time.monotonic() - began),
        "mb": [row[1] for row in watched],
        "grew_mb": round(settled[-1][1] - settled[0][1], 1),
        "files": sorted({row[2] for row in settled}),
        "reads": reader.reads,
        "reads_that_ended_within_a_line": reader.cut_off,
        "lines_that_were_wrong": reader.trouble,
        "ledger": fn.read_ledger(out / "ledger.jsonl").rounds,
    }


def is_sound(found: dict[str, Any]) -> bool:
    """Files: one more may be open for a moment, where a checkpoint is written."""
    return (
        found["grew_mb"] <= ALLOWED_MB
        and found["files"][-1] - found["files"][0] <= 1
        and not found["lines_that_were_wrong"]
        and found["ledger"] == found["rounds"]
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        done = soak(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000, Path(folder) / "out")
    print(json.dumps(done))
    sys.exit(0 if is_sound(done) else 1)
