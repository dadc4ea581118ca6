"""Models: their sizes, their shapes, what their docstrings promise, and an initialisation that is the seed's alone."""

import copy
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fednormec.errors import UserError
from fednormec.problems.models import (
    MODELS,
    TOKEN_MODELS,
    ResidualBlock,
    _shortcut,
    bag,
    causal_net,
    linear,
    mlp,
    reset,
    resnet20,
    small_cnn,
)

quick = settings(deadline=None, max_examples=25, database=None)
DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)
VARIANTS = {
    "linear": linear,
    "mlp": mlp,
    "small_cnn": small_cnn,
    "small_cnn without norm": lambda shape, classes: small_cnn(shape, classes, norm="none"),
    "small_cnn with strides": lambda shape, classes: small_cnn(shape, classes, halving="stride"),
    "resnet20": resnet20,
    "resnet20 with batch norm": lambda shape, classes: resnet20(shape, classes, norm="batch"),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors here are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def random_inputs(*shape: int) -> Tensor:
    return torch.from_numpy(rng(9).standard_normal(shape)).float()


def fresh(name: str, shape: tuple[int, ...], outputs: int = 10) -> nn.Module:
    model = VARIANTS[name](shape, outputs)
    reset(model, rng())
    return model


# sizes and shapes


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet20_has_the_parameters_of_the_paper(norm: str) -> None:
    model = resnet20(CIFAR, 10, norm=norm)
    assert size(model) == 269_722
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    assert len(layers) == 20


def test_sizes_follow_from_the_layers() -> None:
    assert size(linear((64,), 10)) == 64 * 10 + 10
    assert size(mlp(DIGITS, 3, hidden=(7, 5))) == (64 * 7 + 7) + (7 * 5 + 5) + (5 * 3 + 3)
    convolutions = (16 * 3 * 9 + 16) + (32 * 16 * 9 + 32)
    head = 32 * 8 * 8 * 10 + 10
    assert size(small_cnn(CIFAR, 10, norm="none")) == convolutions + head
    assert size(small_cnn(CIFAR, 10, norm="none", halving="stride")) == convolutions + head
    assert size(small_cnn(CIFAR, 10)) == convolutions + 2 * (16 + 32) + head < 100_000


@pytest.mark.parametrize("shape", [DIGITS, MNIST, CIFAR, (2, 9, 13)])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_model_maps_a_batch_of_images_to_logits(name: str, shape: tuple[int, ...]) -> None:
    logits = fresh(name, shape, outputs=7)(random_inputs(2, *shape))
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()


@quick
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from(["pool", "stride"]),
)
@example([1], 0, 0, "stride")
def test_small_cnn_fits_every_image_that_survives_its_halvings(
    channels: list[int], height: int, width: int, halving: Literal["pool", "stride"]
) -> None:
    shortest = 2 ** len(channels) + (halving == "stride")
    shape = (2, shortest + height, shortest + width)
    assert small_cnn(shape, 3, channels=channels, halving=halving)(random_inputs(1, *shape)).shape == (1, 3)
    with pytest.raises(UserError, match=f"at least {shortest}x{shortest} pixels"):
        small_cnn((2, shortest - 1, shortest + width), 3, channels=channels, halving=halving)


def test_strides_without_a_norm_go_down_to_one_pixel() -> None:
    net = small_cnn((2, 4, 4), 3, channels=[1, 1], halving="stride", norm="none")
    assert net(random_inputs(1, 2, 4, 4)).shape == (1, 3)


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_flat_examples_are_fine_where_no_image_is_needed(name: str) -> None:
    assert fresh(name, (64,))(random_inputs(5, 64)).shape == (5, 10)


def test_the_table_names_every_model() -> None:
    assert {"linear": linear, "mlp": mlp, "small_cnn": small_cnn, "resnet20": resnet20} == MODELS
    assert {"bag": bag, "causal_net": causal_net} == TOKEN_MODELS


def test_an_mlp_is_not_linear_and_linear_is_affine() -> None:
    x = random_inputs(4, *DIGITS)

    def second_difference(model: nn.Module) -> float:
        return (model(x) + model(-x) - 2 * model(0 * x)).abs().max().item()

    assert second_difference(fresh("linear", DIGITS)) < 1e-5 < 1e-2 < second_difference(fresh("mlp", DIGITS))


