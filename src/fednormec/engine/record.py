"""Record of a round, as in a history and in a line of metrics.jsonl, and who may see which part of it."""

import math
from typing import Any, final

COUNTS = ("computed", "sent", "left_out")  # of clients, in every record
MISSED = "missed"  # and where clients can fail to answer
THEORY = ("memory_error", "tracking_error")  # of the method rather than of the model
ABOUT = (
    "round",
    "epsilon",
    "delta",
    "label",
    "record_epsilon",
    "record_delta",
)  # beside the public figures of the model
APART = "not_private"
UNKNOWN = {"epsilon": math.inf, "record_epsilon": math.inf}  # what null in a file stands for, where that is not NaN


@final
class Record(dict[str, Any]):
    """Figures of a round, as a dict that JSON can hold.

    Keys: `round`; in a private run `epsilon` and `delta` spent so far, with a `label` where the noise protects nobody,
    and where records are protected beside clients `record_epsilon` and `record_delta`;
    where the model was evaluated its figures on a public test set; and `not_private`, a dict of what looks at clients'
    data or at who took part: further figures, and the numbers of clients that `computed`, `sent`, were `left_out` (and
    `missed`). A non-finite figure is NaN, and null in a file. The properties also read a damaged record.

    >>> r = Record(round=3, epsilon=0.5, delta=1e-5, test_accuracy=0.9, not_private={"train_loss": 0.3, "sent": 7})
    >>> r.round, r.public_figures, r.client_figures, r.evaluated
    (3, {'test_accuracy': 0.9}, {'train_loss': 0.3}, True)
    """

    @property
    def round(self) -> Any:
        """Number of the round."""
        return self.get("round")

    @property
    def apart(self) -> dict[str, Any]:
        """Part of the record that is not private."""
        found = self.get(APART)
        return found if isinstance(found, dict) else {}

    @property
    def public_figures(self) -> dict[str, Any]:
        """Figures of the model on a public test set."""
        return {key: value for key, value in self.items() if key not in (*ABOUT, APART)}

    @property
    def client_figures(self) -> dict[str, Any]:
        """Figures of the model that look at clients' data."""
        return {key: value for key, value in self.apart.items() if key not in (*COUNTS, MISSED, *THEORY)}

    @property
    def evaluated(self) -> bool:
        """True if the model was evaluated after this round."""
        return bool(self.public_figures or self.client_figures)

    @property
    def public_part(self) -> "Record":
        """Record without the part that is not private."""
        return Record({key: value for key, value in self.items() if key != APART})

    @property
    def flat(self) -> dict[str, Any]:
        """Figures without a dict among them: what is not private stands in the end, and its names say so."""
        return {**self.public_part, **{f"{APART}_{key}": value for key, value in self.apart.items()}}

    def measured(self) -> "Record":
        """Returns the record with what null stands for in a file: NaN, and for ε infinity."""
        known = {key: value if value is not None else UNKNOWN.get(key, math.nan) for key, value in self.items()}
        apart = {key: math.nan if value is None else value for key, value in self.apart.items()}
        return Record(known | {APART: apart})

    @classmethod
    def read(cls, found: Any, number: int) -> "Record | None":
        """Returns the record of a round that was read back; None if it is damaged.

        Args:
            found: what JSON gave.
            number: the round that it must be of.
        """
        if not (isinstance(found, dict) and found.get("round") == number and isinstance(found.get(APART), dict)):
            return None
        record = cls(found)
        figures = {key: value for key, value in record.items() if key not in ("round", "label", APART)}
        values = (*figures.values(), *record.apart.values())
        counted = all(type(record.apart.get(name)) is int for name in COUNTS)
        reported = all(name.startswith("client_") for name in record.client_figures)  # by clients who are elsewhere
        whole = "train_loss" in record.apart or (reported and not set(record.apart) & set(THEORY))
        return record if counted and whole and all(v is None or type(v) in (int, float) for v in values) else None
