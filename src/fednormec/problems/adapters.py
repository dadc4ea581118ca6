"""Low-rank adapters (LoRA, Hu et al. 2022) for the layers of any torch module, by way of the package peft."""

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from fednormec.core.randomness import generator
from fednormec.errors import UserError, at_least_one, positive, require_room

KINDS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # peft adapts these, and Conv1D of transformers
READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # they use the weights of layers that they do not call
SHOWN = 6  # layers that an error names


def lora(
    module: nn.Module, rank: int, layers: Sequence[str] | None = None, alpha: float | None = None, seed: int = 0
) -> nn.Module:
    """Returns a copy of a module with low-rank adapters, which alone are trained; all else is frozen.

    A layer with the weights W computes with W + (alpha / rank) B A, where B and A have `rank` columns and rows. B
    begins at zero, so that the copy computes what the module does, and A with numbers drawn from the seed. To train
    other parameters as well, such as those of a head, call their `requires_grad_()`. Needs the package peft.

    Args:
        module: any torch.nn.Module; it stays as it is.
        rank: rank of the adapters.
        layers: names of the layers that get one (linear layers, convolutions, embeddings), in full or from any dot on:
            "query" is every layer of that name. By default all linear layers.
        alpha: scale of the adapters, times the rank; by default the rank, which makes the scale 1.
        seed: seed of the first numbers of A.

    Raises:
        UserError: if peft is missing, no layer has such a name, or one of them cannot have an adapter.
    """
    adapted = copy.deepcopy(module)
    add_adapters(adapted, rank, layers, alpha, seed)
    return adapted


def add_adapters(
    module: nn.Module, rank: int, layers: Sequence[str] | None = None, alpha: float | None = None, seed: int = 0
) -> None:
    """Adds adapters in place; the arguments are those of `lora`."""
    at_least_one("the rank of LoRA", rank)
    scale = positive("alpha of LoRA", rank if alpha is None else alpha)
    if find_spec("peft") is None:
        raise UserError("LoRA needs the package peft: pip install 'fednormec[peft]'.")
    if any(hasattr(part, "peft_config") for part in module.modules()):
        raise UserError("the model has adapters of peft already: add LoRA to the model without them.")
    names = _chosen(module, layers)
    weights = [module.get_parameter(f"{name}.weight") for name in names]
    size = rank * sum(len(weight) + weight[0].numel() for weight in weights)
    require_room(f"training adapters of {size:,} parameters", 12 * 4 * size, "take a smaller rank")

    from peft import LoraConfig, inject_adapter_in_model

    exactly = "|".join(map(re.escape, names))  # of a list, peft would also take layers whose names end so
    asked = LoraConfig(r=rank, lora_alpha=scale, target_modules=exactly, lora_dropout=0.0)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            torch.manual_seed(int(generator(seed, "lora").integers(2**63)))
            warnings.simplefilter("ignore")  # it says what it does about kinds of layers
            inject_adapter_in_model(asked, module)
    except (MemoryError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"peft cannot add these adapters: {said}.") from error


def _chosen(module: nn.Module, layers: Sequence[str] | None) -> list[str]:
    """Returns the full names of the layers that get an adapter; raises UserError if one cannot, or there is none."""
    parts = {name: part for name, part in module.named_modules() if name}
    if layers is None:
        names = [name for name, part in parts.items() if isinstance(part, (nn.Linear, _conv1d()))]
    else:
        names = _named(parts, (layers,) if isinstance(layers, str) else layers)
    if not names:
        what = "the model has no linear layer within it" if layers is None else "the list of layers is empty"
        raise UserError(f"LoRA: {what}; name the layers that get an adapter.")
    for name in names:
        _require_adaptable(module, name)
    return names


def _named(parts: Mapping[str, nn.Module], layers: Sequence[str]) -> list[str]:
    """Returns the full names of the layers that are named, as peft takes the names in a list."""
    for one in layers:
        if not any(_fits(name, one) for name in parts):
            able = [name for name, part in parts.items() if isinstance(part, (*KINDS, _conv1d()))]
            there = ", ".join(able[:SHOWN]) + (", ..." if len(able) > SHOWN else "")
            raise UserError(f"LoRA: no layer's name is or ends in '{one}'; there are: {there or 'none'}.")
    return [name for name in parts if any(_fits(name, one) for one in layers)]


def _fits(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _require_adaptable(module: nn.Module, name: str) -> None:
    """Raises UserError if an adapter of this layer would be impossible, or silently ignored."""
    layer, parent = module.get_submodule(name), module.get_submodule(name.rpartition(".")[0])
    if not isinstance(layer, (*KINDS, _conv1d())):
        raise UserError(f"LoRA: '{name}' is a {type(layer).__name__}, which cannot have an adapter: name linear "
                        "layers, convolutions or embeddings.")  # fmt: skip
    if isinstance(parent, READERS):
        raise UserError(f"LoRA: '{name}' is part of a {type(parent).__name__}, which uses its weights without calling "
                        "it, so that an adapter would be ignored: name other layers.")  # fmt: skip


def _conv1d() -> Any:
    """Returns the type of the linear layers of GPT-2 and its like."""
    from transformers import Conv1D

    return Conv1D
