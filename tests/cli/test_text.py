"""Text of others reaches no terminal as it is: whatever a file, a folder or another party says, a command prints lines
of its own with nothing in them but characters that can be seen."""

import contextlib
import io
import json
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from folders import made
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fednormec.cli.main import main
from fednormec.config.schema import dump
from fednormec.errors import note, visible
from fednormec.results.reading import find_runs
from fednormec.results.report import page
from fednormec.runs.progress import News, tallied
from fednormec.runs.summary import describe
from fednormec.sweeps.pool import Cell, Outcome
from fednormec.sweeps.ranking import line

pytestmark = pytest.mark.usefixtures("undrawn")

HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
CLEAR = "\x1b[2J\x1b[H"
FAKE = "\nfednormec: all is well.\r"
HOSTILE = ["\x1b", "\x9b", "\n", "\r", "\t", "\b", "\x00", "\x7f", "\x85", "\u2028", "\u2029", "\u202e", "\u2066"]
HOSTILE += [
    "\u200b",
    "\ufeff",
    "\xad",
    "\U000e0041",
    "[red]",
    "[/]",
    ":smile:",
    "<b>",
    "%s",
    "{0}",
    "文",
    "ñ",
    "a",
    " ",
]
TEXTS = st.lists(st.sampled_from(HOSTILE) | st.characters(codec="utf-8"), min_size=1, max_size=8).map("".join)
NAMES = TEXTS.filter(lambda text: not {"/", "\x00"} & set(text) and text.strip() not in ("", ".", ".."))
few, fewer = settings(max_examples=15, deadline=None), settings(max_examples=5, deadline=None)


