"""Profile of a run, for a person: where the time went."""

from typing import Any

from fednormec.core.stages import MEANING

OTHER = "waiting for the slowest thread, who takes part, progress"


def table(facts: dict[str, Any]) -> str:
    """Returns a profile as text, for a person."""
    wall, chosen = facts["seconds"], facts["choices"]
    rows = [*((name, facts["stages"][name], MEANING[name]) for name in MEANING), ("other", facts["other"], OTHER)]
    lines = [f"where the time went: {wall:.2f} s"]
    lines += [
        f"  {name:<11}{s:>8.2f} s {s / wall:>5.0%} {'█' * round(20 * s / wall):<20} {what}" for name, s, what in rows
    ]
    place, megabytes = "in memory" if chosen["memories"] == "ram" else "in a file", chosen["memories_bytes"] / 1e6
    often = chosen["checkpoint_rounds"]
    kept = f"every {chosen['checkpoint_seconds']:g} s" if often is None else f"after every {often} rounds or more often"
    kept = "after every round" if often == 1 else kept
    who = f"{chosen['workers']} threads, each taking {chosen['chunk_size']} clients a turn"
    if chosen["engine"] == "ray":
        who = f"on Ray, {chosen['workers'] or 'a worker for each CPU'}" + (" workers" if chosen["workers"] else "")
        place = "with the workers"
    lines += [
        "chosen (see docs/performance.md; none changes more than rounding):",
        f"  gradients by {chosen['gradients']}, {chosen['tile']} clients at a time, "
        f"{'with' if chosen['kernels'] else 'without'} compiled kernels; {who}",
        f"  memories {place}, {megabytes:,.1f} MB",
        f"  evaluated every {chosen['evaluate_every']} rounds; a checkpoint {kept}",
    ]
    return "\n".join(lines)
