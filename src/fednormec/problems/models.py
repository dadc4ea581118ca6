"""Models for federated runs, all small: linear, mlp, small_cnn and resnet20 of numbers, bag and causal_net of tokens.

A run sees a model as one flat vector of parameters, so no model here keeps buffers that training moves. A constructor
fills the parameters as torch does, from torch's global generator; `reset` replaces those values by ones that depend on
the run's seed alone.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednormec.errors import UserError, one_of

__all__ = ["MODELS", "TOKEN_MODELS", "bag", "causal_net", "linear", "mlp", "reset", "resnet20", "small_cnn"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, *_BATCH_NORMS, *_INSTANCE_NORMS)
_EMBEDDING_STD = 0.1  # small beside what is learnt: a token that no client has stays near nothing
_SHORTEST_RESNET_SIDE = 5  # after two halvings at least 2x2 values: batch statistics exist even for one example


def linear(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Multinomial logistic regression on the flattened example.

    Args:
        input_shape: shape of one example.
        outputs: number of outputs: of classes, or of values to predict.

    >>> sum(p.numel() for p in linear((1, 8, 8), 10).parameters())
    650
    """
    features = math.prod(_check_shape(input_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(features, _check_outputs(outputs)))


def mlp(input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (64,)) -> nn.Module:
    """Fully connected layers of the widths `hidden`, with ReLU between them, on the flattened example.

    Args:
        input_shape: shape of one example.
        outputs: number of outputs: of classes, or of values to predict.
        hidden: widths of the hidden layers.
    """
    widths = [math.prod(_check_shape(input_shape)), *_check_widths("hidden", hidden)]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], _check_outputs(outputs)))


def small_cnn(
    input_shape: Sequence[int],
    outputs: int,
    channels: Sequence[int] = (16, 32),
    norm: str = "group",
    halving: Literal["pool", "stride"] = "pool",
) -> nn.Module:
    """Stages, one per entry of `channels` (3x3 convolution, group norm or none, 2x2 max pooling, ReLU), then linear.

    Every stage halves the image, so its sides must be at least 2 to the number of stages; one more where strides halve
    and group norm needs more than one pixel.

    Args:
        input_shape: shape of one example (channels, height, width).
        outputs: number of outputs: of classes, or of values to predict.
        channels: number of channels of each stage.
        norm: normalisation after each convolution, "group" or "none".
        halving: "pool", or "stride": convolutions that take every second pixel instead of pooling, several times faster
            and a little less accurate.
    """
    norms = _check_norm(norm, {"group": _group_norm, "none": lambda channels: nn.Identity()})
    one_of("halving", halving, ("pool", "stride"))
    stages = _check_widths("channels", channels)
    one_more = halving == "stride" and norm == "group"  # a last image of one pixel has no variance in a group
    depth, height, width = _check_image("small_cnn", input_shape, shortest=2 ** len(stages) + one_more)
    layers: list[nn.Module] = []
    for after in stages:
        pool, stride = ([nn.MaxPool2d(2)], 1) if halving == "pool" else ([], 2)
        layers += [nn.Conv2d(depth, after, 3, stride, padding=1), norms(after), *pool, nn.ReLU()]
        height, width = ((side + stride - 1) // 2 for side in (height, width))  # pooling drops an odd last pixel
        depth = after
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(depth * height * width, _check_outputs(outputs)))


def resnet20(input_shape: Sequence[int], outputs: int, norm: str = "group") -> nn.Module:
    """Network of He et al. (2016), section 4.2, 20 layers for CIFAR: three stages of three blocks, widths 16, 32, 64.

    Shortcuts are their option A, without parameters. norm="batch" is the paper's net, 269,722 parameters on 3x32x32
    with 10 classes; it takes the statistics of the batch at hand in training and in evaluation alike and keeps no
    running averages, so that the model is its parameters and no buffer moves. Its output for one example therefore
    depends on the rest of the batch. norm="group" (8 groups) has as many parameters and no such dependence.

    Args:
        input_shape: shape of one example (channels, height, width).
        outputs: number of outputs: of classes, or of values to predict.
        norm: normalisation after each convolution, "group" or "batch".
    """
    norms = _check_norm(norm, {"group": _group_norm, "batch": _batch_norm})
    depth, _, _ = _check_image("resnet20", input_shape, shortest=_SHORTEST_RESNET_SIDE)
    layers = [_conv3x3(depth, 16), norms(16), nn.ReLU(inplace=True)]
    before = 16
    for channels in (16, 32, 64):
        for _ in range(3):
            layers.append(ResidualBlock(before, channels, norms))
            before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, _check_outputs(outputs)))


