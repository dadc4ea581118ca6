"""LoRA by settings of [model]: in runs, sweeps and federations, and out of a run folder again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command, sentence
from safetensors.torch import load_file
from trained import settings, trained

import fednormec as fn
from fednormec.config.assemble import assemble
from fednormec.config.schema import Config, changed_saying, dump, read
from fednormec.data import Examples, Kind
from fednormec.errors import UserError
from fednormec.federation.agreement import for_client, for_server, read_federation
from fednormec.federation.client import answering
from fednormec.federation.messages import REFUSED, Request
from fednormec.federation.provision import make
from fednormec.federation.wire import Wire
from fednormec.problems import adapters
from fednormec.results.exporting import export

pytest.importorskip("peft", reason="LoRA needs the package peft")
pytest.importorskip("transformers", reason="LoRA is tried on models of transformers")
pytestmark = [
    pytest.mark.long,  # peft takes seconds to import
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
NET = """
from torch import nn
from transformers import BertConfig, BertModel


class Net(nn.Module):
    def __init__(self, words, length, outputs):
        super().__init__()
        config = BertConfig(
            vocab_size=words, max_position_embeddings=length, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
        self.body, self.head = BertModel(config, add_pooling_layer=False), nn.Linear(8, outputs)

    def forward(self, x):
        return self.head(self.body(input_ids=x).last_hidden_state[:, 0])


def build(input_shape, outputs, words: int = 12):
    return Net(words, input_shape[0], outputs)
"""
WORDS, LENGTH, CLASSES = 12, 5, 3
OWN = {"name": "net.py:build", "lora_rank": 2, "lora_layers": ["query", "value"], "trainable": ["head.*"]}
ADAPTERS, HEAD = 2 * 2 * 2 * (2 * 8), 9 * CLASSES  # two layers, two of each, A and B


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (48, LENGTH))
    np.savez(tmp_path / "words.npz", x=x, y=(x[:, 0] + x[:, 1]) % CLASSES)
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)


def asked(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    data = {"source": "words.npz", "inputs": "tokens", "clients": 4}
    return settings("own", data=data, model=OWN if model is None else model, **sections)


def words(rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, WORDS, (rows, LENGTH)))


# what is trained


def test_the_vector_is_the_adapters_and_what_is_named_beside_them() -> None:
    whole = assemble(asked({"name": "net.py:build"})).problem
    alone = assemble(asked({key: value for key, value in OWN.items() if key != "trainable"})).problem
    found = assemble(asked())
    assert (alone.dim, found.problem.dim) == (ADAPTERS, ADAPTERS + HEAD) and whole.dim > 1000
    assert found.config["model"] == {
        "name": "net.py:build", "words": 12, "lora_rank": 2, "lora_layers": ("query", "value"),
        "trainable": ("head.*",),
    }  # fmt: skip
    Path("again.toml").write_text(dump(found.config))
    again = assemble(read("again.toml"))
    start = np.random.default_rng(0)
    assert again.config == found.config and torch.equal(again.problem.init(start), found.problem.init(start))
    names = found.problem.named(found.problem.init(start))
    assert sum(tensor.numel() for name, tensor in names.items() if "lora_" in name) == ADAPTERS


def test_the_model_at_the_start_is_the_one_without_adapters() -> None:
    start, x = np.random.default_rng(0), words(6)
    plain, found = (assemble(asked(model)).problem for model in ({"name": "net.py:build"}, OWN))
    with torch.no_grad():
        expected, outputs = (one.model(one.init(start))(x) for one in (plain, found))
    assert torch.equal(outputs, expected)


def test_numbers_of_the_adapters_follow_from_the_runs_seed() -> None:
    start = np.random.default_rng(0)
    ones, again, others = (
        assemble(asked({**OWN, "trainable": []}, run={"seed": seed})).problem.init(start) for seed in (4, 4, 5)
    )
    assert torch.equal(ones, again) and not torch.equal(ones, others)


@pytest.mark.parametrize("name", ["linear", "mlp", "small_cnn", "resnet20"])
def test_our_own_models_take_adapters(name: str) -> None:
    plain, found = (assemble(settings(name, model={"name": name} | own)).problem for own in ({}, {"lora_rank": 2}))
    start, x = np.random.default_rng(0), torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, outputs = (one.model(one.init(start))(x) for one in (plain, found))
    assert 0 < found.dim < plain.dim or name == "linear"
    assert torch.equal(outputs, expected)


def test_a_layer_with_an_adapter_can_be_trained_itself_by_its_own_name() -> None:
    found = assemble(asked({**OWN, "trainable": ["*layer.0*query.weight"]})).problem
    assert found.dim == ADAPTERS + 8 * 8


# runs, and out of them again


def test_a_private_run_trains_adapters_and_nothing_else(fednormec_: Command, tmp_path: Path) -> None:
    private = asked(
        method={"name": "dp_fed_avg_clip", "tau": 1.0}, privacy={"epsilon": 6.0}, local={"name": "gd", "step": 1.0},
        run={"rounds": 3, "seed": 4, "evaluate_every": 1},
    )  # fmt: skip
    Path("mine.toml").write_text(dump(private))
    for out in ("runs/a", "runs/b"):
        said = fednormec_("run", "mine.toml", "--out", out, "--quiet")
        assert said.code == 0, said.err
        assert "Warning" not in said.err, "nothing about functions that vmap has no rule for"
    assert Path("runs/a/metrics.jsonl").read_text().count("epsilon") == 3
    found = load_file("runs/a/model.safetensors")
    again = load_file("runs/b/model.safetensors")
    problem = assemble(private).problem
    before = problem.named(problem.init(np.random.default_rng(0)))
    assert found.keys() == before.keys() == again.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, again[name]), "bit for bit repeatable"
        assert torch.equal(tensor, before[name]) != ("lora_" in name or name.startswith("head.")), name
    for command in (("evaluate", "runs/a"), ("predict", "runs/a", "--data", "words.npz", "--out", "y.csv")):
        said = fednormec_(*command)
        assert said.code == 0, said.err


def test_a_model_comes_back_as_it_was_trained(tmp_path: Path) -> None:
    as_trained = trained(tmp_path / "run", asked())
    found, plain = fn.load("run"), assemble(asked({"name": "net.py:build"})).problem
    for format, path in (("safetensors", "m.safetensors"), ("torchscript", "m.pt")):
        assert export("run", format, Path(path)).compared.startswith("the same as the model to ")
    script, start = torch.jit.load("m.pt"), plain.model(plain.init(np.random.default_rng(0))).eval()
    for rows in (1, 7):
        x = words(rows)
        with torch.no_grad():
            expected = as_trained(x)
            assert torch.equal(found(x), expected) and not torch.equal(start(x), expected)
            torch.testing.assert_close(script(x), expected, rtol=0, atol=1e-5)


def test_a_model_comes_back_as_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the format onnx needs the extra onnx")
    onnxruntime = pytest.importorskip("onnxruntime", reason="the format onnx needs the extra onnx")
    trained(tmp_path / "run", asked())
    assert export("run", "onnx", Path("m.onnx")).compared.startswith("the same as the model to ")
    session, found = onnxruntime.InferenceSession("m.onnx"), fn.load("run")
    for rows in (1, 7):
        (outputs,) = session.run(None, {"inputs": words(rows).numpy()})
        torch.testing.assert_close(torch.from_numpy(outputs), found(words(rows)).detach(), rtol=0, atol=1e-5)


def test_a_sweep_over_ranks(here: None, fednormec_: Command) -> None:
    Path("mine.toml").write_text(dump(asked()))
    said = fednormec_("sweep", "mine.toml", "--over", "model.lora_rank=[1,3]", "--out", "sweeps/a", "--quiet")
    assert said.code == 0 and "model.lora_rank" in said.out, said.err


def test_settings_of_every_model_stay_when_another_is_chosen() -> None:
    config, dropped = changed_saying(asked(), {"model.name": "mlp"}, "--set")
    assert config["model"] == {**OWN, "name": "mlp"} and dropped == []


# a federation


def test_a_federation_agrees_on_the_adapters(tmp_path: Path) -> None:
    sections: Config = {
        "model": OWN, "local": {"step": 0.5}, "method": {"name": "fed_avg"},
        "run": {"rounds": 2, "seed": 3, "dtype": "float64"},
    }  # fmt: skip
    Path("asked.toml").write_text(dump(sections))
    names = ("a", "b")
    folder = make(tmp_path / "fed", names, [LENGTH], CLASSES, "localhost:9443", tmp_path / "asked.toml", tokens=True)
    server = for_server(read_federation(folder), folder)
    data = [Examples(words(4).numpy(), np.array([0, 1, 2, i]), Kind(inputs="tokens")) for i in range(2)]
    places = [folder / "clients" / name for name in names]
    parties = [for_client(read_federation(at), at.name, own, at) for at, own in zip(places, data, strict=True)]
    assert {server.agreed} == {party.agreed for party in parties}
    clients = [answering(party, i, places[i]) for i, party in enumerate(parties)]
    experiment = server.experiment

    def rounds(clients: list[Any]) -> list[Any]:
        place = Wire(names, lambda: "a", server.agreed, lambda asks: {i: clients[i](asks[i]) for i in asks}, print)
        return [r.x.clone() for r in fn.simulate(
            experiment.problem, experiment.algorithm, experiment.participation, rounds=2, seed=3, on=place
        )]  # fmt: skip

    whole = assemble(sections, fn.data.FederatedData(tuple(data), None, names, CLASSES))
    alone = [r.x.clone() for r in fn.simulate(whole.problem, whole.algorithm, whole.participation, rounds=2, seed=3)]
    assert experiment.problem.dim == whole.problem.dim == ADAPTERS + HEAD
    torch.testing.assert_close(rounds(clients), alone, rtol=1e-6, atol=1e-12)
    other = read_federation(places[0])
    other["model"]["lora_rank"] = 1
    stranger = for_client(other, "a", data[0], places[0])
    reply = answering(stranger, 0, tmp_path)(Request("b", server.agreed, 1, 0, True, b"n" * 16, alone[0]))
    assert stranger.agreed != server.agreed and reply.status == REFUSED and reply.message is None


# mistakes


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"lora_rank": 0}, r"\[model\] lora_rank must be at least 1, not 0"),
        ({"lora_rank": 1.5}, "lora_rank must be a whole number"),
        ({"lora_rank": 2, "lora_alpha": -1}, r"\[model\] lora_alpha must be a positive number, not -1.0"),
        ({"lora_alpha": 4}, "lora_alpha is for LoRA, which begins with its rank: set lora_rank"),
        ({"lora_layers": ["query"]}, "lora_layers is for LoRA, which begins with its rank: set lora_rank"),
        ({"lora_rank": 2, "lora_layers": ["q_lin"]}, "no layer's name is or ends in 'q_lin'; there are: body"),
        ({"lora_rank": 2, "lora_layers": ["LayerNorm"]}, "is a LayerNorm, which cannot have an adapter"),
        ({"lora_rank": 2, "trainable": ["tail.*"]}, "no parameter's name fits 'tail"),
        ({"lora_rang": 2}, "unknown setting .* did you mean 'lora_rank'"),
        ({"name": "bag", "lora_rang": 2}, "unknown setting .* did you mean 'lora_rank'"),
    ],
)
def test_mistakes_are_sentences(own: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        assemble(asked({"name": "net.py:build", **own}))


def test_a_mistake_ends_the_command_with_2(fednormec_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.toml").write_text(dump(asked()))
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    said = fednormec_("run", "mine.toml", "--out", "runs/a")
    assert said.code == 2 and "pip install 'fednormec[peft]'" in sentence(said.err)
    assert not Path("runs").exists()