# resnet20: shortcuts and statistics


def test_the_shortcut_is_option_a() -> None:
    x = random_inputs(2, 3, 5, 6)
    expected = torch.zeros(2, 7, 3, 3)
    for channel in range(3):
        for row in range(3):
            for column in range(3):
                expected[:, channel, row, column] = x[:, channel, 2 * row, 2 * column]
    assert torch.equal(_shortcut(x, channels=7, stride=2), expected)
    assert torch.equal(_shortcut(x, channels=3, stride=1), x)


@pytest.mark.parametrize(("before", "channels"), [(8, 8), (8, 16)])
def test_a_block_whose_residual_is_zero_is_its_shortcut(before: int, channels: int) -> None:
    block = ResidualBlock(before, channels, nn.Identity)
    x = random_inputs(2, before, 8, 8)
    expected = _shortcut(x, channels, stride=channels // before).relu()
    assert not torch.allclose(block(x), expected)
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_is_its_parameters(name: str) -> None:
    """No buffers, and training and evaluation mode are one function."""
    model, x = fresh(name, DIGITS), random_inputs(4, *DIGITS)
    assert list(model.buffers()) == []
    assert torch.equal(model.train()(x), model.eval()(x))


def test_only_batch_norm_mixes_the_examples_of_a_batch() -> None:
    x = random_inputs(4, *DIGITS)
    for name in VARIANTS:
        model = fresh(name, DIGITS)
        alone = torch.cat([model(example[None]) for example in x])
        assert torch.allclose(model(x), alone, atol=1e-4) == (name != "resnet20 with batch norm"), name


@pytest.mark.parametrize("name", VARIANTS)
def test_vmap_over_clients_gives_each_clients_gradient(name: str) -> None:
    """Three clients with their own parameters and two examples each, against one backward pass per client."""
    models = []
    for client in range(3):
        models.append(VARIANTS[name](DIGITS, 10).double())
        reset(models[-1], rng(client))
    x, y = random_inputs(3, 2, *DIGITS).double(), torch.tensor([[0, 1], [2, 3], [4, 5]])

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(models[0], parameters, (x,)), y)

    stacked = {
        key: torch.stack([dict(m.named_parameters())[key].detach() for m in models])
        for key, _ in models[0].named_parameters()
    }
    rows = vmap(grad(loss))(stacked, x, y)
    for client, model in enumerate(models):
        nn.functional.cross_entropy(model(x[client]), y[client]).backward()
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(rows[key][client], parameter.grad, rtol=1e-8, atol=1e-10)


# reset


@pytest.mark.parametrize("name", VARIANTS)
def test_reset_gives_the_same_bits_from_the_same_generator(name: str) -> None:
    first, again, other = (VARIANTS[name](DIGITS, 10) for _ in range(3))
    reset(first, rng(4))
    reset(again, rng(4))
    reset(other, rng(5))
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_reset_leaves_torchs_generator_and_the_tape_alone() -> None:
    model = resnet20(DIGITS, 10)
    before, addresses = torch.get_rng_state(), [p.data_ptr() for p in model.parameters()]
    reset(model, rng())
    assert torch.equal(torch.get_rng_state(), before)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_reset_draws_the_same_point_in_both_precisions() -> None:
    single, double = mlp(DIGITS, 10), mlp(DIGITS, 10).double()
    reset(single, rng())
    reset(double, rng())
    for a, b in zip(single.parameters(), double.parameters(), strict=True):
        assert torch.equal(a, b.float())
    assert not torch.equal(next(double.parameters()), next(double.parameters()).float().double())


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [
        (nn.Linear(50, 4000), 50),
        (nn.Conv2d(6, 2000, 3, groups=2), 27),
        (nn.Conv1d(4, 2000, 5), 20),
        (nn.Conv3d(2, 2000, 2), 16),
    ],
)
def test_reset_has_the_law_of_torch(layer: nn.Module, fan_in: int) -> None:
    """U(-b, b) with b = 1/sqrt(fan_in) has variance b^2/3: checked against the law and against torch's own layer."""
    bound = 1 / math.sqrt(fan_in)
    default = copy.deepcopy(layer)
    reset(layer, rng(2))
    for module in (layer, default):
        for values in (module.weight, module.bias):
            assert 0.99 * bound < values.abs().max() <= bound * (1 + 1e-6)
            n = values.numel()
            assert abs(values.mean()) < 5 * bound / math.sqrt(3 * n)
            # (v/b)^2 has mean 1/3 and variance 4/45
            assert abs((values / bound).square().mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / n)
    assert not torch.equal(layer.weight, default.weight)


