"""Shakespeare's works as examples: what each role says, in windows of characters, and the poems, which no role owns.

The texts have one form: a paragraph begins with the name of who speaks, alone on its line, stage directions stand in
brackets, and a paragraph without a name goes on with the speech before it.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from fednormec.data.archives import Contents

LENGTH = 80  # characters of an example
OTHER = 0  # the token of whatever is not in the alphabet
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # tokens 1, 2, ...: public, whatever the texts hold
TOKENS = 1 + len(ALPHABET)
LEAST_SPEECHES, LEAST_CHARACTERS = 2, 100
PLAYS = (
    "alls_well_that_ends_well", "antony_and_cleopatra", "as_you_like_it", "comedy_of_errors", "coriolanus",
    "cymbeline", "hamlet", "henry_iv_part_1", "henry_iv_part_2", "henry_v", "henry_vi_part_1", "henry_vi_part_2",
    "henry_vi_part_3", "henry_viii", "john", "julius_caesar", "lear", "loves_labours_lost", "macbeth",
    "measure_for_measure", "merchant_of_venice", "merry_wives_of_windsor", "midsummer_nights_dream",
    "much_ado_about_nothing", "othello", "pericles", "richard_ii", "richard_iii", "romeo_and_juliet",
    "taming_of_the_shrew", "tempest", "timon_of_athens", "tragedy_of_titus_andronicus", "troilus_and_cressida",
    "twelfth_night", "two_gentlemen_of_verona", "winters_tale",
)  # fmt: skip
POEMS = ("lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets")
ROW = np.dtype([("role", "S48"), ("text", "u1", (LENGTH + 1,))])

_WORD = r"(?:[A-Z0-9][\w'.-]*,?|of|and|the|to|&)"
_NAME = re.compile(rf"[A-Z][\w'.-]*,?(?: +{_WORD}){{0,5}}\.|[A-Z][A-Z '-]+")
_HEADING = re.compile(r"(act|scene|prologue|epilogue|induction|dumb show|the end|finis)\b", re.I)
_DIRECTION = re.compile(r"(exit|exeunt|enter|re-enter)\b", re.I)


def read_works(contents: Contents) -> np.ndarray:
    """Returns a row for each window: of the plays, whose roles have names, and then of the poems, without a role.

    Args:
        contents: the texts of PLAYS and of POEMS, in that order.
    """
    texts = [content.decode("ascii", "replace").replace("\r", "") for content in contents]
    spoken = {
        f"{play}/{role}": "\n".join(own)
        for play, text in zip(PLAYS, texts, strict=False)
        for role, own in speeches(text).items()
        if len(own) >= LEAST_SPEECHES and sum(map(len, own)) >= LEAST_CHARACTERS
    }
    parts = [_rows(role, text) for role, text in spoken.items()]
    return np.concatenate([*parts, *(_rows("", poem) for poem in texts[len(PLAYS) :])])


def speeches(play: str) -> dict[str, list[str]]:
    """Returns what each role of a play says, speech by speech, without stage directions."""
    roles = dict[str, list[list[str]]]()
    for role, begins, lines in _paragraphs(play):
        own = roles.setdefault(role, [])
        if begins:
            own.append([])
        own[-1] += lines
    return {role: ["\n".join(lines) for lines in own if lines] for role, own in roles.items()}


def encode(text: str) -> np.ndarray:
    """Returns the tokens of a text, one for each character."""
    table = np.full(128, OTHER, np.uint8)
    table[[ord(c) for c in ALPHABET]] = 1 + np.arange(len(ALPHABET))
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    return np.where(codes < len(table), table[codes % len(table)], np.uint8(OTHER))


def decode(tokens: Sequence[int] | np.ndarray) -> str:
    """Returns the text of some tokens, with a replacement character for what was not in the alphabet."""
    return "".join("\ufffd" if token == OTHER else ALPHABET[token - 1] for token in tokens)


def _paragraphs(play: str) -> Iterator[tuple[str, bool, list[str]]]:
    """Yields who speaks, whether a speech begins, and its lines; nothing before the first act or scene."""
    begun, role = False, ""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"\[[^\]]*\]", "", play)):
        lines = [line.strip() for line in paragraph.strip().split("\n")]
        if _HEADING.match(lines[0]) and len(lines) <= 3:
            begun, role = True, ""
            continue
        begins = _NAME.fullmatch(lines[0]) is not None and not _DIRECTION.match(lines[0])
        if begins:
            role = lines.pop(0).rstrip(".").upper()
        if begun and role:
            yield role, begins, [line for line in lines if line]


def _rows(role: str, text: str) -> np.ndarray:
    """Cuts a text into windows of LENGTH characters and the next one; the last ends where the text does.

    A text that is shorter than a window has none.
    """
    tokens = encode(text)
    last = len(tokens) - LENGTH - 1
    starts = [*range(0, last, LENGTH), last] if last >= 0 else []
    rows = np.empty(len(starts), ROW)
    rows["role"], rows["text"] = role.encode(), tokens[np.add.outer(np.array(starts, int), np.arange(LENGTH + 1))]
    return rows
