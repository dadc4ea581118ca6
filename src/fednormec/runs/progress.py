"""Progress of a run, for a person: a bar on a terminal, plain lines elsewhere, nothing when asked for quiet."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from fednormec.core.problem import Metrics
from fednormec.engine.figures import by_importance, figure_of
from fednormec.engine.observers import Observer
from fednormec.privacy.labels import NOT_PRIVATE, up

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from fednormec.engine.round import Round


Show = Callable[[int, Metrics | None, str | None], None]
BARS = "▁▂▃▄▅▆▇█"
SHORTEST, LONGEST = 3, 40  # columns of a bar


T = TypeVar("T")


class News(NamedTuple, Generic[T]):
    """News of many runs while they are computed.

    Attributes:
        rounds: number of rounds done, over all runs.
        total: number of rounds in all runs.
        ended: the run that ended, if one did.
        cells_ended: number of runs that have ended.
    """

    rounds: int
    total: int
    ended: T | None
    cells_ended: int


def progress(rounds: int, quiet: bool, begun: int = 0) -> Observer:
    """Shows a person how far a run is; `begun` rounds were done in an earlier command."""
    open = ExitStack()
    show = open.enter_context(shown(rounds, quiet, begun))
    return Observer(lambda r, record: show(r.number, r.metrics, spent(r)), lambda end: open.close())


def spent(r: "Round") -> str | None:
    """Returns the ε spent so far as text, with its label; None without privacy."""
    if r.plan is None or r.epsilon is None:
        return None
    return f"ε {up(r.epsilon)}" + (f" {NOT_PRIVATE}" if r.plan.total_norm else "")


@contextmanager
def shown(rounds: int, quiet: bool, begun: int = 0) -> Iterator[Show]:
    """Yields a function to call after each round with its number, its figures if it was evaluated, and the ε spent.

    What was done in an earlier command, `begun` rounds, says nothing about the pace of this one.
    """
    if quiet:
        yield lambda number, metrics, spent: None
    elif sys.stderr.isatty():
        with _bar(rounds, begun) as show:
            yield show
    else:
        yield _lines(rounds, begun)


@contextmanager
def counted(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with how much is done and how much there is: a bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    started, at, of = time.perf_counter(), 0, 0

    def drawn() -> Drawn:
        if not of:
            return Drawn(what, None, [[]])
        left = _left(of - at, at, time.perf_counter() - started)
        return Drawn(what, at / of, [[f"{at / of:.0%}", f"ETA {left}"], [f"{at / of:.0%}"]])

    with _line(drawn):

        def show(done: int, total: int) -> None:
            nonlocal at, of
            at, of = done, total

        yield show


@contextmanager
def tallied(cells: int, line: Callable[[News[T]], str], quiet: bool) -> Iterator[Callable[[News[T]], None]]:
    """Yields a function to call with news of many runs: a bar on a terminal, elsewhere a line for each that ended."""
    if quiet:
        yield lambda news: None
        return
    started, before, at, of, ended = time.perf_counter(), -1, 0, 0, 0

    def drawn() -> Drawn:
        passed, share = time.perf_counter() - started, at / of if of else 0.0
        rest = [f"{share:.0%}", f"ETA {_left(of - at, at - before, passed)}"]
        return Drawn(f"{ended}/{cells} cells", share, [[*rest, f"after {_clock(passed)}"], rest, rest[:1]])

    with _line(drawn) if sys.stderr.isatty() else nullcontext() as console:

        def tell(news: News[T]) -> None:
            nonlocal before, at, of, ended
            at, of, ended = news.rounds, news.total, news.cells_ended
            before = at if before < 0 else before  # what an earlier command did tells no speed
            if news.ended is not None and console is not None:
                console.print(line(news), markup=False, highlight=False, emoji=False, soft_wrap=True)
            elif news.ended is not None:
                passed = time.perf_counter() - started
                left = passed * (of - at) / max(1, at - before)
                print(f"{ended}/{cells}  {passed:.0f} s, {left:.0f} s left  {line(news)}", file=sys.stderr, flush=True)

        yield tell


def figures(metrics: Metrics, private: bool) -> str:
    """Returns the few numbers one wants to see at once, in what a terminal of 80 columns has left beside a bar.

    Beside an ε nothing that looks at clients' data is shown without saying so.
    """
    return "  ".join(_figures(metrics, private))


def _figures(metrics: Metrics, private: bool) -> list[str]:
    known, mark = metrics.public | metrics.not_private, " (not private)" if private else ""
    named = [(key, figure_of(key)) for key in by_importance(known) if key != "gradient_norm"]
    shown = {key: f"{figure.short} {known[key]:{figure.form}}{mark * (key in metrics.not_private)}"
             for key, figure in named}  # fmt: skip
    loss = shown.pop("train_loss", None)  # missing if clients are elsewhere
    if loss is None or (private and shown):
        return list(shown.values())
    return [loss, *list(shown.values())[:1]]


def pace(rounds: int, seconds: float) -> str:
    """Returns the speed of rounds as text, in whichever unit has something to say.

    >>> pace(30, 10.0), pace(2, 360.0)
    ('3.0 rounds/s', '180.0 s/round')
    """
    return f"{rounds / seconds:.1f} rounds/s" if rounds > seconds else f"{seconds / rounds:.1f} s/round"


def sparkline(values: list[float], width: int = 40) -> str:
    """Returns a curve in one line of text.

    >>> sparkline([0.0, 1.0, 2.0, 3.0])
    '▁▃▆█'
    """
    values = [v for v in values if math.isfinite(v)]
    picked = values[:: max(1, -(-len(values) // width))]
    low, high = min(values, default=0.0), max(values, default=0.0)
    return "".join(BARS[round((v - low) / ((high - low) or 1) * (len(BARS) - 1))] for v in picked)


class Drawn(NamedTuple):
    """Line on a terminal.

    Attributes:
        begins: what stands before the bar.
        share: how much of the bar is full; None if nobody knows.
        ends: what stands behind the bar: the whole of it first, then ever less of it for narrower terminals.
    """

    begins: str
    share: float | None
    ends: Sequence[Sequence[str]]


def fitted(drawn: Drawn, width: int) -> tuple[str, int, str]:
    """Returns what stands before the bar, the bar's length and what stands behind it: as much as has room beside a bar.

    If there is no room for a bar, it returns the least, part by part in as many lines as it takes.

    >>> fitted(Drawn("round 2/9", 0.2, [["1.0 rounds/s", "ETA 00:07"], ["ETA 00:07"]]), 26)
    ('round 2/9', 6, 'ETA 00:07')
    """
    for parts in drawn.ends:
        room = width - len(" ".join([drawn.begins, *parts])) - 1
        if room >= SHORTEST:
            return drawn.begins, min(room, LONGEST), " ".join(parts)
    lines = [drawn.begins]
    for part in drawn.ends[-1]:
        lines[len(lines) - 1 :] = [f"{lines[-1]} {part}"] if len(lines[-1]) + len(part) < width else [lines[-1], part]
    return "\n".join(lines), 0, ""


@contextmanager
def _line(drawn: Callable[[], Drawn]) -> Iterator["Console"]:
    """Draws a line on stderr anew all the time, in the width that the terminal then has."""
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=True)

    def row() -> "RenderableType":
        now = drawn()
        begins, bar, ends = fitted(now, console.width)
        if not bar:
            return Text(begins)
        filled = ProgressBar(None if now.share is None else 1.0, now.share or 0.0, bar)
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(Text(begins, no_wrap=True), filled, Text(ends, no_wrap=True))
        return grid

    with Live(get_renderable=row, console=console):
        yield console


@contextmanager
def _bar(rounds: int, begun: int) -> Iterator[Show]:
    started, done, said, paid = time.perf_counter(), begun, list[str](), ""

    def drawn() -> Drawn:
        passed = time.perf_counter() - started
        speed = [pace(done - begun, passed)] if done > begun else []
        eta, main = f"ETA {_left(rounds - done, done - begun, passed)}", sorted(said, key=_less)[:1]
        spent = [paid] if paid else []
        whole = ["  ".join(said)] if said else []
        ways = [[*speed, eta, *whole, *spent], [eta, *whole, *spent], [eta, *main, *spent], [*main, *spent]]
        return Drawn(f"round {done}/{rounds}", done / rounds, ways)

    with _line(drawn):

        def show(number: int, metrics: Metrics | None, spent: str | None) -> None:
            nonlocal done, said, paid
            done, paid = number, spent or ""
            said = said if metrics is None else _figures(metrics, spent is not None)

        yield show


def _less(figure: str) -> bool:
    """Returns whether a figure gives way where there is room for one."""
    return not figure.startswith("accuracy")


def _left(rounds: int, done: int, passed: float) -> str:
    """Returns the time that `rounds` more take, at the pace of those that are done."""
    return _clock(passed * rounds / done) if done > 0 else "--:--"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:02d}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _lines(rounds: int, begun: int) -> Show:
    started = time.perf_counter()

    def show(number: int, metrics: Metrics | None, spent: str | None) -> None:
        if metrics is not None:
            passed = time.perf_counter() - started
            left = (rounds - number) * passed / (number - begun)
            known = [figures(metrics, spent is not None), *([spent] if spent else [])]
            text = f"round {number}/{rounds}  {pace(number - begun, passed)}  ETA {left:.0f} s  {'  '.join(known)}"
            print(text, file=sys.stderr, flush=True)

    return show
