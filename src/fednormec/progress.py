"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere, nothing when asked for quiet."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fednormec.problems.base import Metrics

if TYPE_CHECKING:
    from fednormec.cells import News

Show = Callable[[int, Metrics | None, str | None], None]
BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def shown(rounds: int, quiet: bool, begun: int = 0) -> Iterator[Show]:
    """A function to call after each round with its number, where it was evaluated its figures, and the ε spent. What
    was done in an earlier command, `begun` rounds, says nothing about the pace of this one."""
    if quiet:
        yield lambda number, metrics, spent: None
    elif sys.stderr.isatty():
        with _bar(rounds, begun) as show:
            yield show
    else:
        yield _lines(rounds, begun)


@contextmanager
def counted(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A function to call with how much is done and how much there is: a bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def tallied(cells: int, line: Callable[["News"], str], quiet: bool) -> Iterator[Callable[["News"], None]]:
    """A function that hears of many runs side by side: a bar on a terminal, a line for each that ended elsewhere."""
    if quiet:
        yield lambda news: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    started, before, console = time.perf_counter(), [-1], Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"),
               TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(f"0/{cells} cells")

        def tell(news: "News") -> None:
            before[0] = news.rounds if before[0] < 0 else before[0]  # what an earlier command did tells no speed
            progress.update(
                task, completed=news.rounds, total=news.total, description=f"{news.cells_ended}/{cells} cells"
            )
            if news.ended is not None:
                spent = time.perf_counter() - started
                left = spent * (news.total - news.rounds) / max(1, news.rounds - before[0])
                said = f"{news.cells_ended}/{cells}  {spent:.0f} s, {left:.0f} s left  {line(news)}"
                if progress.disable:
                    print(said, file=sys.stderr, flush=True)
                else:
                    console.print(line(news), markup=False, highlight=False, emoji=False, soft_wrap=True)

        yield tell


def figures(metrics: Metrics, private: bool) -> str:
    """The few numbers one wants to see at once, in what a terminal of 80 columns has left beside a bar.

    Beside an ε nothing that looks at clients' data is shown without saying so.
    """
    named = {"test_accuracy": "accuracy {:.1%}", "test_loss": "test loss {:.4f}"}
    public, own = ([text.format(found[key]) for key, text in named.items() if key in found] for found in metrics)
    if "train_loss" not in metrics.not_private:  # of clients that are elsewhere
        return "  ".join(public)
    loss = f"loss {metrics.not_private['train_loss']:.4f}"
    if private:
        return "  ".join(public) or f"{[*own, loss][0]} (not private)"
    return "  ".join([loss, *[*public, *own][:1]])


def pace(rounds: int, seconds: float) -> str:
    """How fast rounds go by, in whichever unit has something to say.

    >>> pace(30, 10.0), pace(2, 360.0)
    ('3.0 rounds/s', '180.0 s/round')
    """
    return f"{rounds / seconds:.1f} rounds/s" if rounds > seconds else f"{seconds / rounds:.1f} s/round"


def sparkline(values: list[float], width: int = 40) -> str:
    """A curve in one line of text.

    >>> sparkline([0.0, 1.0, 2.0, 3.0])
    '▁▃▆█'
    """
    values = [v for v in values if math.isfinite(v)]
    picked = values[:: max(1, -(-len(values) // width))]
    low, high = min(values, default=0.0), max(values, default=0.0)
    return "".join(BARS[round((v - low) / ((high - low) or 1) * (len(BARS) - 1))] for v in picked)


@contextmanager
def _bar(rounds: int, begun: int) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    whole = Column(no_wrap=True)  # where the terminal is narrow the bar gives way
    columns = (
        TextColumn("round"), MofNCompleteColumn(table_column=whole), BarColumn(), TextColumn("{task.fields[speed]}"),
        TextColumn("ETA"), TimeRemainingColumn(compact=True, table_column=whole),
        TextColumn("{task.fields[figures]}"), TextColumn("{task.fields[spent]}", table_column=whole),
    )  # fmt: skip
    started = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=rounds, completed=begun, speed="", figures="", spent="")

        def show(number: int, metrics: Metrics | None, spent: str | None) -> None:
            speed = pace(number - begun, time.perf_counter() - started)
            progress.update(task, completed=number, speed=speed, spent=spent or "")
            if metrics is not None:
                progress.update(task, figures=figures(metrics, spent is not None))

        yield show


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
