"""Model that a run stores in the end: the last, the average, or the best on a public test set."""

import math
from pathlib import Path
from typing import Any, NamedTuple, get_args

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fednormec.config.settings import Keep
from fednormec.core.algorithm import Algorithm
from fednormec.core.problem import Metrics, Problem
from fednormec.engine.figures import AVERAGED, TEST, by_importance, figure_of
from fednormec.engine.round import Round
from fednormec.errors import UserError, one_of
from fednormec.files import replaced

BEST = "best.safetensors"


class Best(NamedTuple):
    """Best model so far.

    Attributes:
        x: the model.
        round: number of the round after which it was evaluated.
        figure: name of the figure that it is the best in.
        value: that figure.
    """

    x: Tensor
    round: int
    figure: str
    value: float

    def facts(self) -> dict[str, Any]:
        """Returns what a summary says of it."""
        return {"round": self.round, "figure": self.figure, "value": self.value}


class Keeper:
    """Keeper of the model that is stored in the end, as run.keep asks.

    The best model so far lies in a file of the run folder, so that resuming knows it. The file is replaced only by a
    better one: rounds that are computed again come to the same.

    Args:
        keep: "last", "average" or "best".
        private: whether a look at the clients' data costs privacy, so that only public figures may decide.
        x: the model before the next round.
        folder: where the best model is stored meanwhile; None: nowhere.
        resumes: whether a best model that is there already counts.
    """

    def __init__(self, keep: Keep, private: bool, x: Tensor, folder: Path | None = None, resumes: bool = False) -> None:
        self._keep, self._private, self._folder, self._x = keep, private, folder, x
        self._best = _read(folder / BEST, x) if resumes and folder is not None and self._keep == "best" else None

    def after(self, r: Round) -> None:
        """Takes notice of a round."""
        self._x = r.average if self._keep == "average" and r.average is not None else r.x
        figure = None if self._keep != "best" or r.metrics is None else deciding(r.metrics, self._private)
        if figure is None or r.metrics is None:
            return
        found = r.metrics.public | r.metrics.not_private
        for name, x in ((figure, r.x), (f"{figure}{AVERAGED}", r.average)):
            if x is not None and self._is_better(figure, found[name]):
                self._best = Best(x.clone(), r.number, name, float(found[name]))
                if self._folder is not None:
                    _write(self._folder / BEST, self._best)

    def model(self) -> Tensor:
        """Returns the model to store."""
        return self._x if self._best is None else self._best.x

    def facts(self) -> dict[str, Any]:
        """Returns what a summary says of the model that was kept."""
        if self._best is not None:
            return {"kept": self._keep, "kept_best": self._best.facts()}
        return {"kept": "last" if self._keep == "best" else self._keep}  # no figure could decide

    def tidy(self) -> None:
        """Removes the file, once the model is stored."""
        if self._folder is not None:
            (self._folder / BEST).unlink(missing_ok=True)

    def _is_better(self, figure: str, value: float) -> bool:
        if self._best is None:
            return not math.isnan(value)
        return value > self._best.value if figure_of(figure).higher else value < self._best.value


def require_keepable(keep: Keep, private: bool, algorithm: Algorithm, x: Tensor, problem: Problem | None) -> None:
    """Raises UserError if a run is asked to keep what there will not be.

    Args:
        keep: "last", "average" or "best".
        private: whether a look at the clients' data costs privacy.
        algorithm: the method.
        x: the model before the first round.
        problem: what evaluates it; None where clients are elsewhere and cannot be asked yet.
    """
    one_of("keep", keep, get_args(Keep))
    if keep == "average" and algorithm.average(algorithm.start(x)) is None:
        raise UserError("keep = 'average' needs an average: set server.average to 'ema' or 'tail' (in Python: "
                        "fn.optimizers.ema or fn.optimizers.tail).")  # fmt: skip
    if keep == "best" and problem is not None and deciding(problem.evaluate(x), private) is None:
        where = "a public test set: a look at the clients' data would cost privacy" if private else "a test set"
        raise UserError(f"keep = 'best' needs {where}. Keep the 'last' model or the 'average'.")


def deciding(metrics: Metrics, private: bool) -> str | None:
    """Returns the figure on a test set that says which model is best; None if there is none that may decide.

    Args:
        metrics: figures of a model.
        private: whether a look at the clients' data costs privacy, so that only public figures may decide.
    """
    names = by_importance(metrics.public if private else metrics.public | metrics.not_private)
    return next((name for name in names if name.startswith(TEST)), None)


def _write(path: Path, best: Best) -> None:
    about = {key: repr(value) if key == "value" else str(value) for key, value in best.facts().items()}
    with replaced(path) as file:
        file.write(save({"x": best.x.detach().cpu().contiguous()}, metadata=about))


def _read(path: Path, like: Tensor) -> Best | None:
    """Returns the best model of an earlier command; None if there is none, or it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            about, x = file.metadata(), file.get_tensor("x")
            best = Best(x.to(like.device), int(about["round"]), about["figure"], float(about["value"]))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None
    return best if best.x.shape == like.shape and best.x.dtype == like.dtype else None
