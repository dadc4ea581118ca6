"""Small runs to take models out of: a round or two on few examples, and models of the user's own in files."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

import fednormec as fn
from fednormec.config.assemble import assemble
from fednormec.config.schema import Config
from fednormec.runs.runner import perform

GRU = """
from torch import nn


class Next(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.words, self.gru = nn.Embedding(words, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, x):
        return self.head(self.gru(self.words(x))[0])


def build(input_shape, outputs, width: int = 6):
    return Next(outputs, width)
"""
SQUARES = "def squares(x):\n    return x.reshape(len(x), -1) ** 2\n"
WORDS, LENGTH = 11, 5
MODELS = ("linear", "mlp", "small_cnn", "resnet20", "gru")


def settings(model: str, /, **sections: dict[str, Any]) -> Config:
    """A config of two rounds without noise, on a few digits or a few texts."""
    data = {"source": "digits", "examples": 60, "test_examples": 40, "clients": 3}
    if model == "gru":
        data = {"source": "texts.npz", "inputs": "tokens", "clients": 3}
    base: Config = {
        "data": data,
        "model": {"name": "gru.py:build" if model == "gru" else model},
        "local": {"name": "gd", "step": 0.2},
        "method": {"name": "fed_avg"},
        "run": {"rounds": 2, "seed": 4},
    }
    return base | sections


def texts(folder: Path, examples: int = 30) -> None:
    """Texts of random words with the next words as targets, and the file of a model for them, in this folder."""
    words = np.random.default_rng(0).integers(0, WORDS, (examples, LENGTH + 1))
    np.savez(folder / "texts.npz", x=words[:, :-1], y=words[:, 1:])
    (folder / "gru.py").write_text(GRU)


def trained(out: Path, config: Config) -> torch.nn.Module:
    """Makes a run and returns its model as it was in the last round, never saved and read back."""
    seen: list[torch.Tensor] = []
    perform(config, "test", out, quiet=True, observers=[fn.Observer(after=lambda r, record: seen.append(r.x.clone()))])
    model = assemble(config).problem.model(seen[-1])
    return model.eval() if isinstance(model, torch.nn.Module) else model


def examples(model: str, count: int) -> torch.Tensor:
    rng = np.random.default_rng(1)
    if model == "gru":
        return torch.from_numpy(rng.integers(0, WORDS, (count, LENGTH)))
    return torch.from_numpy(rng.standard_normal((count, 1, 8, 8))).float()
