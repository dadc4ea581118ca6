"""One federated round, side by side: ours, the bare gradients, pfl 0.6. Interleaved in one run; ratios of medians.

Run it: make bench   (or: python benchmarks/rounds.py --peers .venv-peers/bin/python)
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "rounds.json"
# rounds per turn and turns: a turn of each contestant, then the next turn
EFFORT = {"mlp": (10, 12), "resnet20": (2, 8), "small_cnn": (5, 8)}


class Contestant:
    """A process that runs rounds on demand and is idle in between."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name, self.seconds = name, list[float]()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()

    def run(self, rounds: int) -> list[float]:
        assert self.process.stdin is not None
        print(rounds, file=self.process.stdin, flush=True)
        seconds: list[float] = self._answer()["seconds"]
        return seconds

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended early with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(workload: str, peers: str) -> dict[str, Any]:
    ours = [sys.executable, str(HERE / "ours.py"), workload]
    pfl = [peers, "-W", "ignore", str(HERE / "peer_pfl.py"), workload, "--models", str(HERE.parent / "src")]
    contestants = [
        Contestant("fednormec", [*ours, "fednormec"]),
        Contestant("bare_tiled", [*ours, "bare_tiled"]),
        Contestant("pfl_one_process", [*pfl, "--threads", str(os.cpu_count())]),
        Contestant("pfl_process_per_core", pfl),
    ]
    if workload == "mlp":
        contestants.append(Contestant("bare_once", [*ours, "bare_once"]))
    rounds, turns = EFFORT[workload]
    for turn in range(turns + 1):
        for contestant in contestants:
            seconds = contestant.run(rounds)
            if turn:  # the first turn warms up
                contestant.seconds += seconds
        print(f"{workload}: turn {turn} of {turns}", file=sys.stderr)
    for contestant in contestants:
        contestant.close()
    medians = {c.name: statistics.median(c.seconds) for c in contestants}
    ratios = {name: value / medians["fednormec"] for name, value in medians.items() if name.startswith("pfl")}
    bare = {name: medians["fednormec"] / value for name, value in medians.items() if name.startswith("bare")}
    return {
        "median_ms": {name: round(1000 * value, 2) for name, value in medians.items()},
        "times_faster_than": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "times_the_gradients_alone": {name: round(ratio, 3) for name, ratio in bare.items()},
        "rounds_timed": {c.name: len(c.seconds) for c in contestants},
        "about": {c.name: c.about for c in contestants},
    }


def machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["mlp", "resnet20"], help=", ".join(EFFORT))
    parser.add_argument("--peers", required=True, help="the python of an environment with pfl")
    chosen = parser.parse_args()
    results = {name: measure(name, chosen.peers) for name in chosen.workloads}
    for name, result in results.items():
        for key in ("median_ms", "times_faster_than", "times_the_gradients_alone"):
            print(f"{name}: {key.replace('_', ' ')}: {result[key]}")
    RESULTS.parent.mkdir(exist_ok=True)
    stored = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": machine(), "results": results}
    RESULTS.write_text(json.dumps(stored, indent=2) + "\n")
    print(f"stored in {RESULTS.relative_to(HERE.parent)}", file=sys.stderr)


if __name__ == "__main__":
    main()
