"""Made-up federations in the archives in which the real ones are published."""

import hashlib
import io
import lzma
import pickle
import zipfile
from dataclasses import replace

import numpy as np
from image_files import tar_gz

from fednormec.data.archives import Archive
from fednormec.data.federations import FEDERATIONS, Federation
from fednormec.data.plays import PLAYS, POEMS

HAMLET = """HAMLET, PRINCE OF DENMARK

by William Shakespeare

PERSONS REPRESENTED.

Hamlet, Prince of Denmark.
Ophelia, Daughter to Polonius.

ACT I.

Scene I. Elsinore.

[Enter Hamlet and
Ophelia.]

Ham.
To be, or not to be, that is the question:
Whether 'tis nobler in the mind to suffer

[Exit Ophelia.]

The slings and arrows of outrageous fortune.

Oph. [Aside.]
My lord, I have remembrances of yours.

Scene II. Another room.

This line is nobody's.

Ham.
No, not I; I never gave you aught.

Oph.
My honour'd lord, you know right well you did, and with them words of so sweet breath composed.

Ghost.
Mark me.

Ham. and Oph.
O!
"""
OTHER_PLAY = """ACT I.

FIRST LORD.
{0} is a play in which I have a very long line to say, and then I say it {1} times again.

SECOND LORD
No.

FIRST LORD.
Here it is a second time, as it was promised to you and to everybody: in {0} I speak twice.

SECOND LORD
{2}
"""
POEM = "From fairest creatures we desire increase, {0}\nThat thereby beauty's rose might never die,\n" * 2
RATINGS = '"","s","d","studage","lectage","service","dept","y"\n' + "".join(
    f'"{n}","{n % 4 + 1}","{1 + n * 7 % 2160}","{2 * (n % 4) + 2}","{n % 6 + 1}","{n % 2}","{n % 15 + 1}",{n % 5 + 1}\n'
    for n in range(24)
)
FILM_RATINGS = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "".join(
    f"{n % 5 + 1}\t{n % 3 + 1}\t{n % 5 + 1}\t{881250949 + n}\n" for n in range(30)
)
FILMS = """item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq
1\tToy "Story\t1995\tAnimation Children's Comedy
2\tGoldenEye\t1925\tAction
3\tunkonwn\tunkonwn\tunknown
"""
PERSON_YEARS = (
    '"","id","docvis","hospvis","year","edlevel","age","outwork","female","married","kids","hhninc","educ","self"\n'
    + "".join(
        f'"{n}",{n // 3 + 1},{n % 3},0,{1984 + n % 3},1,{25 + n},{n % 2},{n % 2},1,0,3.05,10.5,0\n' for n in range(30)
    )
)


def pupils(count: int = 20) -> bytes:
    """As pandas pickles a frame of these columns: blocks of numbers, and a list of texts that repeat."""
    order = np.arange(count)
    whole = np.stack([order + 1, order // 8 + 1, order // 4 + 1, order + 1, 2 * (order % 6), order % 12 - 6])
    gcse = 4 + order % 9 / 2
    numbers = np.stack([gcse, gcse - gcse.mean()])
    genders = ["FM"[n % 2] for n in range(count)]
    frame = [bytearray(numbers.astype("<f8").tobytes()), bytearray(whole.astype("<i8").tobytes()), "gender", genders]
    return lzma.compress(pickle.dumps(frame, protocol=5))


def works() -> tuple[bytes, ...]:
    plays = [HAMLET if play == "hamlet" else OTHER_PLAY.format(play, n, "No. " * n) for n, play in enumerate(PLAYS)]
    return tuple(text.encode() for text in [*plays, *(POEM.format(poem) for poem in POEMS)])


CONTENTS: dict[str, tuple[bytes, ...]] = {
    "shakespeare": works(),
    "insteval": (RATINGS.encode(),),
    "movielens": (FILM_RATINGS.encode(), FILMS.encode()),
    "chem97": (pupils(),),
    "rwm5yr": (PERSON_YEARS.encode(),),
}


def packed(archive: Archive, contents: tuple[bytes, ...]) -> bytes:
    """The file of an archive with these members, and with something beside them."""
    members = {"README.md": b"hello", **dict(zip(archive.members, contents, strict=True))}
    if archive.within is not None:
        members = {archive.within: tar_gz(members)}
    if archive.file.endswith(".tar.gz"):
        return tar_gz(members)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as whole:
        for name, content in members.items():
            whole.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def published_as(real: Federation, contents: tuple[bytes, ...]) -> tuple[Federation, bytes]:
    """The real set with other content, as if that had been published; and the file it comes in."""
    file = packed(real.archive, contents)
    archive = replace(real.archive, sha256=sha256(file), members_sha256=sha256(b"".join(contents)))
    rows = real.parse(contents)
    return replace(real, archive=archive, rows=len(rows), sha256=sha256(rows.tobytes())), file


TINY = {name: published_as(FEDERATIONS[name], contents) for name, contents in CONTENTS.items()}
