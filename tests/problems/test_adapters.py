"""Low-rank adapters: the same model at the start, numbers from the seed alone, gradients of each client, refusals."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fednormec as fn
from fednormec.core.vectors import flatten
from fednormec.errors import UserError
from fednormec.problems import adapters
from fednormec.problems.models import causal_net, mlp, reset, resnet20

pytest.importorskip("peft", reason="LoRA needs the package peft")
transformers = pytest.importorskip("transformers", reason="LoRA is tried on models of transformers")
pytestmark = pytest.mark.long  # peft takes seconds to import
WORDS, CLASSES, LENGTH = 20, 3, 6


class Bert(nn.Module):
    """A tiny transformer that classifies rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes, **still)
        self.body = transformers.BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(input_ids=x).last_hidden_state[:, 0])
        return scores


class Gpt(nn.Module):
    """A tiny transformer whose layers are transformers' Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, **still
        )
        self.body, self.head = transformers.GPT2Model(config), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(input_ids=x, use_cache=False).last_hidden_state[:, -1])
        return scores


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def tokens(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, WORDS, (rows, LENGTH)), rng.integers(0, CLASSES, rows)


def images(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, 1, 8, 8)), rng.integers(0, CLASSES, rows)


def texts(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return tokens(rows, seed)[0], tokens(rows, seed + 99)[0]


Case = tuple[Callable[[], nn.Module], Callable[..., tuple[np.ndarray, np.ndarray]], Any, str]
CASES: dict[str, Case] = {
    "bert": (Bert, tokens, ["query", "value"], "vmap"),
    "bert, all linear": (Bert, tokens, None, "vmap"),
    "gpt": (Gpt, tokens, None, "vmap"),
    "embeddings": (Bert, tokens, ["word_embeddings", "query"], "vmap"),
    "mlp": (lambda: mlp((1, 8, 8), CLASSES, (5,)), images, None, "vmap"),
    "causal_net": (lambda: causal_net((LENGTH,), WORDS, width=8, layers=2), texts, ["mix"], "vmap"),
    "convolutions": (lambda: resnet20((1, 8, 8), CLASSES), images, ["0", "residual.3"], "loop"),
}


def moved(module: nn.Module) -> nn.Module:
    """The module with other numbers in what is trained: at B = 0 half of all gradients are zero."""
    rng = np.random.default_rng(1)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = torch.from_numpy(0.3 * rng.standard_normal(tuple(parameter.shape))).to(parameter.dtype)
    return module


def adapted(case: str, rank: int = 2) -> nn.Module:
    build, _, layers, _ = CASES[case]
    return fn.lora(seeded(build), rank, layers)


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


# what is added


@pytest.mark.parametrize("case", CASES)
def test_at_the_start_the_model_is_the_one_without_adapters(case: str) -> None:
    build, data, layers, _ = CASES[case]
    module = seeded(build).double()
    before = copy.deepcopy(module.state_dict())
    found = fn.lora(module, 2, layers)
    x = torch.as_tensor(data(4)[0])
    with torch.no_grad():
        assert torch.equal(found(x), module(x))
        assert torch.equal(found.eval()(x), module.eval()(x))
        assert not torch.equal(moved(found)(x), module(x))
    assert before.keys() == module.state_dict().keys(), "the module that was given stays as it is"
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_the_adapters_alone_are_trained() -> None:
    found = trained(adapted("bert"))
    assert set(found) == {
        f"body.encoder.layer.{layer}.attention.self.{which}.lora_{letter}.default.weight"
        for layer in (0, 1) for which in ("query", "value") for letter in "AB"
    }  # fmt: skip
    assert all(bool((tensor == 0).all()) == ("lora_B" in name) for name, tensor in found.items())


def test_by_default_every_linear_layer_has_an_adapter() -> None:
    found = {name.partition(".lora")[0] for name in trained(adapted("bert, all linear"))}
    assert found == {name for name, layer in Bert().named_modules() if isinstance(layer, nn.Linear)} and len(found) > 10


def test_a_name_is_taken_in_full_or_from_a_dot_on() -> None:
    found = trained(fn.lora(Bert(), 1, ["layer.1.output.dense", "head"]))
    assert {name.partition(".lora")[0] for name in found} == {"body.encoder.layer.1.output.dense", "head"}
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))  # "1" ends the name "0.1", too
    assert {name.partition(".lora")[0] for name in trained(fn.lora(nested, 1))} == {"0.0", "1"}


def test_alpha_over_the_rank_is_the_scale() -> None:
    x, outputs = torch.as_tensor(tokens(4)[0]), []
    for alpha in (None, 2.0, 6.0):
        module = moved(fn.lora(seeded(lambda: nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, 3))), 2, alpha=alpha))
        with torch.no_grad():
            base = module[1].base_layer(module[0](x))
            outputs.append(module(x) - base)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    torch.testing.assert_close(outputs[2], 3 * outputs[1])


# the seed


def test_the_numbers_follow_from_the_seed_alone() -> None:
    module, found = seeded(Bert), []
    for seed, drawn in ((3, 0), (3, 5), (4, 0)):
        torch.manual_seed(drawn)
        before = torch.get_rng_state()
        found.append(flatten(fn.lora(module, 2, seed=seed)))
        assert torch.equal(torch.get_rng_state(), before), "torch's global generator stays where it was"
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_numbers_of_our_models_are_not_disturbed() -> None:
    module = mlp((6,), 3, (5,))
    reset(module, np.random.default_rng(0))
    found = fn.lora(module, 2).state_dict()
    assert torch.equal(found["1.base_layer.weight"], module.state_dict()["1.weight"])


# gradients


def literal(module: nn.Module, x: Tensor, pair: tuple[np.ndarray, np.ndarray]) -> Tensor:
    """One client's gradient, straight from autograd."""
    module = copy.deepcopy(module).double()
    parameters = [p for p in module.parameters() if p.requires_grad]
    for parameter, piece in zip(parameters, torch.split(x, [p.numel() for p in parameters]), strict=True):
        parameter.data = piece.view(parameter.shape).clone()
    inputs, targets = (torch.as_tensor(values) for values in pair)
    outputs = module(inputs)
    loss = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (3, 5, 1, 4)])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_autograds_of_each_client(case: str, sizes: tuple[int, ...]) -> None:
    _, data, _, way = CASES[case]
    module = moved(adapted(case))
    clients = [data(size, seed) for seed, size in enumerate(sizes)]
    problem = fn.NeuralProblem(module, clients, dtype=torch.float64)
    assert problem.way == way and problem.dim == sum(tensor.numel() for tensor in trained(module).values())
    x, ids = problem.init(np.random.default_rng(0)), np.arange(len(sizes))
    rows = torch.stack([x * (1 + i / 10) for i in ids])
    for at in (x, rows):
        expected = torch.stack([literal(module, at if at.ndim == 1 else at[i], clients[i]) for i in ids])
        torch.testing.assert_close(problem.grad(at, ids), expected, rtol=1e-10, atol=1e-13)


