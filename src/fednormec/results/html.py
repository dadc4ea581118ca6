"""Parts of a page: tables, tiles, legends. Everything that comes from a file is escaped."""

import html
from collections.abc import Sequence

from fednormec.drawing import Look
from fednormec.errors import visible, visible_lines
from fednormec.privacy.labels import NOT_PRIVATE

AT_FIRST = 12  # lines of a table before the rest is folded away
SVG_DASHES = {"-": "", "--": "6 2.6", "-.": "8 2.4 1.6 2.4", ":": "1.6 2.6"}
SVG_MARKERS = {
    "o": '<circle cx="18" cy="7" r="3.4"/>', "s": '<path d="M14.8 3.8h6.4v6.4h-6.4z"/>',
    "^": '<path d="M18 3l4 7.4h-8z"/>', "v": '<path d="M18 11l4-7.4h-8z"/>',
    "D": '<path d="M18 2.6L22.4 7 18 11.4 13.6 7z"/>', "": "",
}  # fmt: skip


def legend_of(entries: Sequence[tuple[Look, str]]) -> str:
    """Returns a list of looks and the names of their lines; empty without entries."""
    listed = "".join(f"<li>{_swatch(one)}<span>{marked(name)}</span></li>" for one, name in entries)
    widest = min(60, max((len(name) for _, name in entries), default=0))
    return f'<ul class="legend" style="--widest:{widest}ch">{listed}</ul>' if entries else ""


def _swatch(one: Look) -> str:
    dash = f' stroke-dasharray="{SVG_DASHES[one.dash]}"' if SVG_DASHES.get(one.dash) else ""
    line = f'<path d="M1 7h34" stroke="{one.colour}" stroke-width="2"{dash}/>' if one.dash else ""
    return (
        f'<svg viewBox="0 0 36 14" width="36" height="14" aria-hidden="true" fill="{one.colour}">'
        f"{line}{SVG_MARKERS[one.marker]}</svg>"
    )


def card(name: str, value: object, about: object = "", kind: str = "") -> str:
    """Returns a box with a name, a value in bold and small words about it; `kind` is its CSS class."""
    small = f"<small>{marked(about)}</small>" if about else ""
    return f'<div class="tile {kind}"><dt>{escape(name)}</dt><dd><b>{escape(value)}</b>{small}</dd></div>'


def word_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of words, all lines alike."""
    return plain_table("words", header, rows, [""] * len(rows))


def folded_table(kind: str, header: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str]) -> str:
    """Returns a table whose first lines are seen, the rest on demand and on paper, in columns of the same widths."""
    if len(rows) <= AT_FIRST:
        return plain_table(kind, header, rows, kinds)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)][1:]
    columns = "<col>" + "".join(f'<col style="width:calc({width}ch + 20px)">' for width in widths)
    seen, rest = (
        plain_table(kind, header, rows[part], kinds[part], columns) for part in (slice(AT_FIRST), slice(AT_FIRST, None))
    )
    what = counted(len(rows) - AT_FIRST, "more setting")
    return f'{seen}<details class="more"><summary>{what}</summary>{rest}</details>'


def plain_table(
    kind: str, header: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str], columns: str = ""
) -> str:
    """Returns a table that is seen whole.

    Args:
        kind: CSS class of the table.
        header: names of the columns.
        rows: cells, line by line; the first of a line names it.
        kinds: CSS class of each line.
        columns: HTML of the columns' widths.
    """
    head = "".join(f'<th scope="col">{marked(cell)}</th>' for cell in header)
    body = "".join(_row(header, row, kind) for row, kind in zip(rows, kinds, strict=True))
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}">{columns}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(header: Sequence[str], cells: Sequence[str], kind: str) -> str:
    """Returns a line whose cells know their columns: on a phone, figures are a card and these their names."""
    named = zip(header[1:], cells[1:], strict=True)
    rest = "".join(f'<td data-label="{escape(name)}">{marked(cell)}</td>' for name, cell in named)
    return f'<tr class="{kind}"><th scope="row">{marked(cells[0].strip())}</th>{rest}</tr>'


def counted(many: int, what: str) -> str:
    """Returns a number with its noun, in the plural unless it is 1."""
    return f"{many} {what}" + "s" * (many != 1)


def marked(text: object) -> str:
    """Escapes a text, and puts the label of what protects nobody in red."""
    return escape(text).replace(NOT_PRIVATE, f'<span class="alarm-text">{NOT_PRIVATE}</span>')


def escape(text: object) -> str:
    """Escapes a text for a page, and leaves nothing in it that hides or turns what stands beside it."""
    return html.escape(visible(text))


def pre(text: str) -> str:
    """Escapes a text of several lines as `escape` does one."""
    return f"<pre>{html.escape(visible_lines(text))}</pre>"
