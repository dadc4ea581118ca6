"""One client's data change that client's message alone: whatever the source, the model and the way of computing."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from command import sets
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fednormec as fn
import fednormec.sweeps.ranking
from fednormec.config.assemble import assemble
from fednormec.config.datasets import federated_data
from fednormec.config.own import Loading
from fednormec.core.local import Moment
from fednormec.core.randomness import generator
from fednormec.data import FederatedData, from_arrays, hold_out, split
from fednormec.engine.clients import computed, tiles
from fednormec.errors import UserError
from fednormec.problems import apart
from fednormec.results.compare import facts, table
from fednormec.results.groups import grouped
from fednormec.results.reading import read_run
from fednormec.runs.progress import News
from fednormec.runs.records import Summary
from fednormec.sweeps.pool import Cell, Outcome

pytestmark = pytest.mark.usefixtures("undrawn")

CLASSES, VICTIM, SIZES = 4, 2, (6, 5, 8, 5, 7)
HOSTILE = ("more rows", "one row", "huge", "not finite", "other labels")
LOCALS = {"gd": fn.gd(0.5, 2), "ig": fn.ig(0.5, 3, order="reshuffle"), "sgd": fn.sgd(0.5, 2, 4)}
SHAPE = (1, 8, 8)
MODELS = {
    "linear": lambda: fn.models.linear(SHAPE, CLASSES),
    "mlp": lambda: fn.models.mlp(SHAPE, CLASSES, hidden=(7, 5)),
    "small_cnn": lambda: fn.models.small_cnn(SHAPE, CLASSES, channels=(4, 8)),
    "resnet20": lambda: fn.models.resnet20(SHAPE, CLASSES),
    "resnet20, batch norm": lambda: fn.models.resnet20(SHAPE, CLASSES, norm="batch"),
}


def benign(shape=SHAPE, sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((n, *shape)), rng.integers(0, CLASSES, n)) for n in sizes]


def spoiled(pair, kind):
    """Any other data, with labels among the public classes."""
    x, y = pair
    if kind == "more rows":
        return np.concatenate([x, 3 * x + 1, -x]), np.concatenate([y, y, (y + 1) % CLASSES])
    if kind == "one row":
        return x[:1], y[:1]
    if kind == "huge":
        return 1e30 * x, y
    if kind == "not finite":
        odd = np.resize([np.nan, np.inf, -np.inf], x.size).reshape(x.shape)
        return odd, y
    return -6 * x, (y + 1) % CLASSES


def with_one_spoiled(pairs, kind, victim=VICTIM):
    return [spoiled(pair, kind) if i == victim else pair for i, pair in enumerate(pairs)]


def messages(problem, local, seed=0):
    """What each client sends in the first round, tile by tile as an engine computes it."""
    algorithm = fn.fed_normec(local, alpha=0.01)
    server = algorithm.init(problem.init(generator(seed, "init")))
    everyone = fn.full().draw(problem.num_clients, generator(seed, "cohort", 1))
    sent = []
    for some in tiles(fn.Job(problem, algorithm, fn.full(), None, seed, server.x), everyone):
        rows = torch.zeros(len(some.computing), algorithm.memory_slots * problem.dim, dtype=server.x.dtype)
        sent.append(computed(problem, algorithm, server, rows, some.computing, Moment(seed, 1))[0].whole().clone())
    return torch.cat(sent)


def others(rows, victim=VICTIM):
    return rows[[i for i in range(len(rows)) if i != victim]]


def assert_only_the_victim_moves(one, other, local):
    """Messages have length 1 at the most; in float64 rounding moves them by some 1e-14."""
    before, after = messages(one, local), messages(other, local)
    assert (others(before) - others(after)).norm(dim=1).max() < 1e-9
    assert not torch.equal(before[VICTIM], after[VICTIM])
    assert others(before).norm(dim=1).min() > 0.5  # what is compared is there


# ways of computing


@pytest.mark.long
@pytest.mark.parametrize("vectorize", ["layers", "vmap", "loop"])
@pytest.mark.parametrize("name", MODELS)
def test_messages_of_a_model_in_every_way(name, vectorize):
    deep = name.startswith("resnet")
    torch.manual_seed(0)
    module, data = MODELS[name](), benign()
    one = fn.NeuralProblem(module, data, dtype=torch.float64, vectorize=vectorize, tile=5)
    for kind in HOSTILE[::3] if deep else HOSTILE:
        other = fn.NeuralProblem(module, with_one_spoiled(data, kind), dtype=torch.float64, vectorize=vectorize, tile=5)
        assert other.way == one.way == vectorize
        for local in [LOCALS["gd"]] if deep else LOCALS.values():
            assert_only_the_victim_moves(one, other, local)


@pytest.mark.parametrize("name", MODELS)
def test_the_models_of_the_package_are_computed_in_layers_whatever_their_data(name):
    """Neither the way nor the tile hangs on a number of the clients': not finite ones, or one label everywhere."""
    assert apart.known(MODELS[name]())
    odd = [(np.full_like(x, np.nan), 0 * y) for x, y in benign()]
    one, other = (fn.NeuralProblem(MODELS[name](), data) for data in (benign(), odd))
    assert one.way == other.way == "layers" and one.tile == other.tile


