"""Gradients of many clients from one pass over all their examples.

Forward and backward run once for the examples of a whole tile together; a layer remembers what went in, is told what
came back, and multiplies the two client by client, straight into the rows of the result: nothing is computed in one
place and copied to another.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednormec.core import kernels
from fednormec.core.vectors import Layout
from fednormec.errors import UserError
from fednormec.problems.apart import changed

FEW, SOME, MANY = 8, 32, 64  # channels of a convolution, up to which our own functions are faster: _Conv2d says when


def for_convolutions(x: Tensor) -> Tensor:
    """Returns images with channels last in memory: convolutions on a CPU are faster so."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


class Outer(NamedTuple):
    """Gradients of n records in a linear layer, none of them written out: record j's is delta_j a_j^T, and delta_j.

    Args:
        weight: name of the weights.
        bias: name of the bias; None: there is none.
        delta: gradient of what came out, (n, out).
        a: what went in, (n, in).
    """

    weight: str
    bias: str | None
    delta: Tensor
    a: Tensor


class RecordGradients(NamedTuple):
    """Gradients of n records.

    Args:
        outer: those that are not written out.
        rows: all others, (n, w).
        layout: where these are stored in a row.
    """

    outer: list[Outer]
    rows: Tensor
    layout: Layout


class _Layer(ABC):
    """Layer whose parameters are views of x: one for all clients, or one for each.

    `at` is the tensor whose gradient `write` needs; most want that of their outputs.
    """

    at: Tensor

    def __init__(self, layer: Any, weight: str, bias: str | None) -> None:
        self._kind, self._weight, self._bias = layer, weight, bias

    def bind(self, parameters: dict[str, Tensor], shared: bool, clients: int) -> None:
        self.w = parameters[self._weight]
        self.b = None if self._bias is None else parameters[self._bias]
        self.shared, self.clients, self.calls = shared, clients, 0

    def forward(self, a: Tensor) -> Tensor:
        self.calls += 1
        z = self._forward(a)
        self.version = self.at._version
        return z

    def is_as_it_was(self, examples: int) -> bool:
        """Returns whether it was used once, by all examples, and what it needs was not written over since."""
        return self.calls == 1 and len(self.at) == examples and self.at._version == self.version

    def write(self, delta: Tensor, gradients: dict[str, Tensor]) -> None:
        """Writes the gradient of each client, given that of `at`."""
        self._write(delta, gradients[self._weight], None if self._bias is None else gradients[self._bias])

    def outer(self, delta: Tensor) -> Outer | None:
        """Returns the gradients of records, each one example, given that of `at`; None: they must be written out."""
        return None

    @abstractmethod
    def _forward(self, a: Tensor) -> Tensor: ...

    @abstractmethod
    def _write(self, delta: Tensor, weight: Tensor, bias: Tensor | None) -> None: ...


class _Product(_Layer):
    """Layer linear in its weights: their gradient is a product of what went in and what comes back."""

    def _forward(self, a: Tensor) -> Tensor:
        z = self._times(a)
        self.a, self.at = a.detach(), z if z.requires_grad else z.requires_grad_()
        self.a_version = a._version
        return z

    def is_as_it_was(self, examples: int) -> bool:
        return super().is_as_it_was(examples) and self.a._version == self.a_version

    @abstractmethod
    def _times(self, a: Tensor) -> Tensor: ...


