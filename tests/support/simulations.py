"""Small problems and every method on them, as the tests of the engine run them."""

from typing import Any

import numpy as np
import torch

import fednormec as fn
from fednormec.algorithms.methods import METHODS
from fednormec.engine.round import Round

LOCAL = fn.gd(0.3, steps=2)
VARIANTS = {
    "ef21_sgdm, top_k": lambda: fn.ef21_sgdm(LOCAL, bound="top_k", k=2),
    "ef14, top_k": lambda: fn.ef14(LOCAL, bound="top_k", k=2),
    "ef14, normalize": lambda: fn.ef14(LOCAL, bound="normalize", tau=0.05, alpha=0.1),
    "econtrol, top_k": lambda: fn.econtrol(LOCAL, bound="top_k", k=2),
    "centred, leaky": lambda: fn.centred(LOCAL, leak=0.1),
}  # methods that keep or send something else with other settings than the defaults
CONTRACTS = [*METHODS, *VARIANTS]


def mlp_problem(
    clients: int = 9, sizes: list[int] | None = None, dtype: torch.dtype = torch.float32, **settings: Any
) -> fn.NeuralProblem:
    """A small network, always from the same weights, and clients with so many examples each, eight by default."""
    rng = np.random.default_rng(0)
    module = fn.models.mlp((6,), 3, hidden=(5,))
    fn.models.reset(module, np.random.default_rng(1))
    pairs = [(rng.standard_normal((n, 6)), rng.integers(0, 3, n)) for n in sizes or [8] * clients]
    return fn.NeuralProblem(module, pairs, dtype=dtype, **settings)


def build(name: str) -> fn.Algorithm:
    """A method by its name, with its defaults, or a variant of one."""
    if name in VARIANTS:
        return VARIANTS[name]()
    return METHODS[name].build(LOCAL) if METHODS[name].takes_local else METHODS[name].build()


def finish(
    problem: Any, algorithm: fn.Algorithm, *asked: Any, rounds: int = 6, seed: int = 1, **settings: Any
) -> Round:
    """The last of so many rounds."""
    *_, last = fn.simulate(problem, algorithm, *asked, rounds=rounds, seed=seed, **settings)
    return last
