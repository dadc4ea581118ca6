"""Figures without a display: an empty one, a saved one, colours that stay apart for the colour-blind and in print."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fednormec.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLOURS = {"central": "#0072B2", "secagg": "#D55E00", "local": "#009E73"}

ALARM = "#B00020"
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")  # Okabe and Ito's, less yellow
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v")  # three cycles of different lengths: lines stay apart in grey, too


class Look(NamedTuple):
    """Look of a line; a level has no marker."""

    colour: str
    dash: str
    marker: str = ""


def look(place: int) -> Look:
    """Returns the look of the group at this place of the table, the same in every figure."""
    return Look(SERIES[place % len(SERIES)], DASHES[place % len(DASHES)], MARKERS[place % len(MARKERS)])


LEVELS = Look("#555555", "--"), Look("#555555", ":")


def svg(figure: "Figure", name: str) -> str:
    """Returns the figure as an element of a page.

    Text stays text, the same figure gives the same bytes, and figures of different names share no id.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), any_glyph():
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # nothing refers to them, and every figure has the same
    return re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", text))


def new_figure(path: Path, size: tuple[float, float]) -> "Figure":
    """Returns an empty figure for a file; raises UserError if figures are not written in its format."""
    require_drawable(path)
    return empty_figure(size)


def require_drawable(path: Path) -> None:
    """Raises UserError if the file's name does not end in .png, .pdf or .svg."""
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UserError(f"a figure is written as .png, .pdf or .svg, not as '{path.name}'.")


def empty_figure(size: tuple[float, float]) -> "Figure":
    """Returns an empty figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes the figure in the format of the file's name; raises UserError if the system refuses."""
    try:
        with any_glyph():
            figure.savefig(path, dpi=150, metadata={"CreationDate": None} if path.suffix.lower() == ".pdf" else None)
    except OSError as error:
        raise UserError(f"the figure {path} cannot be written: {error.strerror or error}.") from error


@contextmanager
def any_glyph() -> Iterator[None]:
    """Draws a box for what the font lacks, without a warning: a run may be named in any script."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
