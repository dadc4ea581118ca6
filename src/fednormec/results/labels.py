"""Names of groups of runs: the settings in which they differ."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fednormec.config.settings import PYTHON
from fednormec.errors import visible
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.results.reading import NO_PRIVACY, SAME_RUN, Run

SYMBOLS = {
    "method.alpha": "α", "method.beta": "β", "method.tau": "τ", "method.server_step": "η", "local.step": "γ",
    "participation.p": "p", "privacy.epsilon": "ε", "privacy.noise_std": "σ",
}  # fmt: skip
LONGEST = 70  # a longer list of differences is no name any more
SEED = re.compile(r"[_\-., ]seed[=_-]?\d+")


def labels(groups: Sequence[tuple[Run, ...]]) -> list[str]:
    """Returns what each group has that others have not; where that says nothing, or too much, the folder's name."""
    if len(groups) == 1:
        (group,) = groups
        names = [_method(group[0]) if len(group) > 1 else group[0].name]
    else:
        firsts = [_alike(group[0]) for group in groups]
        told = [_told(run, firsts) for run in firsts]
        short = [label if told.count(label) == 1 and 0 < len(label) <= LONGEST else "" for label in told]
        names = [label or _folder(group) for group, label in zip(groups, short, strict=True)]
        names = [name if names.count(name) == 1 else group[0].name for group, name in zip(groups, names, strict=True)]
    bad = [any(run.protection == NOT_PRIVATE for run in group) for group in groups]
    return [visible(name) + f" ({NOT_PRIVATE})" * label for name, label in zip(names, bad, strict=True)]


def _method(run: Run) -> str:
    return str(run.config.get("method", {}).get("name", run.name))


def _folder(group: Sequence[Run]) -> str:
    """Returns the folder's name; for several seeds, without the seed."""
    name = group[0].name
    if len(group) == 1:
        return name
    return SEED.sub("", name) if SEED.search(name) else f"{name} and {len(group) - 1} more"


def _alike(run: Run) -> Run:
    """Returns a run for the comparison of settings: when all take part, p = 1."""
    if run.config.get("participation", {}).get("name") != "full":
        return run
    return replace(run, config=run.config | {"participation": {"name": "poisson", "p": 1.0}})


def _told(run: Run, others: Sequence[Run]) -> str:
    """Returns the settings in which a run differs from others that made the same choices.

    Where two methods meet, their own settings are no difference. The method comes first, the privacy last.
    """
    if not run.config:
        return ""
    parts = list[str]()
    told = [section for section in run.config if section != PYTHON]  # its digests tell nobody anything
    for section in sorted(told, key=lambda section: (section != "method", section == "privacy")):
        parts += [part for part in _told_of(section, run, others) if part not in parts]
    if "privacy" not in run.config and any("privacy" in other.config for other in others):
        parts.append(NO_PRIVACY)
    return " ".join(parts)


def _told_of(section: str, run: Run, others: Sequence[Run]) -> list[str]:
    chosen, parts = run.config[section], list[str]()
    peers = [other for other in others if section in other.config]
    alike = [other for other in peers if other.config[section].get("name") == chosen.get("name")]
    keys = [key for key in chosen if len({repr(other.config[section].get(key)) for other in alike}) > 1]
    if len(alike) < len(peers):
        size = {"poisson": "p", "fixed_size": "m"}.get(str(chosen.get("name")))
        if section == "participation" and size in chosen:
            keys = [size, *keys]
        else:
            choice = _value(chosen.get("name", section))
            parts.append(choice if section == "method" else f"{section} {choice}")
    if section == "privacy" and len(peers) < sum(bool(other.config) for other in others):
        keys = list(dict.fromkeys([*(key for key in ("epsilon", "noise_std") if key in chosen), *keys]))
    if section == "participation":  # what the idle do is said where one method tries both
        same = [other.config[section] for other in alike if _method(other) == _method(run)]
        tried = {repr(other["idle"]) for other in same if "idle" in other}
        keys = [key for key in keys if key != "idle" or len(tried) > 1]
    named = [(f"{section}.{key}", chosen[key]) for key in keys if f"{section}.{key}" not in SAME_RUN]
    return parts + [f"{_short(key, run)}={_value(value)}" for key, value in named]


def _short(key: str, run: Run) -> str:
    section, _, rest = key.partition(".")
    if key == "privacy.epsilon" and (
        run.protection == NOT_PRIVATE or run.config[section].get("calibration") == "paper"
    ):
        return "target ε"  # which is not the one reached
    return SYMBOLS.get(key, rest if section in ("method", "privacy", "participation", "run") else key)


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
