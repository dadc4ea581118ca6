"""Text of others, fit for a terminal and a page: nothing in it moves a cursor, begins a line or hides."""

import sys
import unicodedata


def visible(text: object, most: int | None = None) -> str:
    """The text in one line, with escapes for control and format characters, line breaks and what stands for no
    character; letters and spaces of any script stay. With `most` it ends after so many characters.

    >>> visible("a\\x1b[2J\\nb\\u202e"), visible("naïve 文字"), visible("abcdef", 4)
    ('a\\\\x1b[2J\\\\nb\\\\u202e', 'naïve 文字', 'abc…')
    """
    given = str(text) if most is None else str(text)[: most + 1]
    shown = "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else repr(c)[1:-1] for c in given)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 1]}…"


def visible_lines(text: object) -> str:
    """A text of several lines that are its own."""
    return "\n".join(map(visible, str(text).split("\n")))


def note(said: object) -> None:
    """One line on stderr, which what is said cannot leave."""
    print(f"note: {visible(said)}", file=sys.stderr, flush=True)