class _Linear(_Product):
    def _times(self, a: Tensor) -> Tensor:
        w = self.w.flatten(1 if self.shared else 2)  # those of a convolution have four dimensions
        if self.shared:
            return F.linear(a, w, self.b)
        rows = self._of_clients(a)
        z = torch.bmm(rows, w.mT) if self.b is None else torch.baddbmm(self.b[:, None], rows, w.mT)
        return z.view(*a.shape[:-1], -1)

    def _write(self, delta: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        delta = self._of_clients(delta)
        torch.bmm(delta.mT, self._of_clients(self.a), out=weight)
        if bias is not None:
            torch.sum(delta, dim=1, out=bias)

    def outer(self, delta: Tensor) -> Outer | None:
        return Outer(self._weight, self._bias, delta, self.a) if self.a.ndim == 2 else None

    def _of_clients(self, a: Tensor) -> Tensor:
        return a.reshape(self.clients, -1, a.shape[-1])


class _GreyConv2d(_Linear):
    """Convolution of one channel, as a product with the image's patches: faster than torch's own."""

    def _forward(self, a: Tensor) -> Tensor:
        z = super()._forward(self._patches(a))  # (n, height, width, channels)
        return z.permute(0, 3, 1, 2)

    def _patches(self, a: Tensor) -> Tensor:
        (h, w), (down, right), (top, left) = self._kind.kernel_size, self._kind.stride, self._kind.padding
        padded = F.pad(a[:, 0], (left, left, top, top))
        high, wide = (padded.shape[1] - h) // down + 1, (padded.shape[2] - w) // right + 1
        patches = a.new_empty(len(a), high, wide, h * w)
        for i in range(h):
            for j in range(w):
                seen = padded[:, i : i + down * (high - 1) + 1 : down, j : j + right * (wide - 1) + 1 : right]
                patches[..., i * w + j] = seen
        return patches

    def _write(self, delta: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        delta = self._of_clients(delta)
        weight.view(*weight.shape[:2], -1).copy_(torch.bmm(self._of_clients(self.a).mT, delta).mT)  # so, it is faster
        if bias is not None:
            torch.sum(delta, dim=1, out=bias)


class _Conv2d(_Product):
    """Convolution; with few channels by our own functions, else by torch's, client by client where it must be.

    Which is faster was measured: float32, AVX2 against oneDNN with AVX-512, 20 clients with 1 to 32 images, kernels of
    1 to 5. Torch's time / ours, with up to 8 channels of the images: forward 1.05 to 3.0 (0.9 to 1.1 with many of z),
    back 1.05 to 8, weights 1.1 to 13; kernels of one pixel forward 0.7 to 1.1, back 0.4 to 1.0, weights 1.6 to 7. With
    16 to 64 channels: forward 0.8 to 1.1, back 0.8 to 1.06, weights 0.9 to 1.1; but
    - where kernels move by several pixels, back 1.3 to 2.0, weights 1.04 to 3.9;
    - with weights of each client's own and up to 32 channels, forward 0.95 to 3.1, back 1.05 to 3.6;
    - with up to 8 images a client, weights 1.1 to 2.6.
    """

    relu = False  # whether only the positive part is wanted

    def _forward(self, a: Tensor) -> Tensor:
        z = super()._forward(a)
        return _positive_part(z) if self.relu and not self.is_cut else z

    @property
    def is_cut(self) -> bool:
        """Whether it puts out its positive part by itself."""
        return self.relu and self._compiles

    def _times(self, a: Tensor) -> Tensor:
        k = self.k = self._compiled(a)
        own = k is not None and not self.shared and k.c <= SOME
        few = k is not None and k.c <= FEW and k.h * k.w > 1
        self._compiles = own or few or (k is not None and self._strides)
        if k is None or not self._compiles:
            return self.by_torch(a)
        z: Tensor = _convolve.apply(a, self, own or (few and k.c * k.o <= 16 * FEW))  # type: ignore[no-untyped-call]
        return z

    @property
    def _strides(self) -> bool:
        return bool(self._kind.stride != (1, 1))

    def _compiled(self, a: Tensor) -> kernels.Convolution | None:
        """Returns the convolution if our own functions take it."""
        k, w = self._kind, self.w if self.shared else self.w[0]
        plain = k.groups == 1 and k.dilation == (1, 1) and len(w) <= MANY and w.shape[1] <= MANY
        if not (plain and kernels.convolves() and kernels.take(a) and w.is_contiguous()):
            return None
        if a.shape[1] != w.shape[1] or a.dtype != w.dtype:
            return None  # torch says what is wrong
        found = kernels.convolution(a.shape, self.clients, w.shape, k.stride, k.padding)
        return found if found.high > 0 and found.wide > 0 else None

    def by_torch(self, a: Tensor) -> Tensor:
        k = self._kind
        how = (k.stride, k.padding, k.dilation, k.groups)
        if self.shared:
            return F.conv2d(a, self.w, self.b, *how)
        biases = [None] * self.clients if self.b is None else self.b
        parts = zip(a.chunk(self.clients), self.w, biases, strict=True)
        done = [F.conv2d(own, w, b, *how) for own, w, b in parts]
        return done[0] if len(done) == 1 else torch.cat(done)

    def _write(self, delta: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        if self.k is not None and (min(self.k.c, self.k.each) <= FEW or self._strides):
            z = self.at.detach() if self.is_cut else None
            kernels.convolve_weights(self.a, for_convolutions(delta), z, self.k, weight, bias)
            return
        if self.is_cut:
            delta = _cut(delta, self.at.detach())
        k = self._kind
        each = zip(delta.chunk(self.clients), self.a.chunk(self.clients), strict=True)
        for i, (d, a) in enumerate(each):
            w = self.w if self.shared else self.w[i]
            _, dw, db = torch.ops.aten.convolution_backward(
                d, a, w, None if bias is None else [len(w)], k.stride, k.padding, k.dilation, False, [0, 0], k.groups,
                [False, True, bias is not None],
            )  # fmt: skip
            weight[i] = dw
            if bias is not None:
                bias[i] = db


class _convolve(torch.autograd.Function):
    """Convolution whose images' gradient is our own; `forward` says whether the result is as well."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, layer: _Conv2d, forward: bool) -> Tensor:
        assert layer.k is not None
        if forward:
            z = kernels.convolve(a, layer.w, layer.b, layer.k, layer.relu)
        else:
            z = layer.by_torch(a).relu_() if layer.relu else layer.by_torch(a)
        ctx.w, ctx.k = layer.w, layer.k
        ctx.save_for_backward(z if layer.relu else None)
        return z

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        return kernels.convolve_back(for_convolutions(delta), z, ctx.w, ctx.k), None, None


class _GroupNorm(_Layer):
    relu = False  # whether only the positive part is wanted
    weight_sums: Tensor  # of each example, from the backward pass
    bias_sums: Tensor

    @property
    def groups(self) -> int:
        groups: int = self._kind.num_groups
        return groups

    def samples(self, a: Tensor) -> int:
        """Returns the number of parts that are normalised, each by itself: its examples."""
        return len(a)

    def positions(self, a: Tensor) -> Tensor:
        """Returns (n, C, ...) as a view (samples, positions, C), or as a copy where it is laid out in another way."""
        return a.reshape(a.shape[0], a.shape[1], -1).mT.reshape(self.samples(a), -1, a.shape[1])

    def _forward(self, a: Tensor) -> Tensor:
        self.at = a if a.requires_grad else a.detach().requires_grad_()
        if kernels.take(a):
            z: Tensor = _normalize_compiled.apply(self.at, self)  # type: ignore[no-untyped-call]
            return z
        z = _normalize.apply(self.at, self)  # type: ignore[no-untyped-call]
        return z.relu_() if self.relu else z

    def of_samples(self, parameter: Tensor, samples: int) -> Tensor:
        """Returns a parameter (C,) as it is, or those of the clients (B, C) as (samples, 1, C)."""
        return parameter if self.shared else parameter.repeat_interleave(samples // self.clients, 0)[:, None]

    def _write(self, delta: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        assert bias is not None
        for sums, gradient in ((self.weight_sums, weight), (self.bias_sums, bias)):
            torch.sum(sums.view(self.clients, -1, sums.shape[-1]), dim=1, out=gradient)


class _BatchNorm(_GroupNorm):
    """Batch normalisation by the statistics of all of a client's examples.

    With channels last they lie one after another like the pixels of one image, each channel a group of its own.
    """

    @property
    def groups(self) -> int:
        groups: int = self._kind.num_features
        return groups

    def samples(self, a: Tensor) -> int:
        return self.clients


class _normalize_compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, layer: _GroupNorm) -> Tensor:
        assert layer.b is not None
        z, known = kernels.group_norm(a, layer.samples(a), layer.groups, layer.w, layer.b, layer._kind.eps, layer.relu)
        ctx.save_for_backward(a, *known)
        ctx.layer = layer
        return z

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None]:
        a, *known = ctx.saved_tensors
        layer, back = ctx.layer, for_convolutions(delta)
        result, layer.weight_sums, layer.bias_sums = kernels.group_norm_back(
            a, layer.samples(a), back, layer.groups, layer.relu, known
        )
        return result, None


class _normalize(torch.autograd.Function):
    """Group normalisation with channels last in memory, by the formulas of torch's own, which is slower there.

    Per example and group, r = 1/sqrt(mean(a^2) - mean(a)^2 + eps), z = w r (a - mean(a)) + b.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, layer: _GroupNorm) -> Tensor:
        groups, flat = layer.groups, layer.positions(a)
        assert layer.b is not None
        weight, bias = (layer.of_samples(parameter, len(flat)) for parameter in (layer.w, layer.b))
        mean = _group_mean(flat.sum(1), flat, groups)
        r = _group_mean(flat.square().sum(1), flat, groups).addcmul_(mean, mean, value=-1).clamp_(min=0)
        scale = r.add_(layer._kind.eps).rsqrt_() * weight
        ctx.save_for_backward(a, mean, r, scale)
        ctx.layer = layer
        z = torch.empty_like(a)  # not a view: what follows may write into it
        torch.addcmul(torch.addcmul(bias, mean, scale, value=-1), flat, scale, out=layer.positions(z))
        return z

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None]:
        a, mean, r, scale = ctx.saved_tensors
        layer = ctx.layer
        groups, flat, back = layer.groups, layer.positions(a), layer.positions(delta)
        alone = back.sum(1)
        both = (back * flat).sum(1).addcmul_(alone, mean[:, 0], value=-1)  # of delta (a - mean)
        layer.weight_sums, layer.bias_sums = both * r[:, 0], alone
        slope = _group_mean(both.mul_(scale[:, 0]), flat, groups).mul_(r).mul_(r)
        level = _group_mean(alone * scale[:, 0], flat, groups)
        result = torch.empty_like(a)
        torch.addcmul(torch.addcmul(level.neg_(), mean, slope), back, scale, out=layer.positions(result))
        layer.positions(result).addcmul_(flat, slope, value=-1)
        return result, None


class _Pool(nn.Module):
    """Pooling: the largest of two by two pixels, or its positive part."""

    relu = False

    def forward(self, a: Tensor) -> Tensor:
        if kernels.take(a):
            z: Tensor = _pool.apply(a, self.relu)  # type: ignore[no-untyped-call]
            return z
        z = F.max_pool2d(a, 2)
        return z.relu() if self.relu else z


class _pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, relu: bool) -> Tensor:
        z, which = kernels.max_pool(a, relu)
        ctx.save_for_backward(which)
        ctx.shape = a.shape
        return z

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None]:
        (which,) = ctx.saved_tensors
        return kernels.max_pool_back(for_convolutions(delta), which, ctx.shape), None


