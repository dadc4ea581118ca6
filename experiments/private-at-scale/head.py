"""A linear head for public features: model.name = "head.py:build"."""

from torch import nn


def build(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Each row of features is centred and scaled by itself, which is public; the weights begin at zero."""
    (width,) = input_shape
    linear = nn.Linear(width, outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.LayerNorm(width, elementwise_affine=False), linear)
