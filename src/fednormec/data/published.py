"""Tables that the other federations are published in, column by column; nothing in them is executed."""

import csv
import io
import lzma
import pickletools
from collections.abc import Collection, Sequence

import numpy as np

from fednormec.data.archives import Contents
from fednormec.errors import UserError

Columns = dict[str, np.ndarray]
RATING = np.dtype([("student", "<u2"), ("lecturer", "<u2"), ("department", "u1"), ("student_age", "u1"),
                   ("lecture_age", "u1"), ("service", "u1"), ("rating", "u1")])  # fmt: skip
GENRES = (
    "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
MOST_GENRES = 6
FILM_RATING = np.dtype([("user", "<u2"), ("film", "<u2"), ("year", "<u2"), ("genres", "u1", (MOST_GENRES,)),
                        ("rating", "u1"), ("time", "<u4")])  # fmt: skip
PUPIL = np.dtype([("authority", "<u2"), ("school", "<u2"), ("female", "u1"), ("age", "i1"), ("gcse", "<f8"),
                  ("score", "u1")])  # fmt: skip
PERSON_YEAR = np.dtype([("person", "<u2"), ("year", "<u2"), ("age", "u1"), ("female", "u1"), ("married", "u1"),
                        ("kids", "u1"), ("out_of_work", "u1"), ("self_employed", "u1"), ("education", "<f8"),
                        ("income", "<f8"), ("visits", "u1"), ("hospital", "u1")])  # fmt: skip


def read_ratings(contents: Contents) -> np.ndarray:
    """Returns a row for each rating of a lecture, from InstEval.csv."""
    (content,) = contents
    names = ("s", "d", "dept", "studage", "lectage", "service", "y")
    return _rows(RATING, _csv(content, ",", names).values())


def read_film_ratings(contents: Contents) -> np.ndarray:
    """Returns a row for each rating of a film, from MovieLens' ratings and its films, both separated by tabs.

    Of a film's genres there are the numbers in GENRES, from 1 on, and then 0; its year is 0 where it is unknown.
    """
    given = _csv(contents[0], "\t", ("user_id:token", "item_id:token", "rating:float", "timestamp:float"))
    user, film, rating, time = given.values()
    films = _lines(contents[1], "\t", ("item_id:token", "release_year:token", "class:token_seq"))
    years, genres = dict[int, int](), dict[int, list[int]]()
    for number, year, words in films:
        own = [1 + GENRES.index(word) for word in words.split() if word in GENRES]
        years[int(number)] = int(year) if year.isdigit() else 0
        genres[int(number)] = (own + [0] * MOST_GENRES)[:MOST_GENRES]
    of_each = film.astype(int).tolist()
    if not set(of_each) <= set(years):
        raise UserError("the published films lack one that was rated: they are not MovieLens' own.")
    columns = [user, film, np.array([years[n] for n in of_each]), np.array([genres[n] for n in of_each]), rating, time]
    return _rows(FILM_RATING, columns)


def read_pupils(contents: Contents) -> np.ndarray:
    """Returns a row for each pupil, from Chem97 as it is published: a compressed data frame of pandas.

    That is a pickle, whose list of instructions is looked through for its columns; none of them is carried out.
    """
    (content,) = contents
    try:
        blocks, genders = _blocks(lzma.decompress(content))
        numbers, whole = np.frombuffer(blocks[0], "<f8"), np.frombuffer(blocks[1], "<i8")
        gcse, _ = numbers.reshape(2, -1)
        _, authority, school, _, score, age = whole.reshape(6, -1)
        return _rows(PUPIL, [authority, school, np.array(genders) == "F", age, gcse, score])
    except (lzma.LZMAError, EOFError, ValueError, IndexError) as error:
        raise UserError("the published table of Chem97 cannot be read: it is not the one that was expected.") from error


def read_person_years(contents: Contents) -> np.ndarray:
    """Returns a row for each person and year, from rwm5yr.csv."""
    (content,) = contents
    names = (
        "id", "year", "age", "female", "married", "kids", "outwork", "self", "educ", "hhninc", "docvis", "hospvis",
    )  # fmt: skip
    return _rows(PERSON_YEAR, _csv(content, ",", names).values())


def _csv(content: bytes, separator: str, names: Sequence[str]) -> Columns:
    """Returns the named columns of a table, all of them numbers."""
    lines = _lines(content, separator, names)
    try:
        return {name: np.array(column, float) for name, column in zip(names, zip(*lines, strict=True), strict=True)}
    except ValueError as error:
        raise UserError(f"the published table cannot be read: {error}.") from error


def _lines(content: bytes, separator: str, names: Sequence[str]) -> list[list[str]]:
    """Returns the named fields of each line of a table whose first line has the names."""
    text = content.decode("utf-8", "replace")
    rows = [*csv.reader(io.StringIO(text))] if separator == "," else [row.split("\t") for row in text.splitlines()]
    head, *lines = rows or [[]]
    missing = [name for name in names if name not in head]
    if missing or not lines or any(len(line) != len(head) for line in lines):
        wrong = f"it lacks the column {missing[0]}" if missing else "its lines are not all of one length"
        raise UserError(f"the published table cannot be read: {wrong}.")
    where = [head.index(name) for name in names]
    return [[line[at] for at in where] for line in lines]


def _blocks(pickled: bytes) -> tuple[list[bytes], list[str]]:
    """Returns the blocks of numbers that a pickle holds, in its order, and each F or M of its texts."""
    blocks, genders, memo, last = list[bytes](), list[str](), list[str](), ""
    for instruction, argument, _ in pickletools.genops(pickled):
        if instruction.name == "MEMOIZE":
            memo.append(last)
            continue
        last = ""
        if isinstance(argument, bytearray):
            blocks.append(bytes(argument))
        elif isinstance(argument, str):
            last = argument
        elif instruction.name == "BINGET" and isinstance(argument, int):
            last = memo[argument]
        genders += [last] if last in ("F", "M") else []
    return blocks, genders


def _rows(dtype: np.dtype[np.void], columns: Collection[np.ndarray]) -> np.ndarray:
    rows = np.empty(len(next(iter(columns))), dtype)
    for name, column in zip(dtype.names or (), columns, strict=True):
        rows[name] = column
    return rows