def test_reset_draws_in_the_order_of_registration() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.GroupNorm(1, 2), nn.Linear(2, 1, bias=False)).double()
    reset(model, rng(7))
    draw = rng(7)
    for parameter, fan_in in ((model[0].weight, 3), (model[0].bias, 3), (model[2].weight, 2)):
        expected = draw.uniform(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), tuple(parameter.shape))
        assert np.array_equal(parameter.detach().numpy(), expected)


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True)]
)
def test_reset_makes_norm_layers_neutral(norm: nn.Module) -> None:
    nn.init.constant_(norm.weight, 3.0)
    nn.init.constant_(norm.bias, 3.0)
    reset(norm, rng())
    assert norm.weight.tolist() == [1.0] * 4
    assert norm.bias.tolist() == [0.0] * 4


def test_reset_leaves_other_parameters_as_they_are() -> None:
    model = nn.Sequential(nn.EmbeddingBag(5, 3), nn.PReLU(), nn.Linear(3, 2))
    before = copy.deepcopy(model)
    reset(model, rng())
    assert torch.equal(model[0].weight, before[0].weight)
    assert torch.equal(model[1].weight, before[1].weight)
    assert not torch.equal(model[2].weight, before[2].weight)


# what is refused


@pytest.mark.parametrize("outputs", [0, -2, 2.0, True, "ten"])
@pytest.mark.parametrize("name", MODELS)
def test_a_bad_number_of_outputs_is_refused(name: str, outputs: object) -> None:
    with pytest.raises(UserError, match=f"outputs must be a whole number of at least 1, got {outputs!r}"):
        MODELS[name](DIGITS, outputs)


@pytest.mark.parametrize("shape", [(), (0,), (1, -8, 8), (1, 8.0, 8), 64, "cifar"])
@pytest.mark.parametrize("name", MODELS)
def test_a_bad_input_shape_is_refused(name: str, shape: object) -> None:
    with pytest.raises(UserError, match="input_shape must be the shape of one example"):
        MODELS[name](shape, 10)


@pytest.mark.parametrize("shape", [(64,), (8, 8), (1, 1, 8, 8), (1, 3, 8), (1, 8, 3)])
@pytest.mark.parametrize("name", ["small_cnn", "resnet20"])
def test_a_model_of_images_refuses_other_shapes(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=f"{name} needs images of shape .* got \\({shape[0]},.* use mlp"):
        MODELS[name](shape, 10)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_smallest_image_of_resnet20_is_5x5(norm: str) -> None:
    assert resnet20((1, 5, 5), 10, norm=norm)(random_inputs(1, 1, 5, 5)).isfinite().all()
    with pytest.raises(UserError, match="at least 5x5 pixels"):
        resnet20((1, 4, 5), 10, norm=norm)


@pytest.mark.parametrize("widths", [(), (0,), (16, -1), (1.5,), (True,), 64])
def test_bad_widths_are_refused(widths: object) -> None:
    with pytest.raises(UserError, match="hidden must be one positive whole number per layer"):
        mlp(DIGITS, 10, hidden=widths)
    with pytest.raises(UserError, match="channels must be one positive whole number per layer"):
        small_cnn(DIGITS, 10, channels=widths)


def test_an_unknown_norm_names_the_valid_ones() -> None:
    with pytest.raises(UserError, match="norm must be one of group, batch, got 'layer'"):
        resnet20(CIFAR, 10, norm="layer")
    with pytest.raises(UserError, match="norm must be one of group, none, got 'batch'"):
        small_cnn(CIFAR, 10, norm="batch")
