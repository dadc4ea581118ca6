"""Standard normal vectors, and whether values are normal with some standard deviation."""

import math

import numpy as np
import torch
from scipy import stats
from torch import Tensor

LEVEL = 1e-6  # one in a million, for each of two tests


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def accepts(values: np.ndarray, std: float) -> bool:
    """A two-sided chi-square test of the variance, and a test that the mean is zero."""
    n = values.size
    inside = stats.chi2.ppf(LEVEL / 2, n) <= (values**2).sum() / std**2 <= stats.chi2.ppf(1 - LEVEL / 2, n)
    return bool(inside and abs(values.mean()) <= stats.norm.ppf(1 - LEVEL / 2) * std / math.sqrt(n))


def has_std(values: np.ndarray, std: float) -> bool:
    """Accepts this standard deviation, and neither two thirds of it nor three halves."""
    return accepts(values, std) and not accepts(values, std * 2 / 3) and not accepts(values, std * 3 / 2)
