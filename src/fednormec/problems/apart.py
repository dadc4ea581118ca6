"""Tells whether a module and its loss treat every example by itself: only then may clients share a batch.

What they do is watched, function by function, on made-up examples. Each function must be known to keep the examples,
which lie along the first dimension, apart; one that is not known, or that turns numbers into Python's, is a doubt.
Where there is none, what they do follows from the number of examples alone, and that is compared as well.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fednormec.problems.models import ResidualBlock

Trace = tuple[tuple[Any, ...], ...]

KNOWN = (
    nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, nn.Conv2d, nn.GroupNorm, nn.BatchNorm2d, nn.ReLU, nn.LeakyReLU,
    nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Sigmoid, nn.Tanh, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    ResidualBlock,
)  # fmt: skip
ELEMENTWISE = (
    "abs add addcmul addcdiv bitwise_and bitwise_not bitwise_or celu clamp clamp_max clamp_min clip clone contiguous "
    "cos detach div double elu eq erf exp expm1 float floor ge gelu gt hardsigmoid hardswish hardtanh le leaky_relu "
    "lerp log log1p log2 logical_and logical_not logical_or logsigmoid lt maximum minimum mish mul nan_to_num ne neg "
    "pow reciprocal relu relu6 round rsqrt selu sigmoid sign silu sin softplus softsign sqrt square sub tanh "
    "tanhshrink threshold to true_divide type_as __radd__ __rsub__ __rmul__ __rtruediv__ __rdiv__ __rpow__ __pow__ "
    "__and__ __or__ __invert__"
)
METADATA = (
    "device dim dtype element_size get_device is_complex is_contiguous is_cuda is_floating_point is_leaf layout ndim "
    "nelement numel requires_grad shape size stride __len__"
)
REDUCTIONS = "all amax amin any argmax argmin cumsum log_softmax logsumexp max mean min prod softmax std sum var"


def known(module: nn.Module) -> bool:
    """Returns whether a module is made of nothing but layers that keep examples apart, whatever their number.

    Batch normalisation takes statistics of a client's own.
    """
    return all(
        type(layer) in KNOWN and not changed(layer) and getattr(layer, "start_dim", 1) >= 1
        for layer in module.modules()
    )


def changed(layer: nn.Module) -> bool:
    """Returns whether something of its own was put before, behind or in place of what layers of its type do."""
    return "forward" in vars(layer) or any(hooks for name, hooks in vars(layer).items() if name.endswith("_hooks"))


def trace(module: nn.Module, loss: Callable[[Any, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Trace | None:
    """Lists all that is done to these examples, in order; None if some function may let one of them touch another."""
    watch = _Watch(module, inputs, targets)
    norms = [layer for layer in module.modules() if type(layer) is nn.BatchNorm2d and not changed(layer)]
    hooks = [norm.register_forward_pre_hook(watch.into_norm) for norm in norms]
    hooks += [norm.register_forward_hook(watch.out_of_norm, prepend=True) for norm in norms]
    try:
        with watch:
            losses = loss(module(inputs), targets)
    except Exception:  # whatever a stranger's code raises on examples that are made up
        return None
    finally:
        for hook in hooks:
            hook.remove()
    sure = watch.sure and watch.is_row(losses) and losses.ndim == 1 and not _has_own_backward(losses)
    return (*watch.seen, ("result", watch.number(losses))) if sure else None


class _Call(NamedTuple):
    """Call of a function: `rows` are those of its tensors that have an example in each row, `others` the rest."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: list[Tensor]
    others: list[Tensor]
    result: Any

    def given(self, place: int, name: str, default: Any = None) -> Any:
        """Returns an argument by place or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def of_one(self) -> bool:
        """True if the first argument alone has examples."""
        return len(self.rows) == 1 and len(self.args) > 0 and self.args[0] is self.rows[0]


class _Watch(TorchFunctionMode):
    """Notes what is done to examples.

    A tensor is known to have an example in each row, or to be the same for whatever examples; one that came from
    elsewhere is a doubt.
    """

    def __init__(self, module: nn.Module, *rows: Tensor) -> None:
        super().__init__()
        self.examples, self.sure, self.in_norm, self.seen = len(rows[0]), True, 0, list[tuple[Any, ...]]()
        self._rows, self._constants, self._numbers = dict[int, Tensor](), dict[int, Tensor](), dict[int, int]()
        self._keep(self._rows, list(rows))
        self._keep(self._constants, list(_tensors([vars(layer) for layer in module.modules()])))

    def is_row(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._rows

    def number(self, tensor: Tensor) -> int | None:
        """Returns the number of a tensor, in the order in which they were met; None for one that was not."""
        return self._numbers.get(id(tensor))

    def into_norm(self, layer: nn.Module, given: Any) -> None:
        self.in_norm += 1

    def out_of_norm(self, layer: nn.Module, given: Any, result: Any) -> None:
        self.in_norm -= 1
        self._keep(self._rows, [result])
        self._note("norm", given, [result], self.is_row(given[0]) and result.shape == given[0].shape)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in NOT_NOTED and not self.in_norm:
            self._look(func, args, kwargs, result)
        return result

    def _look(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        tensors = list(_tensors(args[:1] if func in CONVERSIONS else (args, kwargs)))
        rows = [tensor for tensor in tensors if id(tensor) in self._rows]
        others = [tensor for tensor in tensors if id(tensor) not in self._rows]
        results = list(_tensors(result))
        fine = all(id(tensor) in self._constants for tensor in others) and "out" not in kwargs
        if not rows:  # made of nothing of the examples', but of their number, perhaps
            self._keep(self._constants, results)
            return self._note(func, (args, kwargs), results, fine and (len(results) > 0 or result is None), whole=True)
        rule = RULES.get(func)
        call = _Call(args, kwargs, rows, others, result)
        fine = fine and rule is not None and len(results) > 0 and rule(call)
        fine = fine and all(one.ndim > 0 and len(one) == self.examples for one in results)
        self._keep(self._rows, results)
        return self._note(func, args[:1] if rule is _reshape else (args, kwargs), results, fine)

    def _keep(self, where: dict[int, Tensor], tensors: list[Tensor]) -> None:
        for tensor in tensors:
            where[id(tensor)] = tensor
            self._numbers.setdefault(id(tensor), len(self._numbers))

    def _note(self, func: Any, given: Any, results: list[Tensor], fine: bool, whole: bool = False) -> None:
        self.sure = self.sure and fine
        shapes = [tuple(one.shape if whole else one.shape[1:]) for one in results]
        words = [f"tensor {self.number(one)}" if isinstance(one, Tensor) else repr(one) for one in _plain(given)]
        numbers = [self.number(one) for one in results]
        self.seen.append((getattr(func, "__name__", str(func)), *words, *shapes, *numbers))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _plain(value: Any) -> Iterator[Any]:
    """Yields what is given, one after another."""
    if isinstance(value, dict):
        yield from _plain([item for pair in value.items() for item in pair])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _plain(item)
    else:
        yield value


def _has_own_backward(losses: Tensor) -> bool:
    """Returns whether some backward pass is written in Python, where nobody watches."""
    left, met = [losses.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in met:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        met.add(node)
        left += [before for before, _ in node.next_functions]
    return False


# Rules: whether a call of such a function keeps rows apart. That the result has as many rows is checked for all.


def _elementwise(call: _Call) -> bool:
    depth = call.rows[0].ndim
    shared = all(t.ndim < depth or (t.ndim == depth and len(t) == 1) for t in call.others)
    return shared and all(t.ndim == depth for t in (*call.rows, *_tensors(call.result)))


def _in_place(call: _Call) -> bool:
    return call.args[0] is call.rows[0] and _elementwise(call)


def _inner(call: _Call, dims: Any, depth: int | None = None) -> bool:
    """Returns whether these dimensions are all others than the first."""
    depth, dims = call.rows[0].ndim if depth is None else depth, dims if isinstance(dims, tuple | list) else (dims,)
    return all(type(dim) is int and (dim > 0 or -depth < dim < 0) for dim in dims) and len(dims) > 0


def _along(place: int, default: Any = None) -> Callable[[_Call], bool]:
    """Returns the rule of a function that works along dimensions, which are given in that place or by name."""
    return lambda call: call.of_one and _inner(call, call.given(place, "dim", call.kwargs.get("dims", default)))


def _reshape(call: _Call) -> bool:
    """Accepts as many rows as before, in the order of memory: each row is of the same numbers."""
    return call.of_one and (call.result.numel() == call.rows[0].numel() or call.result.ndim == call.rows[0].ndim)


def _squeeze(call: _Call) -> bool:
    named = call.given(1, "dim")
    return call.of_one and (len(call.rows[0]) > 1 if named is None else _inner(call, named))


def _exchange(call: _Call) -> bool:
    return call.of_one and _inner(call, [call.given(1, "dim0"), call.given(2, "dim1")])


def _permute(call: _Call) -> bool:
    dims = call.given(1, "dims")
    return call.of_one and (dims if isinstance(dims, int) else dims[0]) == 0


def _joined(more: int) -> Callable[[_Call], bool]:
    def rule(call: _Call) -> bool:
        depth = {t.ndim for t in call.rows}
        return not call.others and len(depth) == 1 and _inner(call, call.given(1, "dim", 0), depth.pop() + more)

    return rule


def _index(call: _Call) -> bool:
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    first, *rest = index
    plain = all(item is None or item is Ellipsis or type(item) in (int, slice) for item in rest)
    last = first is Ellipsis and sum(type(item) in (int, slice) for item in rest) < call.rows[0].ndim
    return call.of_one and plain and (last or (isinstance(first, slice) and first == slice(None)))


def _pad(call: _Call) -> bool:
    return call.of_one and len(call.given(1, "pad")) < 2 * call.rows[0].ndim - 1


def _matmul(call: _Call) -> bool:
    if call.of_one:
        return call.rows[0].ndim >= 2 and call.others[0].ndim <= 2
    return len(call.rows) == 2 and call.rows[0].ndim == call.rows[1].ndim >= 3


def _batched(depth: int) -> Callable[[_Call], bool]:
    """Returns the rule of a function that takes a batch of so many dimensions.

    With one less it would take the batch for one example.
    """
    return lambda call: call.of_one and call.rows[0].ndim == depth


def _layer_norm(call: _Call) -> bool:
    return call.of_one and len(call.given(1, "normalized_shape")) < call.rows[0].ndim


def _embedding(call: _Call) -> bool:
    """Accepts a plain embedding.

    It does not look at how often a word is met, and does not change the words themselves.
    """
    return call.of_one and call.given(3, "max_norm") is None and not call.given(5, "scale_grad_by_freq", False)


def _loss_of_each(call: _Call) -> bool:
    return call.kwargs.get("reduction") == "none" and len(call.rows) == 2 and call.rows[0].ndim >= 2


def _pointwise_loss(call: _Call) -> bool:
    alike = len(call.rows) == 2 and call.rows[0].shape == call.rows[1].shape
    return call.kwargs.get("reduction") == "none" and alike and not call.others


def _functions(names: str, *places: Any) -> Iterator[Any]:
    for name in names.split():
        for place in places or (torch, Tensor, F):
            found = getattr(place, name, None)
            if callable(found):
                yield found


CONVERSIONS = {Tensor.to, Tensor.type_as}  # they ask another tensor for its kind alone
NOT_NOTED = {getattr(Tensor, name).__get__ for name in METADATA.split()} | {*_functions(METADATA, Tensor)}
NOT_NOTED |= {torch.numel, torch.is_floating_point, torch.is_complex}
RULES: dict[Any, Callable[[_Call], bool]] = {
    rule_of: rule
    for names, rule in {
        ELEMENTWISE: _elementwise,
        " ".join(f"{name}_" for name in ELEMENTWISE.split() if not name.startswith("__")): _in_place,
        "where": lambda call: len(call.args) + len(call.kwargs) == 3 and _elementwise(call),
        REDUCTIONS: _along(1),
        "chunk split tensor_split": _along(2, 0),
        "unbind select narrow unflatten": _along(1, 0),
        "view reshape flatten expand": _reshape,
        "squeeze": _squeeze,
        "unsqueeze": lambda call: call.of_one and _inner(call, call.given(1, "dim"), call.rows[0].ndim + 1),
        "transpose swapaxes swapdims": _exchange,
        "permute": _permute,
        "cat concat concatenate": _joined(0),
        "stack": _joined(1),
        "pad": _pad,
        "linear": lambda call: call.of_one and call.rows[0].ndim >= 2,
        "matmul bmm __matmul__": _matmul,
        "conv1d conv_transpose1d max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d": _batched(3),
        "conv2d conv_transpose2d max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d": _batched(4),
        "conv3d conv_transpose3d max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d": _batched(5),
        "group_norm": lambda call: call.of_one and call.rows[0].ndim >= 2,
        "layer_norm rms_norm": _layer_norm,
        "embedding": _embedding,
        "cross_entropy nll_loss": _loss_of_each,
        "binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss smooth_l1_loss":
            _pointwise_loss,
    }.items()
    for rule_of in _functions(names)
} | {Tensor.__getitem__: _index}  # fmt: skip
