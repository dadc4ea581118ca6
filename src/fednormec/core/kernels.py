"""Functions in C (kernels.c) that do in one or two passes over memory what torch does in many.

They are compiled when the package is installed, if there is a C compiler. Without them torch's own functions are used,
and the last digits of a result differ. `FEDNORMEC_KERNELS=0` in the environment switches them off, to compare.
"""

import ctypes
import importlib.util
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

MOST_CHANNELS = 4096
BYTES, SUMS, AREA = 32, 12, 256  # of vectors, in registers and of pixels, as kernels.c has them
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
    updates: Tensor, memory: Tensor, parameter: float, clips: bool, radius: float, most: float, beta: float,
    unit: float,
) -> Tensor:  # fmt: skip
    """Computes updates <- updates - memory, memory <- memory + beta f_i updates, row by row; returns the factors f_i.

    f_i is min(length(n), most) / n for a norm n, where length(n) is radius n / (n + parameter), or min(n, parameter) if
    it `clips`. Rows whose norm or f_i is near the ends of the number range, or not a number, get f_i = nan and leave
    the memory alone. With a unit above 0 the others become messages on that grid, updates <- f_i updates rounded
    towards zero, and memory <- memory + beta updates.
    """
    factors = updates.new_empty(len(updates))
    numbers = map(ctypes.c_double, (parameter, radius, most, beta, unit))
    places = _whole(*updates.shape, updates.stride(0), memory.stride(0), int(clips))
    _call("feedback", updates, memory, *places, *numbers, factors)
    return factors


def truncate_(rows: Tensor, factors: Tensor | None, unit: float) -> None:
    """Rounds rows, times their factors, towards zero to multiples of a unit, a power of two; in place."""
    given = None if factors is None else factors.to(rows.dtype).contiguous()
    _call("truncate", rows, _or_null(given), *_whole(*rows.shape, rows.stride(0)), ctypes.c_double(unit))


def sum_units(rows: Tensor, sends: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """Returns the sum of the rows that are sent, float64 (d,), and the sum of each row's squares, float64 (B,).

    Both are in units, a power of two, to whole numbers of which the rows are rounded towards zero. A row that is not
    sent counts as 0 whatever it holds.
    """
    total, squares = rows.new_zeros(rows.shape[1], dtype=torch.float64), rows.new_empty(len(rows), dtype=torch.float64)
    sizes = _whole(*rows.shape, rows.stride(0))
    _call("sum_units", rows, sends.to(rows.dtype).contiguous(), *sizes, ctypes.c_double(unit), total, squares)
    return total, squares


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
Pair = tuple[int, int]


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


def convolves() -> bool:
    """Returns whether the functions for convolutions are worth it here: compiled for AVX2, and the processor has it."""
    compiled = library()
    return compiled is not None and compiled.convolves() != 0


class Convolution(ctypes.Structure):
    """Convolution of as many images for each client: (height, width, c) to (high, wide, o), by kernels (h, w)."""

    _fields_ = [
        (name, ctypes.c_long)
        for name in (
            "clients", "each", "height", "width", "c", "high", "wide", "o", "h", "w", "down", "right", "top", "left",
        )
    ]  # fmt: skip


def convolution(images: torch.Size, clients: int, kernel: torch.Size, stride: Pair, padding: Pair) -> Convolution:
    """Returns the convolution of images (n, c, height, width) by kernels (o, c, h, w)."""
    (n, c, *sides), (o, _, *sizes) = images, kernel
    results = [(a + 2 * p - k) // s + 1 for a, k, s, p in zip(sides, sizes, stride, padding, strict=True)]
    return Convolution(clients, n // clients, *sides, c, *results, o, *sizes, *stride, *padding)


def convolve(a: Tensor, weight: Tensor, bias: Tensor | None, k: Convolution, relu: bool) -> Tensor:
    """Convolves images by kernels (o, c, h, w) and adds biases (o,), with `relu` then takes the positive part.

    Or by those of each client, (B, o, c, h, w) and (B, o), views of the same rows.
    """
    z = _images(a, len(a), k.o, k.high, k.wide)
    packed = a.new_empty((k.h * k.w * k.c + 1 + SUMS) * _rounded(k.o, a))
    how = (_or_null(bias), _apart(weight), ctypes.byref(k), *_whole(int(relu)))
    _call("convolve", a, weight, *how, _bordered(a, k), packed, _places(k), z)
    return z


def convolve_back(delta: Tensor, z: Tensor | None, weight: Tensor, k: Convolution) -> Tensor:
    """Returns the gradient of the images, where `delta` is that of the result z; None if it is no positive part."""
    result = _images(delta, len(delta), k.c, k.height, k.width)
    masked = 0 if z is None else k.high * k.wide * k.o
    packed = delta.new_empty(k.h * k.o * _rounded(k.w * k.c, delta) + masked)
    how = (_apart(weight), ctypes.byref(k), _bordered(delta, k), packed, _places(k))
    _call("convolve_back", delta, _or_null(z), weight, *how, result)
    return result


def convolve_weights(
    a: Tensor, delta: Tensor, z: Tensor | None, k: Convolution, weight: Tensor, bias: Tensor | None
) -> None:
    """Writes each client's gradients of kernel and bias into (B, o, c, h, w) and (B, o), views of the same rows.

    `delta` is the gradient of the result z; None if it is no positive part.
    """
    channels, pixels = _rounded(k.o, a), k.high * k.wide
    together = min(k.each, max(1, AREA // pixels))
    packed = a.new_empty(0 if z is None and channels == k.o else together * pixels * channels)
    sums = a.new_empty((k.h * k.w * k.c + 1) * channels, dtype=torch.float64)
    how = (ctypes.byref(k), *_whole(together), _bordered(a, k, together), packed, sums)
    _call("convolve_weights", a, delta, _or_null(z), *how, weight, _or_null(bias), *_whole(weight.stride(0)))


def _or_null(tensor: Tensor | None) -> Tensor | ctypes.c_void_p:
    return ctypes.c_void_p(None) if tensor is None else tensor


def _rounded(numbers: int, like: Tensor) -> int:
    wide = BYTES // like.element_size()
    return -(-numbers // wide) * wide


def _bordered(like: Tensor, k: Convolution, images: int = 1) -> Tensor:
    """Returns room for images with their borders, and for what is read and written beyond the last number."""
    return like.new_empty(images * (k.height + 2 * k.top) * (k.width + 2 * k.left) * k.c + BYTES)


def _places(k: Convolution) -> Tensor:
    return torch.empty(k.high * k.wide + SUMS, dtype=torch.int64)


def _images(like: Tensor, n: int, c: int, height: int, width: int) -> Tensor:
    return torch.empty(n, c, height, width, dtype=like.dtype, memory_format=torch.channels_last)


def _apart(weight: Tensor) -> ctypes.c_long:
    """Returns how far the clients' kernels lie apart: 0 if there is one for all."""
    return ctypes.c_long(weight.stride(0) if weight.ndim == 5 else 0)


def _samples(a: Tensor, samples: int, groups: int) -> tuple[ctypes.c_long, ...]:
    return _whole(samples, a.numel() // (samples * a.shape[1]), a.shape[1], groups)


def _whole(*numbers: int) -> tuple[ctypes.c_long, ...]:
    return tuple(map(ctypes.c_long, numbers))


def _call(name: str, first: Tensor, *arguments: Any) -> None:
    function = getattr(library(), f"{name}_{NAMES[first.dtype]}")
    values = (first, *arguments)
    function(*(ctypes.c_void_p(v.data_ptr()) if isinstance(v, Tensor) else v for v in values))