class _Relu(nn.Module):
    """Positive part, told in the layout of images what comes back: torch takes seven times as long across layouts."""

    def forward(self, a: Tensor) -> Tensor:
        return _positive_part(a)


def _positive_part(a: Tensor) -> Tensor:
    if a.ndim != 4:
        return a.relu()
    z: Tensor = _relu.apply(a)  # type: ignore[no-untyped-call]
    return z


def _cut(delta: Tensor, z: Tensor) -> Tensor:
    """Returns what comes back through a positive part z."""
    back: Tensor = torch.ops.aten.threshold_backward(for_convolutions(delta), z, 0)
    return back


class _relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        z = a.relu()
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return _cut(delta, z)


def _group_mean(sums: Tensor, flat: Tensor, groups: int) -> Tensor:
    """Returns means over positions and a group's channels, from sums over positions (n, C), as (n, 1, C)."""
    n, channels = sums.shape
    means = sums.view(n, groups, -1).sum(2, keepdim=True) / (flat.shape[1] * channels // groups)
    return means.expand(n, groups, channels // groups).reshape(n, 1, channels)


def _kind_of(module: nn.Module) -> type[_Layer] | None:
    """Returns the class that computes a module's gradients.

    None for what is computed as it is: layers without parameters, and those we do not know.
    """
    if type(module) is nn.Conv2d:
        if isinstance(module.padding, str) or module.padding_mode != "zeros":
            return None
        return _GreyConv2d if _is_grey(module) else _Conv2d
    return {nn.Linear: _Linear, nn.GroupNorm: _GroupNorm, nn.BatchNorm2d: _BatchNorm}.get(type(module))


def _is_grey(module: nn.Conv2d) -> bool:
    """Returns whether a convolution has one channel and no function in C, which would be 1.3 to 15 times as fast."""
    compiled = kernels.convolves() and module.weight.device.type == "cpu" and module.out_channels <= MANY
    return module.in_channels == 1 and module.dilation == (1, 1) and not compiled


def _halves(module: nn.Module) -> bool:
    """Returns whether a module pools two by two pixels in the plain way."""
    if type(module) is not nn.MaxPool2d or module.return_indices or module.ceil_mode:
        return False
    sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
    return all(size in (wanted, (wanted, wanted)) for size, wanted in zip(sizes, (2, 2, 0, 1), strict=True))


def _without(layout: Layout, names: Set[str | None]) -> Layout:
    """Returns the layout of the parameters whose names are not among these."""
    kept = [(name, shape) for name, shape in zip(layout.names, layout.shapes, strict=True) if name not in names]
    return Layout(tuple(n for n, _ in kept), tuple(s for _, s in kept), sum(s.numel() for _, s in kept))


class _Called(nn.Module):
    """Module that stands in the place of a layer."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.layer, self.forward = layer, layer.forward


class Layered:
    """Module taken apart into layers that give a gradient for each client."""

    def __init__(self, module: nn.Module, layout: Layout, loss: Callable[[Any, Tensor], Tensor]) -> None:
        self.layers, self._layout, self._loss = list[_Layer](), layout, loss
        self._held = 0
        leaves = (layer for layer in module.modules() if not next(layer.children(), None))
        self._as_they_are = not any(map(changed, leaves))  # what is put in their place would not do what was added
        self.module = self._replaced(copy.deepcopy(module), "")

    def _replaced(self, module: nn.Module, prefix: str) -> nn.Module:
        weight, bias = prefix + "weight", prefix + "bias"
        kind = _kind_of(module)
        held = getattr(module, "bias", None) is None or bias in self._layout.names  # or else it is frozen
        if kind is not None and weight in self._layout.names and held:
            layer = kind(module, weight, bias if bias in self._layout.names else None)
            self.layers.append(layer)
            self._held += 1 if layer._bias is None else 2
            return _Called(layer)
        if _halves(module):
            return _Pool()
        if type(module) is nn.ReLU and not module.inplace:
            return _Relu()
        before: _Conv2d | _GroupNorm | _Pool | None = (
            None  # in a sequence, what can put out its positive part by itself
        )
        children = [(name, child) for name, child in module._modules.items() if child is not None]  # also one met twice
        for name, child in children:
            if type(child) is nn.Identity:
                continue
            new = self._replaced(child, f"{prefix}{name}.")
            if before is not None and type(child) is nn.ReLU:
                before.relu, new = True, nn.Identity()
            setattr(module, name, new)
            can = new.layer if isinstance(new, _Called) else new
            before = can if isinstance(can, _Conv2d | _GroupNorm | _Pool) and type(module) is nn.Sequential else None
        return module

    @property
    def complete(self) -> bool:
        """True if the layers hold every trainable parameter, and do nothing besides what such layers do."""
        return self._as_they_are and self._held == len(self._layout.names)

    def agrees(self, x: Tensor, inputs: Tensor, targets: Tensor, expected: Tensor) -> bool:
        """Returns whether the gradients of every client and parameter are as expected: not where examples mix."""
        try:
            found = self.grad(x, inputs, targets, None)
        except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError, UserError):
            return False
        whole = expected.norm(dim=1)
        if not (whole > 0).all():
            return False
        wanted, given = self._layout.views(expected), self._layout.views(found)
        errors = [(given[name] - wanted[name]).flatten(1).norm(dim=1) for name in wanted]
        sizes = [wanted[name].flatten(1).norm(dim=1) for name in wanted]
        return all(bool((error <= 1e-3 * size + 1e-5 * whole).all()) for error, size in zip(errors, sizes, strict=True))

    def grad(self, x: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Computes gradients, rows (B, d).

        Args:
            x: one vector (d,), or rows (B, d).
            inputs: those of n examples of each client, (B, n, ...).
            targets: those of the same examples.
            weights: weights (B, n) of the examples, which add up to one for each client; None: all the same.
        """
        rows = torch.empty(len(inputs), self._layout.dim, dtype=x.dtype, device=x.device)
        gradients = self._layout.views(rows)
        for layer, delta in zip(self.layers, self._deltas(x, inputs, targets, weights), strict=True):
            layer.write(delta, gradients)
        return rows

    def of_records(self, x: Tensor, inputs: Tensor, targets: Tensor) -> RecordGradients:
        """Computes the gradients of records, each one example, and writes out only what it must.

        Args:
            x: a vector (d,).
            inputs: those of the records, (n, ...).
            targets: those of the same records.
        """
        deltas = self._deltas(x, inputs[:, None], targets[:, None], None)
        each = [(layer, delta, layer.outer(delta)) for layer, delta in zip(self.layers, deltas, strict=True)]
        outer = [found for _, _, found in each if found is not None]
        layout = _without(self._layout, {name for found in outer for name in (found.weight, found.bias)})
        rows = torch.empty(len(inputs), layout.dim, dtype=x.dtype, device=x.device)
        gradients = layout.views(rows)
        for layer, delta, found in each:
            if found is None:
                layer.write(delta, gradients)
        return RecordGradients(outer, rows, layout)

    def _deltas(self, x: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        """Returns the gradients of what each layer's `at` is, from one pass over the examples of all clients."""
        clients, n = inputs.shape[:2]
        parameters = self._layout.views(x)
        for layer in self.layers:
            layer.bind(parameters, x.ndim == 1, clients)
        losses = self._loss(self.module(for_convolutions(inputs.flatten(0, 1))), targets.flatten(0, 1))
        if not all(layer.is_as_it_was(clients * n) for layer in self.layers):
            raise UserError(
                "this model cannot be computed layer by layer: it uses a layer twice, not for every example, or writes "
                "over what one put out; take vectorize = 'vmap'."
            )
        back = torch.full_like(losses, 1 / n) if weights is None else weights.flatten()
        return torch.autograd.grad(losses, [layer.at for layer in self.layers], back)