@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind != "not finite"])
def test_messages_of_logistic_regression(kind, local):
    def problem(pairs):
        rows = [torch.from_numpy(x.reshape(len(x), -1)) for x, _ in pairs]
        return fn.Logistic(rows, [torch.from_numpy(np.where(y > 1, 1.0, -1.0)) for _, y in pairs], regularizer=0.1)

    assert_only_the_victim_moves(problem(benign()), problem(with_one_spoiled(benign(), kind)), local)


# sources


def written(path: Path, source: str, pairs):
    """The clients' data in a file or folder, with a public test set where the source has one."""
    x, y = np.full((4, *SHAPE), 0.5), np.arange(4)
    if source == "folder":
        path.mkdir()
        for i, (inputs, labels) in enumerate(pairs):
            np.savez(path / f"client{i}.npz", x=inputs, y=labels)
        return path
    owner = np.repeat(np.arange(len(pairs)), [len(labels) for _, labels in pairs])
    test = {"x_test": x, "y_test": y} if source == "named, with a test set" else {}
    inputs, labels = (np.concatenate(part) for part in zip(*pairs, strict=True))
    np.savez(path, x=inputs, y=labels, client=owner, **test)
    return path.with_suffix(".npz")


def config_of(source, problem, local, privacy=True):
    made = {
        "problem": {"name": problem},
        "data": {"source": str(source), "classes": CLASSES},
        "method": {"name": "fed_normec", "alpha": 0.01},
        "local": {"name": local},
        "run": {"dtype": "float64", "rounds": 2},
        **({"privacy": {"epsilon": 8.0}} if privacy else {}),
    }
    if problem == "neural":
        made["model"] = {"name": "mlp"}
    step = {"gd": {"steps": 2}, "ig": {"batch_size": 3}, "sgd": {"steps": 2, "batch_size": 4}}
    made["local"] |= {"step": 0.5, **step[local]}
    return made


@pytest.mark.long
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("problem", ["neural", "logistic"])
@pytest.mark.parametrize("source", ["named", "named, with a test set", "folder", "from_arrays"])
def test_messages_from_every_source_that_names_its_clients(tmp_path, source, problem, local):
    def experiment(pairs, name):
        if source == "from_arrays":
            data = replace(from_arrays(pairs), classes=CLASSES)
            return assemble({k: v for k, v in config_of("", problem, local).items() if k != "data"}, data)
        return assemble(config_of(written(tmp_path / name, source, pairs), problem, local))

    before = experiment(benign(), "before")
    for k, kind in enumerate(HOSTILE):
        if problem == "logistic" and kind == "not finite":
            continue
        after = experiment(with_one_spoiled(benign(), kind), f"after{k}")
        assert_only_the_victim_moves(before.problem, after.problem, before.algorithm.local)


@pytest.mark.long
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards"])
def test_messages_after_a_deal_of_examples_without_owners(tmp_path, partition, local):
    """The deal makes the clients; a neighbour has other examples after it. The test set is public and stays."""
    x, y = (np.concatenate(part) for part in zip(*benign(), strict=True))
    np.savez(tmp_path / "all.npz", x=x, y=y)
    config = config_of(tmp_path / "all.npz", "neural", local)
    config["data"] |= {"partition": partition, "clients": 5}
    data = federated_data(config, {}, 0, Loading()).data
    assert data.test is not None and not data.held_out
    rest = {name: section for name, section in config.items() if name != "data"}
    before = assemble(rest, data)
    assert torch.equal(messages(assemble(config).problem, LOCALS[local]), messages(before.problem, LOCALS[local]))
    for kind in HOSTILE:
        pairs = with_one_spoiled([(client.x, client.y) for client in data.clients], kind)
        other = FederatedData(from_arrays(pairs).clients, data.test, data.names, data.classes)
        assert_only_the_victim_moves(before.problem, assemble(rest, other).problem, before.algorithm.local)