def bag(
    input_shape: Sequence[int], outputs: int, vocabulary: int | None = None, hidden: Sequence[int] = ()
) -> nn.Module:
    """Sum of what each token adds, whatever the order; with `hidden`, ReLU and fully connected layers behind it.

    Without them, it is linear regression, or logistic with cross entropy, on which tokens there are.

    Args:
        input_shape: shape of one example: so many tokens.
        outputs: number of outputs: of classes, or of values to predict.
        vocabulary: number of tokens that there may be; by default as many as outputs.
        hidden: widths of the hidden layers.
    """
    widths = [*(_check_widths("hidden", hidden) if hidden else ()), _check_outputs(outputs)]
    _check_tokens("bag", input_shape)
    layers: list[nn.Module] = [SummedTokens(_check_vocabulary(vocabulary, outputs), widths[0])]
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.ReLU(), nn.Linear(before, after)]
    return nn.Sequential(*layers)


def causal_net(
    input_shape: Sequence[int], outputs: int, vocabulary: int | None = None, width: int = 32, layers: int = 5
) -> nn.Module:
    """Scores of what follows each token of a text, from those before it: layers that look back 1, 2, 4, ... tokens.

    Each layer adds relu(W [norm(h_t), norm(h_{t - 2^k})] + b) to h_t, so that the last one has seen the 2^layers tokens
    up to t. That is a causal convolution with holes, of two taps, as matrix products.

    Args:
        input_shape: shape of one example: so many tokens.
        outputs: number of outputs at each token: of tokens that may follow.
        vocabulary: number of tokens that there may be; by default as many as outputs.
        width: number of features of each token.
        layers: number of layers.
    """
    _check_tokens("causal_net", input_shape)
    width, layers = _check_widths("width and layers", [width, layers])
    return nn.Sequential(
        nn.Embedding(_check_vocabulary(vocabulary, outputs), width),
        *(LookingBack(width, 2**k) for k in range(layers)),
        nn.LayerNorm(width),
        nn.Linear(width, _check_outputs(outputs)),
    )


@torch.no_grad()
def reset(module: nn.Module, rng: np.random.Generator) -> None:
    """Initialises a module in place from `rng` alone, in the order in which its layers were registered.

    Linear and convolution layers get torch's default law, weight and bias ~ U(-1/sqrt(fan_in), 1/sqrt(fan_in)); norm
    layers get weight 1 and bias 0; embeddings ~ N(0, 0.1^2). Parameters of any other kind of module are left as they
    are. Numbers are drawn in float64 whatever the module's dtype, so that a float32 and a float64 model start from the
    same point.

    Args:
        module: the module whose parameters are overwritten.
        rng: source of all the numbers.
    """
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, *_CONVOLUTIONS)):
            fan_in = math.prod(layer.weight.shape[1:])
            bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
            for parameter in layer.parameters(recurse=False):
                parameter.copy_(torch.from_numpy(rng.uniform(-bound, bound, size=tuple(parameter.shape))))
        elif isinstance(layer, nn.Embedding):
            layer.weight.copy_(torch.from_numpy(rng.normal(0, _EMBEDDING_STD, size=tuple(layer.weight.shape))))
        elif isinstance(layer, SummedTokens):
            layer.bias.zero_()
        elif isinstance(layer, _NORMS):
            for name, parameter in layer.named_parameters(recurse=False):
                parameter.fill_(1.0 if name == "weight" else 0.0)


