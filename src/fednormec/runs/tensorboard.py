"""View of a run for TensorBoard, written after each round; needs the extra `tensorboard`."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednormec.core.stages import stage
from fednormec.engine.observers import Observer
from fednormec.engine.record import APART, Record
from fednormec.errors import UserError

if TYPE_CHECKING:
    from fednormec.engine.round import Round


def require_tensorboard() -> None:
    """Raises UserError if TensorBoard is missing, and says how to install it."""
    if find_spec("tensorboard") is None:
        raise UserError("--tensorboard needs TensorBoard: pip install 'fednormec[tensorboard]'.")


def events(folder: Path, done: int = 0) -> Observer:
    """Returns an observer that writes each round's record as scalars into the folder's `tensorboard`.

    What that holds of rounds after `done`, from before a crash, no longer counts.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1, flush_secs=10)

    def after(r: "Round", record: Record) -> None:
        with stage("disk"):
            for tag, value in scalars(record).items():
                writer.add_scalar(tag, value, r.number)

    return Observer(after, lambda end: writer.close())


def scalars(record: Record) -> dict[str, float]:
    """Returns a record's figures by tag.

    What looks at clients' data stands under not_private/, and the name of an ε that protects nobody says so.
    """
    label = "_" + record["label"].replace(" ", "_") if "label" in record else ""
    spent = {f"epsilon{label}": record["epsilon"]} if "epsilon" in record else {}
    public = spent | record.public_figures
    apart = {f"{APART}/{key}": value for key, value in record.apart.items()}
    return {tag: float(value) for tag, value in (public | apart).items()}
