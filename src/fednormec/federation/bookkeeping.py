"""Bookkeeping of a federation whose roster changes: what trainings so far have spent, and what the next adds to it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fednormec.config.schema import Config, read
from fednormec.errors import UserError
from fednormec.federation.agreement import for_server, read_federation
from fednormec.privacy.accounting import epsilon_of_all
from fednormec.privacy.labels import NOT_PRIVATE, up
from fednormec.privacy.ledger import spent_in
from fednormec.privacy.mechanism import Plan

SAME = ("delta", "trust", "adjacency", "colluders", "unit")  # what one ε of several trainings needs


def spent_and_to_come(folder: Path, runs: Sequence[Path] = ()) -> list[str]:
    """Returns sentences on the ε of a client that was in all trainings so far, and is in the next.

    Every line of every ledger counts. A ledger that cannot be read, or that is of another promise, is named: its ε
    comes on top.

    Args:
        folder: folder of the federation, as it is agreed now.
        runs: run folders outside it; those in it are found.
    """
    federation = for_server(read_federation(folder), folder)
    plan = federation.plan
    if plan is None:
        return ["without [privacy] no ε is kept: what the server has seen, it has seen"]
    if plan.total_norm:
        return [f"{NOT_PRIVATE}: noise by total norm protects nobody, so that no ε is worth adding up"]
    if not isinstance(plan, Plan):
        return ["each client keeps the count of what was computed on its own records, and its budget"]
    mine, counts, apart = federation.experiment.config, Counter[Any](), list[str]()
    for run in (*sorted(path.parent for path in folder.rglob("ledger.jsonl")), *runs):
        try:
            spent = spent_in(run)
            alike = _promise(read(run / "config.toml")) == _promise(mine)
        except UserError as error:
            apart.append(f"{run} is not in this number: {str(error).rstrip('.')}")
            continue
        if spent is not None and alike and len(spent.parts) == 1:
            counts[spent.release] += spent.rounds
        elif spent is not None:
            apart.append(f"{run} is not in this number: its δ, trust, adjacency or colluders are others, and its ε "
                         "comes on top")  # fmt: skip
    if not counts:
        return ["no training of this federation has spent anything yet", *apart]
    rounds, before = sum(counts.values()), epsilon_of_all(counts, plan.delta)
    counts[plan.mechanism.release()] += plan.rounds
    after = epsilon_of_all(counts, plan.delta)
    return [
        f"trainings so far have spent ε ≤ {up(before)} at δ = {plan.delta:g} in {rounds} rounds, if that number had "
        f"been fixed beforehand; a client that was in all of them, and takes part in the {plan.rounds} rounds of the "
        f"new agreement, is at ε ≤ {up(after)} then",
        *apart,
    ]


def _promise(config: Config) -> list[Any]:
    return [config.get("privacy", {}).get(key) for key in SAME]
