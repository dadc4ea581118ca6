"""Functions in C (kernels.c) that do in one or two passes over memory what torch does in many.

They are compiled when the package is installed, if there is a C compiler. Without them torch's own functions are used,
and the last digits of a result differ. `FEDNORMEC_KERNELS=0` in the environment switches them off, to compare.
"""

import ctypes
import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

MOST_CHANNELS = 4096
NAMES = {torch.float32: "float32", torch.float64: "float64"}


@cache
def library() -> ctypes.CDLL | None:
    """Loads the compiled functions; None if there are none or they are switched off."""
    found = importlib.util.find_spec("fednormec.core._kernels")
    if found is None or found.origin is None or os.environ.get("FEDNORMEC_KERNELS") == "0":
        return None
    return ctypes.CDLL(found.origin)


def take(images: Tensor) -> bool:
    """Returns whether the functions here take such images (n, channels, height, width)."""
    return (
        images.ndim == 4
        and images.shape[1] <= MOST_CHANNELS
        and images.dtype in NAMES
        and images.device.type == "cpu"
        and library() is not None
        and images.is_contiguous(memory_format=torch.channels_last)
    )


def take_rows(one: Tensor, *others: Tensor) -> bool:
    """Returns whether the functions here take such blocks of rows: of one shape and dtype, and no row upon another."""
    alike = one.ndim == 2 and all(rows.shape == one.shape and rows.dtype == one.dtype for rows in others)
    return alike and one.dtype in NAMES and library() is not None and all(
        rows.device.type == "cpu" and rows.stride(1) == 1 and (len(rows) == 1 or rows.stride(0) >= rows.shape[1])
        for rows in (one, *others)
    )  # fmt: skip


def feedback_(
    updates: Tensor, memory: Tensor, parameter: float, clips: bool, radius: float, most: float, beta: float
) -> Tensor:
    """Computes updates <- updates - memory, memory <- memory + beta f_i updates, row by row; returns the factors f_i.

    f_i is min(length(n), most) / n for a norm n, where length(n) is radius n / (n + parameter), or min(n, parameter) if
    it `clips`. Rows whose norm or f_i is near the ends of the number range, or not a number, get f_i = nan and leave
    the memory alone.
    """
    factors = updates.new_empty(len(updates))
    numbers = map(ctypes.c_double, (parameter, radius, most, beta))
    places = _whole(*updates.shape, updates.stride(0), memory.stride(0), int(clips))
    _call("feedback", updates, memory, *places, *numbers, factors)
    return factors


def sum_rows(rows: Tensor, weights: Tensor, exactly: bool) -> tuple[Tensor, Tensor]:
    """Returns the sum of weights_i row_i, float64 (d,), and the sum of each row's squares, float64 (B,).

    Strips of 64 rows are added in the rows' dtype, or `exactly` all of them in float64. A row of weight 0 counts as 0
    whatever it holds, also in the squares.
    """
    total, squares = rows.new_zeros(rows.shape[1], dtype=torch.float64), rows.new_empty(len(rows), dtype=torch.float64)
    sizes = _whole(*rows.shape, rows.stride(0))
    _call("sum_rows_exactly" if exactly else "sum_rows", rows, weights, *sizes, total, squares)
    return total, squares


Known = tuple[Tensor, Tensor, Tensor, Tensor]


def group_norm(
    a: Tensor, samples: int, groups: int, weight: Tensor, bias: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Known]:
    """Normalises images by groups of channels; returns the result and what `group_norm_back` must know.

    Per sample and group, with r = 1/sqrt(mean(a^2) - mean(a)^2 + eps), the result is w r (a - mean(a)) + b; with `relu`
    its positive part. A sample is one image, or several images together. Weight and bias are (C,), or (B, C) where each
    of B clients has as many of the samples.
    """
    clients, stride = (len(weight), weight.stride(0)) if weight.ndim == 2 else (1, 0)
    mean, scale, shift, r = (a.new_empty(samples, width) for width in (groups, a.shape[1], a.shape[1], groups))
    z, how = torch.empty_like(a), _whole(samples // clients, stride, int(relu))
    sizes = _samples(a, samples, groups)
    _call("group_norm", a, *sizes, weight, bias, *how, ctypes.c_double(eps), z, mean, scale, shift, r)
    return z, (mean, scale, shift, r)


def group_norm_back(
    a: Tensor, samples: int, delta: Tensor, groups: int, relu: bool, known: Known
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of a, and for each sample those of weight and bias, where `delta` is that of the result."""
    result, weights, biases = torch.empty_like(a), *(a.new_empty(samples, a.shape[1]) for _ in range(2))
    sizes = (*_samples(a, samples, groups), *_whole(int(relu)))
    _call("group_norm_back", a, delta, *sizes, *known, result, weights, biases)
    return result, weights, biases


def max_pool(a: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    """Returns the largest of each two by two pixels, with `relu` its positive part, and which of them it was."""
    n, c, height, width = a.shape
    z = a.new_empty(n, height // 2, width // 2, c).permute(0, 3, 1, 2)
    which = torch.empty(z.numel(), dtype=torch.int32)
    _call("max_pool", a, *_whole(n, height, width, c, int(relu)), z, which)
    return z, which


def max_pool_back(delta: Tensor, which: Tensor, shape: torch.Size) -> Tensor:
    """Returns the gradient of the images, of this shape, where `delta` is that of the result."""
    n, c, height, width = shape
    result = delta.new_empty(n, height, width, c).permute(0, 3, 1, 2)
    _call("max_pool_back", delta, which, *_whole(n, height, width, c), result)
    return result


def _samples(a: Tensor, samples: int, groups: int) -> tuple[ctypes.c_long, ...]:
    return _whole(samples, a.numel() // (samples * a.shape[1]), a.shape[1], groups)


def _whole(*numbers: int) -> tuple[ctypes.c_long, ...]:
    return tuple(map(ctypes.c_long, numbers))


def _call(name: str, first: Tensor, *arguments: "Tensor | ctypes.c_long | ctypes.c_double") -> None:
    function = getattr(library(), f"{name}_{NAMES[first.dtype]}")
    values = (first, *arguments)
    function(*(ctypes.c_void_p(v.data_ptr()) if isinstance(v, Tensor) else v for v in values))
