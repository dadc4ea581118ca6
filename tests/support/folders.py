"""Run folders made by hand for the tests of what reads them: whole ones, and ones with anything in them."""

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fednormec.config.schema import dump
from fednormec.privacy.labels import NOT_PRIVATE

FILES = ("config.toml", "environment.json", "metrics.jsonl", "summary.json", "privacy.txt", "ledger.jsonl")
KEYS = st.sampled_from(
    ["round", "epsilon", "delta", "label", "not_private", "test_accuracy", "metrics", "private", "rounds", "status"]
    + ["clients", "run", "seed", "privacy", "method", "name", "guarantee", "covered", "versions", "command"]
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
ANY_TOML = st.dictionaries(
    st.sampled_from(["run", "method", "privacy", "data", "participation", "x"]),
    st.dictionaries(
        st.sampled_from(["name", "seed", "p", "epsilon", "delta", "clients", "noise_scale", "a b"]),
        st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=2),
    ),
)
ANYTHING = st.dictionaries(
    st.sampled_from([*FILES, "guarantee.json"]), ANY_JSON | ANY_TOML | st.binary(max_size=20), max_size=4
)


def made(
    path: Path, accuracies: list[Any], *, epsilon: float | None = 2.0, label: bool = False, **sections: dict[str, Any]
) -> Path:
    """A folder with such test accuracies in rounds 2, 4, …, an ε unless it is None, and noise that protects or not."""
    path.mkdir(parents=True)
    config = {
        "data": {"clients": 10}, "method": {"name": "fed_normec", "beta": 0.1},
        "participation": {"name": "poisson", "p": 0.5}, "run": {"rounds": 2 * len(accuracies), "seed": 0},
    }  # fmt: skip
    if epsilon is not None:
        config["privacy"] = {"epsilon": 2.0, "noise_scale": "total_norm" if label else "per_coordinate"}
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    mark = {"label": NOT_PRIVATE} if label else {}
    lines, ledger = [], [{"release": {}, "rounds_before": 0}]
    for k in range(1, 2 * len(accuracies) + 1):
        paid = {} if epsilon is None else {"epsilon": epsilon * k / (2 * len(accuracies)), "delta": 1e-5, **mark}
        public = {"test_accuracy": accuracies[k // 2 - 1], "test_loss": 1 / k} if k % 2 == 0 else {}
        lines.append({"round": k, **paid, **public, "not_private": {"sent": 5, "train_loss": 2 / k}})
        ledger.append({"round": k, **paid})
    summary: dict[str, Any] = {
        "method": "Fed-alpha-NormEC", "rounds": len(lines), "status": "done", "clients": 10, "parameters": 7,
        "metrics": {"test_accuracy": accuracies[-1]}, "privacy": "none: no noise was added", "left_out": 0,
        "not_private": ["left_out"],
    }  # fmt: skip
    if epsilon is not None:
        summary |= {"private": not label, "epsilon": epsilon, "delta": 1e-5, "trust": "central"}
        claim = f"{NOT_PRIVATE}: true ε ≤ {epsilon}" if label else f"ε ≤ {epsilon} at δ = 1e-05"
        (path / "privacy.txt").write_text(f"{claim}\n  unit        the client\n              with all its data\n")
        (path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ledger))
    (path / "config.toml").write_text(dump(config))
    (path / "environment.json").write_text(json.dumps({"started": "2026-01-02T03:04:05+00:00", "python": "3.12.1"}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def spoilt(path: Path, contents: dict[str, Any]) -> Path:
    """A run folder in which such files were replaced."""
    made(path, [0.5])
    for name, content in contents.items():
        toml = (
            name == "config.toml" and isinstance(content, dict) and all(isinstance(v, dict) for v in content.values())
        )
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        if toml:
            text = _quoted(content).encode("utf-8", "backslashreplace")
        (path / name).write_bytes(text)
    return path


def _quoted(config: dict[str, Any]) -> str:
    lines = []
    for section, own in config.items():
        lines.append(f"[{json.dumps(section)}]")
        lines += [f"{json.dumps(key)} = {json.dumps(value).lower()}" for key, value in own.items()]
    return "\n".join(lines) + "\n"


def swept(folder: Path, many: int) -> Path:
    """So many settings with names that are as long as they get."""
    for k in range(many):
        method = {"name": "dp_fed_avg_normalized", "beta": 0.01 * (k + 1), "some_other_setting": "as long as a name is"}
        made(folder / f"{k}", [0.1, 0.01 * k], method=method if k % 2 else method | {"some_other_setting": "short"})
    return folder


def two_methods(folder: Path) -> Path:
    """Three seeds of each of two methods, in this folder."""
    for seed in range(3):
        made(folder / f"a{seed}", [0.2, 0.4 + 0.1 * seed], run={"seed": seed})
        made(folder / f"b{seed}", [0.1, 0.3], run={"seed": seed}, method={"name": "clip21", "tau": 1.5})
    return folder
