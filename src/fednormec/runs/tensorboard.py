"""TensorBoard's view of a run, written while it goes on; needs the extra `tensorboard`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fednormec.errors import UserError

Log = Callable[[Mapping[str, Any]], None]


def require_tensorboard() -> None:
    """Says how to install what is missing."""
    if find_spec("tensorboard") is None:
        raise UserError("--tensorboard needs TensorBoard: pip install 'fednormec[tensorboard]'.")


@contextmanager
def logged(folder: Path, done: int = 0) -> Iterator[Log]:
    """A function that writes a round's record as scalars into the folder's `tensorboard`; what that holds of rounds
    after `done`, from before a crash, no longer counts."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1, flush_secs=10)
    try:
        yield lambda record: _write(writer, record)
    finally:
        writer.close()


def _write(writer: Any, record: Mapping[str, Any]) -> None:
    for tag, value in scalars(record).items():
        writer.add_scalar(tag, value, record["round"])


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """A record's figures by tag: what looks at clients' data under not_private/, an ε that protects nobody by a name
    that says so."""
    label = "_" + record["label"].replace(" ", "_") if "label" in record else ""
    public = {key: value for key, value in record.items() if key not in ("round", "delta", "label", "not_private")}
    if label:
        public[f"epsilon{label}"] = public.pop("epsilon")
    apart = {f"not_private/{key}": value for key, value in record["not_private"].items()}
    return {tag: float(value) for tag, value in (public | apart).items()}
