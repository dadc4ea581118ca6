"""What both drivers share: processes that take turns, the machine they ran on, where results lie."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Contestant:
    """A process that runs rounds on demand and is idle in between."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.seconds = name, list[float]()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()

    def run(self, rounds: int) -> list[float]:
        seconds: list[float] = self.ask(rounds)["seconds"]
        return seconds

    def ask(self, rounds: int) -> dict[str, Any]:
        """All that it says about that many rounds, not only their seconds."""
        assert self.process.stdin is not None
        print(rounds, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended early with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def take_turns(
    title: str, commands: dict[str, Sequence[str]], rounds: int | dict[str, int], turns: int
) -> dict[str, Any]:
    """Median seconds of each; a turn of `rounds` rounds of one, then of the next. The first turn warms up."""
    contestants = [Contestant(name, command) for name, command in commands.items()]
    for turn in range(turns + 1):
        for contestant in contestants:
            seconds = contestant.run(rounds if isinstance(rounds, int) else rounds.get(contestant.name, 1))
            if turn:
                contestant.seconds += seconds
        print(f"{title}: turn {turn} of {turns}", file=sys.stderr)
    for contestant in contestants:
        contestant.close()
    return {
        "median_seconds": {c.name: statistics.median(c.seconds) for c in contestants},
        "quartiles": {c.name: statistics.quantiles(c.seconds)[::2] for c in contestants},
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


def store(name: str, results: dict[str, Any]) -> None:
    """Adds to results/NAME.json what was measured now; what was not is kept with its own date."""
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    stored = json.loads(path.read_text()) if path.exists() else {}
    now = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": machine(), "command": sys.argv[1:]}
    stored |= {key: {**now, **value} for key, value in results.items()}
    path.write_text(json.dumps(stored, indent=1) + "\n")
    print(f"stored in {path.relative_to(HERE.parent)}", file=sys.stderr)


def write_between(page: Path, text: str) -> None:
    """Puts a text into a page, between its two marks."""
    before, mark, rest = page.read_text().partition("<!-- measured -->\n")
    _, end, after = rest.partition("<!-- end -->")
    page.write_text(f"{before}{mark}\n{text}\n\n{end}{after}")