def test_a_problem_with_adapters_can_be_sent() -> None:
    cloudpickle = pytest.importorskip("cloudpickle", reason="by which Ray sends a problem")
    clients = [tokens(4, seed) for seed in range(3)]
    problem = fn.NeuralProblem(adapted("bert"), clients, dtype=torch.float64)
    again = pickle.loads(cloudpickle.dumps(problem))
    x, ids = problem.init(np.random.default_rng(0)) + 0.1, np.arange(3)
    assert torch.equal(again.grad(x, ids), problem.grad(x, ids)) and again.digest() == problem.digest()


def test_training_repeats_and_leaves_the_rest_as_it_was() -> None:
    clients = [tokens(4, seed) for seed in range(5)]
    module = adapted("bert")
    module.head.requires_grad_()
    problem = fn.NeuralProblem(module, clients, tokens(9, 9))
    assert problem.dim == 2 * 2 * 2 * (2 * 8) + 9 * CLASSES
    method, privacy = fn.dp_fed_avg_clip(fn.sgd(0.5, steps=2, batch_size=2), tau=1.0), fn.Privacy(epsilon=8.0)
    ones, others = (fn.train(problem, method, privacy=privacy, rounds=3, seed=2) for _ in range(2))
    assert torch.equal(ones.x, others.x) and 0 < ones.history[-1]["epsilon"] <= 8.0
    before, after = problem.named(problem.init(np.random.default_rng(0))), problem.named(ones.x)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) != ("lora_" in name or name.startswith("head.")), name


# mistakes


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (Bert, {"rank": 0}, "the rank of LoRA must be at least 1, not 0"),
        (Bert, {"rank": 10**12}, "would take .* GB.* take a smaller rank"),
        (Bert, {"rank": 2, "alpha": 0.0}, "alpha of LoRA must be a positive number, not 0.0"),
        (Bert, {"rank": 2, "layers": ["query", "v"]}, "no layer's name is or ends in 'v'; there are: body.embeddings"),
        (Bert, {"rank": 2, "layers": []}, "the list of layers is empty"),
        (Bert, {"rank": 2, "layers": ["LayerNorm"]}, "'body.*LayerNorm' is a LayerNorm, which cannot have an adapter"),
        (Bert, {"rank": 2, "layers": ["encoder"]}, "'body.encoder' is a BertEncoder, which cannot have an adapter"),
        (nn.ReLU, {"rank": 2}, "the model has no linear layer within it"),
        (lambda: nn.Linear(2, 2), {"rank": 2}, "the model has no linear layer within it"),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)), {"rank": 3, "layers": ["0"]}, "divisible by groups"),
        (lambda: fn.lora(Bert(), 1), {"rank": 2}, "the model has adapters of peft already"),
    ],
)
def test_mistakes_are_sentences(build: Callable[[], nn.Module], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        fn.lora(build(), **settings)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("layers", "parent"),
    [
        (["linear1"], "TransformerEncoderLayer"),
        (["self_attn"], "MultiheadAttention, which cannot"),
        (["out_proj"], "MultiheadAttention"),
        (None, "MultiheadAttention"),
    ],
)
def test_layers_that_torch_does_not_call_are_refused(layers: list[str] | None, parent: str) -> None:
    """In evaluation torch's encoder takes their weights by itself: an adapter would be trained and then ignored."""
    encoder = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    with pytest.raises(UserError, match=parent):
        fn.lora(encoder, 2, layers)


def test_without_peft_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"LoRA needs the package peft: pip install 'fednormec\[peft\]'"):
        fn.lora(mlp((6,), 3), 2)


def test_peft_is_imported_when_it_is_needed() -> None:
    code = "import fednormec as fn, sys; fn.lora; assert not {'peft', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