def test_a_file_of_named_clients_trains_as_a_folder_of_their_files(tmp_path):
    """Each client's rows in their order, whoever else there is."""
    paths = [
        written(tmp_path / name, source, benign())
        for name, source in (("a", "named, with a test set"), ("b", "folder"))
    ]
    one, other = (assemble(config_of(path, "neural", "ig")).problem for path in paths)
    assert torch.equal(messages(one, LOCALS["ig"]), messages(other, LOCALS["ig"]))


# what is held out


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.floats(0, 0.99), st.integers(0, 2**32))
def test_what_a_client_holds_out(n, fraction, seed):
    own = np.arange(100, 100 + 2 * n, 2)
    kept, aside = hold_out(own, fraction, generator(seed, "split", 3))
    assert len(aside) == min(round(fraction * n), n - 1) and len(kept) >= 1
    assert np.array_equal(np.sort(np.concatenate([kept, aside])), own)
    assert np.all(np.diff(kept) > 0)
    again = hold_out(own + 7, fraction, generator(seed, "split", 3))
    assert np.array_equal(again[0] - 7, kept)


def test_every_example_is_held_out_equally_often():
    draws = 800
    hits = sum(np.isin(np.arange(10), hold_out(np.arange(10), 0.3, generator(s, "split", 1))[1]) for s in range(draws))
    assert np.abs(hits / draws - 0.3).max() < 4.5 * np.sqrt(0.3 * 0.7 / draws)


def test_the_sum_moves_by_what_one_client_sends_and_no_more(tmp_path):
    """Data chosen against one split of all rows, which one row more in the last client deals anew: what each of the
    others would train on then points the other way."""
    clients, each = 40, 5
    kept, anew = (np.isin(np.arange(200), split(n, 0.2, generator(0, "split"))[0]) for n in (200, 201))
    signed = kept * 1.0 - anew + 1e-3 * np.sin(np.arange(200))
    pairs = [(rows[:, None] * np.ones(3), np.ones(each, int)) for rows in signed.reshape(clients, each)]
    pairs[0][1][0] = 0  # of the other class, for there must be two
    x, y = pairs[-1]
    more = [*pairs[:-1], (np.concatenate([x, x[:1]]), np.append(y, 1))]
    config = config_of("", "logistic", "gd")
    sent = []
    for name, data in (("one", pairs), ("more", more)):
        config["data"] = {"source": str(written(tmp_path / name, "named", data))}
        sent.append(messages(assemble(config).problem, fn.gd(0.1)))
    assert (sent[0] - sent[1]).sum(0).norm() < 2
    assert torch.equal(sent[0][:-1], sent[1][:-1])
    assert sent[0].norm(dim=1).max() > 0.5 and {-1.0, 1.0} <= set(np.sign(sent[0][:, 0].tolist()))


def test_fewer_test_examples_change_nothing_that_is_trained_on(tmp_path):
    source = written(tmp_path / "all", "named", benign())
    whole, part = (config_of(source, "neural", "gd") for _ in range(2))
    part["data"]["test_examples"] = 2
    one, other = (federated_data(asked, {}, 0, Loading()).data for asked in (whole, part))
    assert one.held_out and other.held_out and len(other.test) == 2 < len(one.test) == 6
    assert all(np.array_equal(a.x, b.x) for a, b in zip(one.clients, other.clients, strict=True))


def test_figures_on_what_was_held_out_say_that_they_are_not_private(fednormec_, tmp_path):
    for name, source in (("own", "named"), ("public", "named, with a test set")):
        path = written(tmp_path / name, source, benign())
        code, out, err = fednormec_("run", "--out", f"run-{name}", *sets(f"data.source={path}", "run.rounds=3"))
        assert code == 0
        run = read_run(tmp_path / f"run-{name}")
        records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        held_out = name == "own"
        for key in ("test_loss", "test_accuracy"):
            assert (key in records[-1]["not_private"]) is held_out and (key in records[-1]) is not held_out
            assert (key in run.summary["not_private"]) is held_out
        assert ("test_accuracy" in facts(grouped([run]))[0]["not_private"]) is held_out
        labelled = [line for line in out.splitlines() if line.startswith("test ") and line.endswith(": not private)")]
        assert len(labelled) == (2 if held_out else 0)
        assert ("% (not private)  test loss" in err) is held_out
        assert ("test accuracy (not private)" in table(grouped([run])).header) is held_out
        assert ("test accuracy (not private)" in (run.path / "report.html").read_text()) is held_out
        assert "unless it is held out of clients' data" in " ".join(run.statement.split())