class SummedTokens(nn.Module):
    """Sum of the embeddings of an example's tokens, and a bias."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.tokens(x).sum(dim=1)
        return summed + self.bias


class LookingBack(nn.Module):
    """Residual layer of a text: each token sees itself and the one `back` tokens before; before the first are zeros."""

    def __init__(self, width: int, back: int) -> None:
        super().__init__()
        self.back = back
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(2 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        now = self.norm(h)
        before = F.pad(now, (0, 0, self.back, -self.back))
        return h + F.relu(self.mix(torch.cat([now, before], dim=2)))


class ResidualBlock(nn.Module):
    """Residual block: relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))).

    The first convolution halves where the width doubles.
    """

    def __init__(self, before: int, channels: int, norms: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.channels = channels
        self.stride = 1 if before == channels else 2
        self.residual = nn.Sequential(
            _conv3x3(before, channels, self.stride),
            norms(channels),
            nn.ReLU(inplace=True),
            _conv3x3(channels, channels),
            norms(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.residual(x)
        return inner.add_(_shortcut(x, self.channels, self.stride)).relu_()


def _shortcut(x: Tensor, channels: int, stride: int) -> Tensor:
    """Returns option A of He et al.: every `stride`-th pixel, and channels of zeros behind the ones there are."""
    if stride == 1 and channels == x.shape[1]:
        return x
    return F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, channels - x.shape[1]))


def _conv3x3(before: int, after: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)  # the norm that follows has the bias


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(channels, 8), channels)


def _batch_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, track_running_stats=False)


def _is_count(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 1)


def _check_shape(input_shape: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(input_shape, Sequence) or not input_shape or not all(map(_is_count, input_shape)):
        raise UserError(
            f"input_shape must be the shape of one example such as (64,) or (1, 8, 8), got {input_shape!r}: "
            "give it positive whole numbers"
        )
    return tuple(int(side) for side in input_shape)


def _check_image(model: str, input_shape: Sequence[int], shortest: int) -> tuple[int, int, int]:
    shape = _check_shape(input_shape)
    if len(shape) != 3 or min(shape[1:]) < shortest:
        raise UserError(
            f"{model} needs images of shape (channels, height, width) and at least {shortest}x{shortest} pixels, "
            f"got {shape}: reshape the data or use mlp"
        )
    return shape[0], shape[1], shape[2]


def _check_tokens(model: str, input_shape: Sequence[int]) -> None:
    shape = _check_shape(input_shape)
    if len(shape) != 1:
        raise UserError(f"{model} needs a row of tokens as each example, got shape {shape}: reshape the data")


def _check_vocabulary(vocabulary: int | None, outputs: int) -> int:
    if vocabulary is None:
        return _check_outputs(outputs)
    if not _is_count(vocabulary):
        raise UserError(f"vocabulary must be a whole number of at least 1, got {vocabulary!r}: count the tokens")
    return int(vocabulary)


def _check_outputs(outputs: int) -> int:
    if not _is_count(outputs):
        raise UserError(f"outputs must be a whole number of at least 1, got {outputs!r}: check the targets of the data")
    return int(outputs)


def _check_widths(name: str, widths: Sequence[int]) -> list[int]:
    if not isinstance(widths, Sequence) or not widths or not all(map(_is_count, widths)):
        raise UserError(
            f"{name} must be one positive whole number per layer such as (16, 32), got {widths!r}: list them"
        )
    return [int(width) for width in widths]


def _check_norm(norm: str, valid: dict[str, Callable[[int], nn.Module]]) -> Callable[[int], nn.Module]:
    if norm not in valid:
        raise UserError(f"norm must be one of {', '.join(valid)}, got {norm!r}: choose one of those")
    return valid[norm]


MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "small_cnn": small_cnn,
    "resnet20": resnet20,
}
TOKEN_MODELS: dict[str, Callable[..., nn.Module]] = {"bag": bag, "causal_net": causal_net}
