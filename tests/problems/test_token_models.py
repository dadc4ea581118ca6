"""Models of tokens: what they compute, what they may not see, and gradients that are each client's own."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fednormec as fn
from fednormec.errors import UserError
from fednormec.problems.losses import cross_entropy, mse
from fednormec.problems.models import TOKEN_MODELS, bag, causal_net, reset

quick = settings(deadline=None, max_examples=25, database=None)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def fresh(module: nn.Module, seed: int = 0) -> nn.Module:
    reset(module, rng(seed))
    return module.double()


def tokens(vocabulary: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(rng(seed).integers(0, vocabulary, shape))


def test_the_sizes_are_those_of_the_formulas() -> None:
    def size(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    assert size(causal_net((80,), 97)) == 97 * 32 + 5 * (2 * 32 + 2 * 32 * 32 + 32) + 2 * 32 + 32 * 97 + 97
    assert size(bag((8,), 1, vocabulary=1713)) == 1713 + 1
    assert size(bag((8,), 3, vocabulary=50, hidden=[7, 5])) == 50 * 7 + 7 + 7 * 5 + 5 + 5 * 3 + 3


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_token_sees_the_ones_before_it_and_no_later_one(layers: int) -> None:
    """Exactly the last 2^layers tokens: a change of another changes no bit, and one of these changes some net's."""
    length, at, seen = 12, 9, set[int]()
    for seed in range(8):  # in one net or another no ReLU stands in the way
        module, x = fresh(causal_net((12,), 5, width=6, layers=layers), seed), tokens(5, 1, length, seed=seed)
        before = module(x)[0, at]
        for position in range(length):
            other = x.clone()
            other[0, position] = (x[0, position] + 1) % 5
            seen |= set() if torch.equal(module(other)[0, at], before) else {position}
    assert seen == set(range(at - 2**layers + 1, at + 1))


def test_a_layer_is_its_formula() -> None:
    """h_t + relu(W [norm(h_t), norm(h_{t-d})] + b), token by token."""
    module = fresh(causal_net((7,), 4, width=3, layers=2))
    x = tokens(4, 1, 7)
    embedding, *layers, norm, last = module.children()
    h = [embedding.weight[token] for token in x[0]]
    for k, layer in enumerate(layers):
        z = [nn.functional.layer_norm(one, (3,), layer.norm.weight, layer.norm.bias) for one in h]
        past = [z[t - 2**k] if t >= 2**k else torch.zeros(3).double() for t in range(7)]
        h = [h[t] + (layer.mix.weight @ torch.cat([z[t], past[t]]) + layer.mix.bias).relu() for t in range(7)]
    expected = torch.stack([last(norm(one)) for one in h])
    torch.testing.assert_close(module(x)[0], expected, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 9))
@quick
def test_a_bag_is_linear_in_how_often_each_token_is_there(outputs: int, length: int, vocabulary: int) -> None:
    module = fresh(bag((length,), outputs, vocabulary))
    x = tokens(vocabulary, 3, length)
    counts = nn.functional.one_hot(x, vocabulary).sum(dim=1).double()
    weight, bias = (dict(module.named_parameters())[f"0.{name}"] for name in ("tokens.weight", "bias"))
    torch.testing.assert_close(module(x), counts @ weight + bias, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module(x.flip(1)), module(x), rtol=1e-12, atol=1e-12)


def test_reset_is_the_seeds_alone_in_both_precisions_and_has_its_law() -> None:
    one, other = bag((4,), 9, vocabulary=5000), bag((4,), 9, vocabulary=5000).double()
    reset(one, rng(3))
    reset(other, rng(3))
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q.float())
    bias, weight = other.parameters()
    assert torch.equal(bias, torch.zeros(9).double())
    values = weight.detach().flatten()
    assert abs(float(values.mean())) < 5 * 0.1 / math.sqrt(len(values))
    assert abs(float(values.std()) - 0.1) < 0.002


NEXT = [(tokens(5, n, 6, seed=n).numpy(), tokens(5, n, 6, seed=9 + n).numpy()) for n in (3, 1, 4)]
VALUES = [(tokens(5, n, 6, seed=n).numpy(), rng(n).standard_normal(n)) for n in (3, 1, 4)]


@pytest.mark.parametrize("way", ["vmap", "loop"])
@pytest.mark.parametrize(
    ("build", "clients", "loss"),
    [
        (lambda: causal_net((6,), 5, width=4, layers=2), NEXT, cross_entropy),
        (lambda: bag((6,), 1, vocabulary=5), VALUES, mse),
        (lambda: bag((6,), 1, vocabulary=5, hidden=(4,)), VALUES, mse),
    ],
    ids=["causal_net", "bag", "bag with a hidden layer"],
)
def test_gradients_are_each_clients_own(
    build: Callable[[], nn.Module], clients: list[tuple[np.ndarray, np.ndarray]], loss: Callable[..., Tensor], way: str
) -> None:
    module = fresh(build())
    problem = fn.NeuralProblem(module, clients, loss=loss, vectorize=way, dtype=torch.float64)  # type: ignore[arg-type]
    x = problem.init(rng())
    points = torch.stack([x, 0.9 * x, 1.1 * x])
    found = problem.grad(points, np.arange(3))
    for row, (inputs, targets) in enumerate(clients):
        own = copy.deepcopy(module)
        nn.utils.vector_to_parameters(points[row], own.parameters())
        losses = loss(own(torch.as_tensor(inputs)), torch.as_tensor(targets))
        pieces = torch.autograd.grad(losses.mean(), list(own.parameters()))
        expected = torch.cat([g.flatten() for g in pieces])
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", TOKEN_MODELS)
def test_bad_sizes_are_refused(name: str) -> None:
    build = TOKEN_MODELS[name]
    with pytest.raises(UserError, match=f"{name} needs a row of tokens as each example, got shape \\(1, 8, 8\\)"):
        build((1, 8, 8), 10)
    with pytest.raises(UserError, match="vocabulary must be a whole number of at least 1, got 0"):
        build((8,), 10, vocabulary=0)
    with pytest.raises(UserError, match="outputs must be a whole number"):
        build((8,), 0, vocabulary=3)
    with pytest.raises(UserError, match="one positive whole number per layer"):
        build((8,), 10, **({"width": 0} if name == "causal_net" else {"hidden": (0,)}))