def test_a_sweep_by_what_was_held_out_is_not_private(monkeypatch, tmp_path):
    summary = {"metrics": {"test_accuracy": 0.5}, "status": "done", "epsilon": 1.0}
    cell, asked = Cell("beta=0.1", {"method.beta": 0.1}, {"local": {"step": 0.1}, "problem": {"name": "quadratic"}}), []
    monkeypatch.setattr(fednormec.sweeps.ranking, "price_of", lambda paths, ranked_by: asked.append(ranked_by))
    for apart_from, name in ((["left_out"], "test_accuracy"), (["test_accuracy"], "test_accuracy (not private)")):
        ended = Outcome(cell, tmp_path, Summary(summary | {"not_private": apart_from}), None)
        monkeypatch.setattr(fednormec.sweeps.ranking, "run_all", lambda *args, ended=ended: [ended])
        done = fednormec.sweeps.ranking.sweep([cell], tmp_path, 1)
        assert (
            f"{name}  ε" in fednormec.sweeps.ranking.text(done)
            and f"{name} mean," in (tmp_path / "table.csv").read_text()
        )
        line = fednormec.sweeps.ranking.line(News(1, 1, ended, 1))
        assert line == f"beta=0.1: accuracy 50.0%{' (not private)' if apart_from == ['test_accuracy'] else ''}"
    assert asked == [None, "test_accuracy"]


# what is refused


def test_what_would_let_clients_decide_about_each_other_is_refused(tmp_path):
    source = written(tmp_path / "all", "named", benign())

    def asked(privacy=True, **data):
        config = config_of(source, "neural", "gd", privacy)
        config["data"] |= data
        return assemble(config)

    with pytest.raises(fn.UserError, match=r"\[data\] examples draws from all clients' examples together"):
        asked(privacy=False, examples=10)
    for partition in ("iid", "dirichlet", "shards"):
        with pytest.raises(fn.UserError, match="ε would be for these and not for those who own the data"):
            asked(partition=partition, clients=3)
        assert asked(privacy=False, partition=partition, clients=3).problem.num_clients == 3
    pooled = written(tmp_path / "more", "named, with a test set", benign())
    with pytest.raises(fn.UserError, match="ε would be for these"):
        config = config_of(pooled, "neural", "gd")
        config["data"] |= {"pool": True, "partition": "iid"}
        assemble(config)
    with pytest.raises(fn.UserError, match="expected labels from 0 to 1, got 3"):
        asked(classes=2)
    with pytest.raises(fn.UserError, match="classes must be at least 1"):
        asked(classes=0)
    assert asked(classes=9).problem.dim > asked().problem.dim
    folder = config_of(written(tmp_path / "folder", "folder", benign()), "neural", "gd")
    assert assemble(folder).config["data"] == {
        "source": str(tmp_path / "folder"), "classes": CLASSES, "inputs": "numbers", "targets": "classes",
    }  # fmt: skip


def test_clients_of_unlike_numbers_are_refused():
    """Among whole numbers, one client's fractions would turn all others' into fractions."""
    pairs = [(np.zeros((3, 2)), np.zeros(3, int)), (np.zeros((3, 2), int), np.zeros(3, int))]
    with pytest.raises(fn.UserError, match="client 1 has numbers of type torch.int64, client 0 of torch.float32"):
        fn.NeuralProblem(fn.models.linear((2,), 2), pairs)


# modules and losses of one's own


class Own(nn.Module):
    """Two layers, with something done to the examples before, or between."""

    def __init__(self, first, then=torch.relu):
        super().__init__()
        self.inner, self.outer, self.first, self.then = nn.Linear(5, 6), nn.Linear(6, CLASSES), first, then
        self.shift, self.seen = torch.ones(5), 0.0
        self.register_buffer("scale", 2 * torch.ones(5))

    def forward(self, x):
        return self.outer(self.then(self.inner(self.first(self, x))))