def said(*arguments: object) -> str:
    """All that a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fednormec", *map(str, arguments)])
        with pytest.raises(SystemExit):
            main()
    return out.getvalue()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path, contextlib.chdir(path):
        yield Path()


def assert_seen(text: str, lines: int | None = None) -> None:
    """Nothing but characters that can be seen, in so many lines."""
    assert text.endswith("\n")
    assert not [c for c in text.replace("\n", "") if unicodedata.category(c) in HIDDEN]
    assert lines is None or text.count("\n") == lines


@given(st.text())
def test_what_can_be_seen_stays_and_the_rest_is_spelled(text: str) -> None:
    shown = visible(text)
    assert not [c for c in shown if unicodedata.category(c) in HIDDEN]
    assert visible(shown) == shown
    kept = [c for c in text if unicodedata.category(c)[0] in "LNPSMZ" and unicodedata.category(c) not in HIDDEN]
    assert (shown == text) == (len(kept) == len(text))


def test_letters_of_any_script_stay() -> None:
    for text in ("ε ≤ 4.00 at δ = 1e-05", "données à part", "数据　集", "ग्राहक", "😀", r"C:\new"):
        assert visible(text) == text
    assert visible(CLEAR + FAKE + "\u202e") == r"\x1b[2J\x1b[H\nfednormec: all is well.\r\u202e"


@given(st.text(min_size=1), st.integers(2, 40))
def test_a_long_text_ends(text: str, most: int) -> None:
    shown = visible(text, most)
    assert len(shown) <= most
    assert shown == visible(text) or (shown.endswith("…") and visible(text).startswith(shown[:-1]))


@given(TEXTS)
def test_a_note_is_one_line(text: str) -> None:
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        note(text)
    assert_seen(err.getvalue(), 1)


@few
@given(NAMES)
@example("--" + CLEAR)
@example(FAKE)
def test_the_name_of_a_file_that_is_no_config(name: str) -> None:
    with folder():
        assert_seen(said("run", name), None if name.startswith("-") else 1)
        assert_seen(said("run", "a", name))  # what Click says
        assert_seen(said("compare", "./" + name), 1)


@fewer
@given(NAMES)
def test_the_names_of_run_folders_in_tables_and_notes(name: str) -> None:
    with folder() as here:
        run = made(here / "runs" / name, [0.5])
        (run / "summary.json").unlink()
        made(here / "runs" / "other", [0.6], run={"rounds": 7})
        text = said("compare", "runs")
        assert_seen(text, text.count("\n"))
        assert sum(one.startswith("note: ") for one in text.splitlines()) == 1
        assert_seen(said("compare", "runs", "--json"), 2)
        assert_seen(said("report", "runs", "--out", f"{name[:20]}.html"), 2)


@fewer
@given(TEXTS)
def test_what_a_run_folder_says_in_a_table_a_summary_and_a_page(text: str) -> None:
    with folder() as here:
        one = made(here / "one", [0.5], method={"name": text}, data={"source": text})
        made(here / "two", [0.6], method={"name": "fed_avg"})
        content = json.loads((one / "summary.json").read_text()) | {"method": text, "status": text, "privacy": text}
        (one / "summary.json").write_text(json.dumps(content))
        table = said("compare", "one", "two")
        assert_seen(table)
        assert len(table.splitlines()) == table.count("\n")
        shown = page(find_runs(["one", "two"]))
        assert not [c for c in shown.replace("\n", "") if unicodedata.category(c) in HIDDEN]
        facts = {"metrics": {}, "not_private": [], "left_out": 0, "statement": None, "rounds": 1, "clients": 2}
        ended = facts | {"method": text, "parameters": 3, "status": "budget_spent", "message": text}
        described = describe(ended | {"privacy": text, "out": text, "report": text})
        assert_seen(described + "\n")
        names = ("stopped  ", "privacy  ", "run folder  ", "report  ", "  ")
        assert all(one.startswith(names) for one in described.split("\n")[1:])


@pytest.mark.long
@few
@given(TEXTS)
def test_a_text_in_a_config_and_what_is_wrong_with_it(text: str) -> None:
    quoted = json.dumps(text).replace("\x7f", "\\u007f")
    with folder() as here:
        (here / "text.toml").write_text(f"[method]\nname = {quoted}\n", encoding="utf-8")
        assert_seen(said("run", "text.toml"), 1)
        (here / "broken.toml").write_text(f"[run]\n{text} =", encoding="utf-8", newline="")
        assert_seen(said("run", "broken.toml"), 1)
        (here / "key.toml").write_text(f"[{quoted}]\n", encoding="utf-8")
        assert_seen(said("config", "key.toml"), 1)
        assert_seen(said("run", "--set", f"data.source={text}"), 1)
        assert_seen(dump({"a": {"b": text}}), 2)


@few
@given(NAMES.filter(lambda name: name != "a"))  # which is there already
def test_the_names_of_clients_in_data(name: str) -> None:
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    with folder() as here:
        (here / "clients").mkdir()
        np.savez(here / "clients" / "a.npz", x=x, y=y)
        with contextlib.suppress(OSError):  # a name of 255 bytes or more
            np.savez(here / "clients" / f"{name}.npz", x=x[:, :1], y=y)
            assert_seen(said("run", "--set", "data.source=clients"), 1)
        np.savez(here / "one.npz", x=x, y=np.array([0, 1, 0, 9]), client=np.array([name, name, "b", "b"]))
        assert_seen(said("run", "--set", "data.source=one.npz", "--set", "model.name=small_cnn"), 1)


@few
@given(TEXTS)
def test_the_cells_of_a_sweep(text: str) -> None:
    with folder():
        cells = said("sweep", "--over", f"data.source=[{json.dumps(text)}, 'digits']", "--list")
        assert_seen(cells, 1 if cells.startswith("fednormec: ") else 2)
    outcome = Outcome(Cell(text, {}, {}), Path(text), None, text)
    assert line(News(0, 1, outcome, 1)) == visible(f"{text}: failed: {text}")


def test_a_terminal_takes_no_orders_from_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    outcome = Outcome(Cell("[red]a[/red] :smile: \x1b[2J", {}, {}), Path("a"), None, "why")
    with tallied(1, line, quiet=False) as tell:
        tell(News(1, 1, outcome, 1))
    assert r"[red]a[/red] :smile: \x1b[2J: failed: why" in terminal.getvalue()
    assert "\x1b[2J" not in terminal.getvalue()
