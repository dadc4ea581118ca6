"""One federated round, side by side: ours, plain PyTorch, pfl 0.6, Flower's simulation. They take turns in one run.

    make bench
    python benchmarks/rounds.py [mlp resnet20 small_cnn mlp:gd5 ...] --pfl PYTHON --flower PYTHON
    python benchmarks/rounds.py --draw     only picture and tables, from what is stored

WORKLOAD alone is one local gradient step; WORKLOAD:gd5 five, WORKLOAD:ig8 one pass over eight parts of four examples.
Flower, whose processes are never quite idle, is measured against ours in turns of its own.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from turns import HERE, store, take_turns, write_between

PICTURE = HERE.parent / "docs" / "performance.png"
PAGE = HERE.parent / "docs" / "performance.md"
TITLES = {
    "mlp": "MLP, d = 50,890, 200 clients",
    "small_cnn": "conv net, 50 clients",
    "strided_cnn": "strided conv net, 50 clients",
    "resnet20": "ResNet20, group norm, 20 clients",
    "resnet20_batch": "ResNet20, batch norm, 20 clients",
}
# rounds a turn, and turns
EFFORT = {"mlp": (10, 10), "resnet20": (1, 9), "resnet20_batch": (1, 9), "small_cnn": (4, 8), "strided_cnn": (6, 8),
          "mlp:gd5": (3, 6), "mlp:ig8": (2, 6), "small_cnn:gd5": (1, 6), "small_cnn:ig8": (1, 6),
          "resnet20:gd5": (1, 2), "resnet20:ig8": (1, 5)}  # fmt: skip
LABELS = {
    "bare_loop": "plain PyTorch loop",
    "bare_vmap": "one vmapped call",
    "pfl_one_process": "pfl 0.6, one process",
    "pfl_process_per_core": "pfl 0.6, a process a core",
    "flower": "Flower 1.41, tuned",
    "flower_as_shipped": "Flower 1.41, as shipped",
}


def measure(name: str, pfl_python: str, flower_python: str) -> dict[str, Any]:
    workload, _, local = name.partition(":")
    ours = [sys.executable, str(HERE / "ours.py"), workload]
    kind = ["--local", local or "gd"]
    models = ["--models", str(HERE.parent / "src")]
    steps = {"": [], "gd5": ["--epochs", "5"], "ig8": ["--batch", "4"]}[local]
    pfl = [pfl_python, "-W", "ignore", str(HERE / "peer_pfl.py"), workload, *models, *steps]
    commands = {
        "fednormec": [*ours, "fednormec", *kind],
        "gradients": [*ours, "gradients", *kind],
        "bare_loop": [*ours, "bare_loop", *kind],
        "pfl_one_process": [*pfl, "--threads", str(os.cpu_count())],
        "pfl_process_per_core": pfl,
    }
    if name == "mlp":
        commands["bare_vmap"] = [*ours, "bare_vmap"]
    if workload.startswith("resnet20"):
        commands["matmul"] = [*ours, "matmul"]
    rounds, turns = EFFORT[name]
    found: dict[str, Any] = {"local": local, "together": take_turns(name, commands, rounds, turns)}
    if not local:
        flower = [flower_python, "-W", "ignore", str(HERE / "peer_flower.py"), workload, *models]
        trio = {
            "fednormec": commands["fednormec"],
            "flower": flower,
            "flower_as_shipped": [*flower, "--as-shipped"],
        }
        found["with_flower"] = take_turns(f"{name}, Flower", trio, {"fednormec": rounds}, 5)
    return found | {"ratios": ratios(found)}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """What the targets speak of, each from one run of turns."""
    medians = found["together"]["median_seconds"]
    ours = medians["fednormec"]
    result = {f"{name} / fednormec": medians[name] / ours for name in LABELS if name in medians}
    result["fednormec / gradients"] = ours / medians["gradients"]
    if "matmul" in medians:
        steps = {"gd5": 5}.get(found["local"], 1)
        operations = steps * found["together"]["about"]["fednormec"]["convolution_operations"]
        result["fednormec / convolutions at the matmul rate"] = ours / (medians["matmul"] * operations / (8 * 2048**3))
    if "with_flower" in found:
        pair = found["with_flower"]["median_seconds"]
        for flower in ("flower", "flower_as_shipped"):
            result[f"{flower} / fednormec"] = pair[flower] / pair["fednormec"]
    return {name: round(value, 3) for name, value in result.items()}


def draw(stored: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [name for name in ("mlp", "small_cnn", "resnet20", "resnet20_batch") if name in stored]
    colours = dict(zip(LABELS, ("#8aa1b1", "#b8c6d0", "#d98c5f", "#e8b08d", "#9b7bb8", "#bfa8d3"), strict=True))
    figure, axes = plt.subplots(2, 2, figsize=(10, 5.2), layout="constrained")
    for axis, name in zip(axes.flat, shown, strict=False):
        found = stored[name]["ratios"]
        bars = [(label, found[f"{key} / fednormec"], colours[key]) for key, label in LABELS.items()
                if f"{key} / fednormec" in found]  # fmt: skip
        bars = [("fednormec", 1.0, "#1b6ca8"), *bars][::-1]
        axis.barh([b[0] for b in bars], [b[1] for b in bars], color=[b[2] for b in bars])
        widest = max(b[1] for b in bars)
        if widest > 20:
            axis.set_xscale("log")
            axis.set_xlim(0.5, widest * 2.5)
        else:
            axis.set_xlim(0, widest * 1.2)
        for place, (_, value, _) in enumerate(bars):
            axis.text(value, place, f" {value:.0f} ×" if value > 10 else f" {value:.2g} ×", va="center", fontsize=9)
        axis.set_title(f"{TITLES[name]} × 32{' (log scale)' if widest > 20 else ''}", fontsize=10)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(labelsize=9, bottom=False, labelbottom=False, which="both")
    figure.suptitle("time of one round, in rounds of ours", fontsize=11)
    figure.savefig(PICTURE, dpi=150)
    print(f"drawn: {PICTURE.relative_to(HERE.parent)}", file=sys.stderr)


def tables(stored: dict[str, Any]) -> str:
    """One local step in milliseconds with the ratio to ours, and the ratios for several local steps."""
    shown = [name for name in TITLES if name in stored]
    lines = [
        "| one round, milliseconds | " + " | ".join(TITLES[name] for name in shown) + " |",
        "|---" * (len(shown) + 1) + "|",
    ]
    rows = {"fednormec": "**fednormec**, whole round", "gradients": "its gradients alone"} | LABELS
    for key, label in rows.items():
        cells = [_cell(stored[name], key) for name in shown]
        if any(cells):
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    limits = [stored[name]["ratios"].get("fednormec / convolutions at the matmul rate") for name in shown]
    lines.append(
        "| ours / convolutions at the matmul rate | "
        + " | ".join("" if r is None else f"{r:.2f}" for r in limits)
        + " |"
    )
    several = [name for name in stored if ":" in name]
    kinds = {"gd5": "five gradient steps", "ig8": "one pass over eight parts"}
    columns = ("pfl_one_process", "pfl_process_per_core", "bare_loop")
    lines += [
        "",
        "| several local steps: time of … / ours | "
        + " | ".join(LABELS[c] for c in columns)
        + " | ours / its gradients |",
    ]
    lines.append("|---" * 5 + "|")
    for name in several:
        workload, _, local = name.partition(":")
        ratios = stored[name]["ratios"]
        cells = [f"{ratios[f'{c} / fednormec']:.2f}" for c in columns] + [f"{ratios['fednormec / gradients']:.2f}"]
        lines.append(f"| {TITLES[workload]}, {kinds[local]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: dict[str, Any], key: str) -> str:
    group = found["with_flower"] if key.startswith("flower") else found["together"]
    medians = group["median_seconds"]
    if key not in medians:
        return ""
    value = f"{1e3 * medians[key]:,.0f}" if medians[key] > 0.2 else f"{1e3 * medians[key]:.1f}"
    if key == "fednormec":
        return f"**{value}**"
    return f"{value} ({medians[key] / medians['fednormec']:.2f} ×)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(EFFORT)}; all by default")
    parser.add_argument("--pfl", metavar="PYTHON", help="the python of an environment with pfl")
    parser.add_argument("--flower", metavar="PYTHON", help="the python of an environment with flwr")
    parser.add_argument("--draw", action="store_true", help="picture and tables from what is stored, and stop")
    chosen = parser.parse_args()
    results = Path(HERE / "results" / "rounds.json")
    if not chosen.draw:
        if not (chosen.pfl and chosen.flower):
            parser.error("say where the peers are: --pfl PYTHON --flower PYTHON, or run `make bench`")
        for unknown in set(chosen.workloads) - set(EFFORT):
            parser.error(f"there is no workload {unknown}: choose of {', '.join(EFFORT)}")
        for name in chosen.workloads or EFFORT:
            found = measure(name, chosen.pfl, chosen.flower)
            for ratio, value in found["ratios"].items():
                print(f"{name}: {ratio} = {value}")
            store("rounds", {name: found})
    stored = json.loads(results.read_text())
    draw(stored)
    write_between(PAGE, tables(stored))


if __name__ == "__main__":
    main()