class Backward(torch.autograd.Function):
    """Mixes examples on the way back alone."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, delta):
        return delta - delta.mean(0)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    hidden_softmax = torch.jit.script(nn.Softmax(dim=0))  # no function mode sees what it does

APART = {
    "nothing": lambda self, x: x,
    "a view by the number of examples": lambda self, x: x.view(len(x), -1).reshape(x.shape[0], 5),
    "constants": lambda self, x: (x - self.shift.to(x)) / self.scale,
    "numbers": lambda self, x: 1 - 2 * x**2 / 3,
    "a choice for each number": lambda self, x: torch.where(x > 5, x / 255, x),
    "each example's own largest": lambda self, x: x / (1 + x.abs().amax(1, keepdim=True)),
    "each example's own share": lambda self, x: F.softmax(x, dim=-1),
    "parts put together": lambda self, x: torch.cat([x[:, :2].tanh(), x[:, 2:]], dim=1),
    "in place": lambda self, x: x.clone().mul_(2).clamp_(-5, 5),
}
MIXING = {
    "a choice by the largest": lambda self, x: x / 255 if x.max() > 5 else x,
    "a choice by the largest, as a number": lambda self, x: x / 255 if x.max().item() > 5 else x,
    "a choice by the largest, in numpy": lambda self, x: x / 255 if x.detach().numpy().max() > 5 else x,
    "a choice by the largest, by where": lambda self, x: torch.where(x.max() > 5, x / 255, x),
    "a choice by one far off": lambda self, x: x / 2 if (x > 777).any() else x,
    "the largest": lambda self, x: x / (1 + x.abs().amax(0)),
    "the mean": lambda self, x: x - x.mean(0),
    "the share among all": lambda self, x: torch.softmax(x, 0),
    "the neighbour": lambda self, x: x + x.roll(1, 0),
    "the order": lambda self, x: x.sort(0).values,
    "the running sum": lambda self, x: x.cumsum(0),
    "rows and columns": lambda self, x: (x.T - x.T.mean(1, keepdim=True)).T,
    "all products": lambda self, x: torch.einsum("ni,mi,mj->nj", x, x, x),
    "out of sight": lambda self, x: x * (1 + hidden_softmax(x).sum(1, keepdim=True)),
    "another namespace": lambda self, x: x - torch.ops.aten.mean(x),
    "the data themselves": lambda self, x: x * x.data.max(),
    "statistics": lambda self, x: F.batch_norm(x, None, None, training=True),
    "the way back": lambda self, x: x,
    "how many there are": lambda self, x: x / len(x),
    "which of them it is": lambda self, x: x * torch.arange(len(x), dtype=x.dtype)[:, None],
}  # fmt: skip
BY_SIZE = {
    "many are halved": lambda self, x: x / 2 if len(x) > 8 else x,
    "many are mixed": lambda self, x: x - x.mean(0) if len(x) > 8 else x,
    "many get the other": lambda self, x: (x.cos(), x.sin())[len(x) > 8],
}


def own(name):
    torch.manual_seed(0)
    return Own((APART | MIXING | BY_SIZE)[name], Backward.apply if name == "the way back" else torch.relu).double()


def alone(module, x, y):
    """The gradient of one client, by torch's own backward."""
    loss = F.cross_entropy(module(torch.as_tensor(x)), torch.as_tensor(y))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(4,) * 5, (4, 3, 4, 2, 4)], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", [*APART, *MIXING, *BY_SIZE])
