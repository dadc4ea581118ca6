"""What a checkpoint costs: seconds to write and to read it back, and the most memory a process had meanwhile.

    python benchmarks/checkpoints.py

Each size is a process of its own; five times, medians. Results go into results/checkpoints.json.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = {  # clients, numbers each, whether they lie in a file
    "quickstart, 500 x 650": (500, 650, False),
    "MLP, 200 x 50,890": (200, 50_890, False),
    "MLP, 2,000 x 50,890": (2_000, 50_890, False),
    "100,000 x 10,000, in a file": (100_000, 10_000, True),
}
REPEATS = 5


def measure(clients: int, dim: int, mapped: bool) -> dict[str, Any]:
    import numpy as np
    import torch

    from fednormec import Server
    from fednormec.core.participation import Cohort
    from fednormec.engine.memories import Memories
    from fednormec.engine.round import Round
    from fednormec.runs.checkpoint import load, save

    with tempfile.TemporaryDirectory(dir=".") as name:
        folder, x = Path(name), torch.randn(dim)
        memories = Memories(clients, dim, x.dtype, x.device, folder if mapped else None)
        for rows in memories.blocks():
            rows.normal_()
        cohort = Cohort(np.arange(clients), np.ones(clients, bool))
        done = Round(1, Server(x, x.clone(), 1), memories, cohort, 0, 0, None, x, None, 1, False, None, x)
        written, read = [], []
        for _ in range(REPEATS):
            began = time.perf_counter()
            save(folder / "checkpoint", done)
            written.append(time.perf_counter() - began)
            began = time.perf_counter()
            load(folder / "checkpoint").fill(memories)
            read.append(time.perf_counter() - began)
        return {
            "bytes": (folder / "checkpoint").stat().st_size,
            "write_seconds": written,
            "read_seconds": read,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def main() -> None:
    from turns import store

    results = {}
    for name, size in SIZES.items():
        command = [sys.executable, __file__, json.dumps(size)]
        results[name] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        found = results[name]
        wrote, read = (statistics.median(found[f"{what}_seconds"]) for what in ("write", "read"))
        print(f"{name}: {found['bytes'] / 1e6:,.1f} MB, written in {wrote:.3f} s, read in {read:.3f} s, peak "
              f"{found['peak_bytes'] / 1e9:.2f} GB")  # fmt: skip
    store("checkpoints", results)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(*json.loads(sys.argv[1]))))
    else:
        main()