def test_a_module_gets_each_clients_own_gradient_whatever_others_have(name, sizes):
    module, data = own(name), benign((5,), sizes)
    for kind in (None, "more rows", "huge", "not finite"):
        pairs = data if kind is None else with_one_spoiled(data, kind)
        problem = fn.NeuralProblem(module, pairs, dtype=torch.float64)
        assert (problem.way == "layers") is (name not in MIXING)
        rows = problem.grad(problem.init(np.random.default_rng(0)), np.arange(5))
        for i, (x, y) in enumerate(pairs):
            if i != VICTIM or kind is None:
                assert torch.allclose(rows[i], alone(module, x, y), rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", [*MIXING, *BY_SIZE])
def test_messages_of_a_module_that_mixes(name):
    """In mini-batches too, whose padding hangs on how much others have."""
    module, data = own(name), benign((5,), (6, 3, 6, 2, 6))
    one = fn.NeuralProblem(module, data, dtype=torch.float64)
    other = fn.NeuralProblem(module, with_one_spoiled(data, "more rows"), dtype=torch.float64)
    for local in LOCALS.values():
        assert (others(messages(one, local)) - others(messages(other, local))).norm(dim=1).max() < 1e-9


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "way"),
    [
        (lambda o, t: F.cross_entropy(o, t, reduction="none", label_smoothing=0.1), "layers"),
        (lambda o, t: F.log_softmax(o, 1).mean(1).neg() + o[:, 0].square(), "layers"),
        (lambda o, t: F.cross_entropy(o, t, reduction="none") / (1 + o.abs().max()), "vmap"),
        (lambda o, t: F.cross_entropy(o, t, reduction="none") * (2 if o.max() > 50 else 1), "loop"),
    ],
)
def test_a_loss_that_mixes_is_found_out(loss, way):
    data = benign((5,), (4,) * 5)
    module = fn.models.mlp((5,), CLASSES).double()
    one = fn.NeuralProblem(module, data, loss=loss, dtype=torch.float64)
    other = fn.NeuralProblem(module, with_one_spoiled(data, "other labels"), loss=loss, dtype=torch.float64)
    assert one.way == way
    assert_only_the_victim_moves(one, other, fn.gd(0.5))


def peak(self, x):
    self.seen = max(self.seen, float(x.abs().max()))
    return x / max(1.0, self.seen)


def last(self, x):
    before, self.shift = self.shift, x.detach().mean(0)
    return x - before


def latch(self, x):
    self.seen = self.seen or bool((x > 777).any())
    return x * (2.0 if self.seen else 1.0)


@pytest.mark.parametrize("first", [peak, last, latch])
def test_a_module_that_remembers_is_refused(first):
    with pytest.raises(fn.UserError, match="the model remembers earlier calls: what one client has would enter"):
        fn.NeuralProblem(Own(first), benign((5,)))


def test_what_vmap_cannot_do_is_said():
    with pytest.raises(fn.UserError, match="cannot be vectorised over clients: .*take vectorize = 'auto'"):
        fn.NeuralProblem(Own(MIXING["a choice by the largest"]), benign((5,)), vectorize="vmap")


# what hides behind layers that are known


def squeezed(layer, given, out):
    return out / (out.abs().max() / 10).clamp(min=1)


@pytest.mark.parametrize("place", [0, 1, 2, None])
def test_a_hook_is_not_hidden_by_the_layer_it_is_on(place):
    """The layers are known; what was hung on them is not."""
    module = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    (module if place is None else module[place]).register_forward_hook(squeezed)
    rng = np.random.default_rng(0)
    pairs = [(rng.standard_normal((6, 4)), rng.integers(0, 2, 6)) for _ in range(4)]
    problem, x = fn.NeuralProblem(module, pairs, dtype=torch.float64), None
    assert problem.way != "layers"
    x = problem.init(rng)
    pairs[1] = (1e6 * pairs[1][0], pairs[1][1])
    other = fn.NeuralProblem(module, pairs, dtype=torch.float64)
    one, two = (p.grad(x, np.arange(4)) for p in (problem, other))
    assert torch.allclose(one[[0, 2, 3]], two[[0, 2, 3]], rtol=1e-9, atol=1e-12)


def test_words_that_are_shortened_when_they_are_met_are_refused():
    module = torch.nn.Sequential(torch.nn.Embedding(9, 8, max_norm=1.0), torch.nn.Flatten(), torch.nn.Linear(8, 2))
    with pytest.raises(UserError, match="the layer '0' shortens parameters when an example meets them"):
        fn.NeuralProblem(module, [(np.array([[3]]), np.array([1]))])


def test_how_often_others_meet_a_word_has_no_say():
    module = torch.nn.Sequential(
        torch.nn.Embedding(9, 8, scale_grad_by_freq=True), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )
    sizes, rng = (3, 5, 2, 4), np.random.default_rng(0)
    pairs = [(rng.integers(0, 9, (n, 1)), rng.integers(0, 2, n)) for n in sizes]
    before = fn.NeuralProblem(module, pairs, dtype=torch.float64)
    pairs[1] = (rng.integers(0, 9, (40, 1)), rng.integers(0, 2, 40))
    after = fn.NeuralProblem(module, pairs, dtype=torch.float64)
    x = before.init(rng)
    one, two = (p.grad(x, np.arange(4)) for p in (before, after))
    assert torch.allclose(one[[0, 2, 3]], two[[0, 2, 3]], rtol=1e-9, atol=1e-12)
