"""Any module as a problem: gradients, both ways of computing them, unequal clients, what is refused."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import EQUAL, MODELS, UNEQUAL, clients, one_client_gradient
from torch import nn

import fednormec as fn
from fednormec.config.assemble import assemble
from fednormec.core.local import Moment
from fednormec.core.vectors import layout_of
from fednormec.problems import neural
from fednormec.problems.losses import cross_entropy


class Forgetful(nn.Module):
    """Drops out without a layer that says so."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 4)

    def forward(self, x):
        return nn.functional.dropout(self.linear(x.flatten(1)), 0.5)


class Counting(nn.Module):
    """Keeps state that is no parameter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.linear(x.flatten(1))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("vectorize", ["auto", "layers", "vmap", "loop"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_torch(name, vectorize, sizes):
    module, data = MODELS[name](), clients(sizes)
    problem = fn.NeuralProblem(module, data, dtype=torch.float64, vectorize=vectorize)
    x, ids = problem.init(np.random.default_rng(0)), np.arange(4)
    expected = torch.stack([one_client_gradient(module, *pair) for pair in data])
    assert torch.allclose(problem.grad(x, ids), expected, rtol=1e-9, atol=1e-11)
    some = np.array([3, 1])
    assert torch.allclose(problem.grad(x, some), expected[some], rtol=1e-9, atol=1e-11)
    rows = x + 0.01 * torch.from_numpy(np.random.default_rng(1).standard_normal((4, problem.dim)))
    own = torch.stack([one_client_gradient(module, *pair, point=row) for pair, row in zip(data, rows, strict=True)])
    assert torch.allclose(problem.grad(rows, ids), own, rtol=1e-9, atol=1e-11)


@pytest.mark.long
def test_the_way_is_chosen_by_the_model_and_the_sizes(monkeypatch):
    monkeypatch.setattr(neural, "ACTIVATIONS_TOGETHER", 1)  # as if images were large
    for name, model in MODELS.items():
        few, many = (fn.NeuralProblem(model(), clients([size] * 4)).way for size in (6, 65))
        assert few == "layers"
        assert many == ("layers" if name in ("linear", "mlp") else "loop")
    assert fn.NeuralProblem(MODELS["small_cnn"](), clients(EQUAL), vectorize="vmap").way == "vmap"


@pytest.mark.long
def test_the_way_is_chosen_by_the_batches_that_are_trained_on(monkeypatch):
    """Mini-batches of large clients in layers; all that such a client has, one client after another."""
    monkeypatch.setattr(neural, "ACTIVATIONS_TOGETHER", 1)
    monkeypatch.setattr(neural, "EXAMPLES_TOGETHER", 60)
    module, data = MODELS["small_cnn"](), clients([65] * 4)
    whole = fn.NeuralProblem(module, data, dtype=torch.float64)
    small = fn.NeuralProblem(module, data, dtype=torch.float64, batch_size=8)
    assert (whole.way, whole.tile) == ("loop", 1) and (small.way, small.tile) == ("layers", 4)
    x, ids = small.init(np.random.default_rng(0)), np.arange(4)
    alone = []
    monkeypatch.setattr(small, "_grad_one_by_one", lambda *given: alone.append(1) or whole._grad_one_by_one(*given))
    batch = np.stack([np.random.default_rng(i).permutation(65)[:8] for i in range(4)])
    assert torch.allclose(small.grad(x, ids, batch), whole.grad(x, ids, batch), rtol=1e-9, atol=1e-11)
    assert not alone
    assert torch.equal(small.grad(x, ids), whole.grad(x, ids)) and alone == [1]
    asked = {
        "data": {"clients": 4}, "model": {"name": "small_cnn"}, "local": {"name": "sgd", "step": 0.1, "batch_size": 8},
        "method": {"name": "fed_avg"},
    }  # fmt: skip
    assert assemble(asked).problem.way == "layers"
    assert assemble(asked | {"local": {"name": "gd", "step": 0.1}}).problem.way == "loop"


@pytest.mark.long
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_rounding_has_no_say_in_the_way(norm):
    """In float32 some of the many values of a deep net lie within rounding of a kink, on one machine or another."""
    torch.manual_seed(0)
    problem = fn.NeuralProblem(fn.models.resnet20((3, 32, 32), 10, norm), clients([32] * 4, (3, 32, 32), 10))
    assert problem.way == "layers"


def near_a_kink(module, size, inputs):
    """Whether a value lies next to 0 where it is cut off there, with parameters `size` times those of the module."""
    module, nearest = copy.deepcopy(module).double(), [1.0]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(size)
        for layer in module:
            if isinstance(layer, nn.ReLU):
                layer.register_forward_pre_hook(lambda _, given: nearest.append(float(given[0].abs().min())))
        module(inputs.double())
    return min(nearest) < 1e-6


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_stack_of_layers_can_be_taken_apart(data):
    """Convolutions of every kind, with and without bias, normalised or not, in place or not, shared and own weights."""
    draw = data.draw
    depth, side = draw(st.sampled_from([1, 2, 4])), draw(st.integers(6, 9))
    layers, channels = [], depth
    for _ in range(draw(st.integers(1, 3))):
        after, groups = draw(st.sampled_from([2, 4])), 1 if channels == 1 else draw(st.sampled_from([1, 2]))
        size, stride, padding = (
            draw(st.tuples(st.integers(a, b), st.integers(a, b))) for a, b in ((1, 3), (1, 2), (0, 2))
        )
        padding = tuple(min(p, s - 1) for p, s in zip(padding, size, strict=True))  # nothing looks at padding alone
        bias, dilation = draw(st.booleans()), draw(st.integers(1, 2))
        layers.append(nn.Conv2d(channels, after, size, stride, padding, dilation, groups, bias))
        if draw(st.booleans()):
            layers.append(nn.GroupNorm(2, after))
            layers.append(nn.ReLU(inplace=draw(st.booleans())))
        else:
            layers.append(nn.Tanh())
        channels = after
    torch.manual_seed(0)
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 3))
    pairs = clients([3, 3, 3], (depth, side, side), 3)
    try:
        module(torch.zeros(1, depth, side, side))
    except (RuntimeError, ValueError):
        return  # an image smaller than the kernel, or a group of one number
    if any(near_a_kink(module, size, torch.as_tensor(inputs)) for size in (1.0, 0.9, 1.1) for inputs, _ in pairs):
        return  # rounding decides on which side a value lies
    problem = fn.NeuralProblem(module, pairs, dtype=torch.float64, vectorize="layers")
    x = problem.init(np.random.default_rng(0))
    own = torch.stack([x, 0.9 * x, 1.1 * x])
    for at in (x, own):
        points = at.expand(3, -1)
        expected = torch.stack(
            [one_client_gradient(module, *pair, point=p) for pair, p in zip(pairs, points, strict=True)]
        )
        assert torch.allclose(problem.grad(at, np.arange(3)), expected, rtol=1e-8, atol=1e-10)


class Tied(nn.Module):
    """Uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.outer(self.inner(self.inner(x).relu()).relu())


class Scaled(nn.Module):
    """Has a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(5, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.factor * self.layer(x)


class Scaling(nn.Module):
    """Divides by the largest number in the batch, which another client may have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x / x.abs().max())


class Overwriting(nn.Module):
    """Writes over what a layer put out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x).add_(0)


class Frozen(nn.Module):
    """Has a bias that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.layer.bias.requires_grad_(False)

    def forward(self, x):
        return self.layer(x)


class Mixing(nn.Module):
    """Lets one example touch another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x - x.mean(0))


@pytest.mark.parametrize("module", [Tied, Scaled, Mixing, Scaling, Overwriting, Frozen])
def test_what_cannot_be_taken_apart_is_not(module):
    rng = np.random.default_rng(0)
    data = [(rng.standard_normal((4, 5)), rng.integers(0, 3, 4)) for _ in range(3)]
    network = module()
    problem = fn.NeuralProblem(network, data, dtype=torch.float64)
    assert problem.way == "vmap"
    rows = problem.grad(problem.init(rng), np.arange(3))
    for row, (x, y) in zip(rows, data, strict=True):
        own = copy.deepcopy(network).double()
        trained = [p for p in own.parameters() if p.requires_grad]
        loss = nn.functional.cross_entropy(own(torch.as_tensor(x)), torch.as_tensor(y))
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        assert torch.allclose(row, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(fn.UserError, match="cannot be computed layer by layer"):
        fn.NeuralProblem(network, data, vectorize="layers")


class InParts(nn.Module):
    """Uses its layer once for few examples, and again for more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return torch.cat([self.layer(part) for part in x.split(8)])


def test_a_layer_that_is_used_again_later_is_no_wrong_gradient():
    rng = np.random.default_rng(0)
    data = [(rng.standard_normal((n, 5)), rng.integers(0, 3, n)) for n in (4, 4, 12)]
    module = InParts().double()
    problem = fn.NeuralProblem(module, data, dtype=torch.float64)
    assert problem.way == "vmap"
    rows = problem.grad(problem.init(rng), np.arange(3))
    expected = torch.stack([one_client_gradient(module, *pair) for pair in data])
    assert torch.allclose(rows, expected, rtol=1e-9, atol=1e-12)


def test_convolutions_before_a_batch_norm_of_one_value_per_channel():
    layers = (nn.Conv2d(1, 2, 8), nn.Flatten(), nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 4))
    assert fn.NeuralProblem(nn.Sequential(*layers), clients(EQUAL)).way == "loop"


def test_a_loss_that_is_already_a_mean_works_for_equal_and_unequal_clients():
    def mean_loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    for sizes in (EQUAL, UNEQUAL):
        a, b = (fn.NeuralProblem(m, clients(sizes), loss=f, dtype=torch.float64)
                for m in [MODELS["mlp"]()] for f in (mean_loss, cross_entropy))  # fmt: skip
        x = a.init(np.random.default_rng(0))
        assert torch.allclose(a.grad(x, np.arange(4)), b.grad(x, np.arange(4)), rtol=1e-10, atol=1e-13)
        assert a.evaluate(x).not_private == pytest.approx(b.evaluate(x).not_private)


def test_regression_with_own_loss_and_real_targets():
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((3, 1))
    pairs = [(x, x @ truth) for x in (rng.standard_normal((n, 3)) for n in (20, 30, 10))]

    def squared(outputs, targets):
        return (outputs - targets).square().mean(dim=1)

    problem = fn.NeuralProblem(nn.Linear(3, 1, bias=False), pairs, test=pairs[0], loss=squared, dtype=torch.float64)
    result = fn.train(problem, fn.clip21(tau=1.0, server_step=0.2), rounds=300)
    assert torch.allclose(result.model.weight.detach().T, torch.from_numpy(truth), atol=1e-6)
    assert set(result.history[-1]) == {"round", "test_loss", "not_private"}  # no accuracy without classes


def test_public_figures_are_those_of_the_test_set():
    module, data = MODELS["mlp"](), clients(UNEQUAL)
    twin, (x, y) = copy.deepcopy(module).double().requires_grad_(False), (torch.as_tensor(part) for part in data[0])
    for vectorize in ("layers", "vmap", "loop"):
        problem = fn.NeuralProblem(module, data, data[0], dtype=torch.float64, vectorize=vectorize)
        public = problem.evaluate(problem.init(np.random.default_rng(0))).public
        assert public["test_loss"] == pytest.approx(float(cross_entropy(twin(x), y).mean()), rel=1e-12)
        assert public["test_accuracy"] == (twin(x).argmax(1) == y).double().mean()


@pytest.mark.parametrize("local", [fn.gd(0.1), fn.sgd(0.1, 2, 4), fn.ig(0.1, 3)], ids=lambda local: local.name)
@pytest.mark.parametrize("vectorize", ["layers", "vmap", "loop"])
def test_no_clients_data_touch_another_client(vectorize, local):
    """Broken data of one client break its own row alone, also where rows are padded to equal length."""
    for broken in range(4):
        data = clients(UNEQUAL)
        data[broken][0][:] = math.nan
        problem = fn.NeuralProblem(MODELS["mlp"](), data, vectorize=vectorize)
        rows = local.run(problem, problem.init(np.random.default_rng(0)), np.arange(4), Moment(0, 1), None)
        assert (~rows.isfinite().all(dim=1)).nonzero()[:, 0].tolist() == [broken]


def test_tied_weights_come_back_as_trained():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    module[3].weight = module[1].weight
    problem = fn.NeuralProblem(module, clients(EQUAL))
    assert problem.dim == 64 * 64 + 2 * 64
    result = fn.train(problem, fn.fed_avg(fn.gd(0.5)), rounds=2)
    assert result.model[3].weight is result.model[1].weight
    assert torch.equal(torch.cat([p.flatten() for p in result.model.parameters()]), result.x)
    named = problem.named(result.x)
    assert torch.equal(named["1.weight"], named["3.weight"])
    assert not torch.equal(named["1.weight"], module[1].weight)


def test_a_client_with_broken_data_is_left_out_of_training_and_of_the_loss():
    data = clients(EQUAL)
    data[2][0][0] = math.nan
    problem = fn.NeuralProblem(MODELS["mlp"](), data)
    *_, last = fn.simulate(problem, fn.fed_normec(fn.gd(0.1)), rounds=3, evaluate_every=1)
    assert last.left_out == 1
    assert math.isfinite(last.metrics.not_private["train_loss"])
    assert last.x.isfinite().all()


def test_the_users_module_is_not_touched_and_parameters_are_views():
    module = MODELS["mlp"]()
    before = copy.deepcopy(module.state_dict())
    problem = fn.NeuralProblem(module, clients(EQUAL))
    result = fn.train(problem, fn.fed_avg(fn.gd(0.5)), rounds=3)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert not torch.equal(result.x, problem.init(np.random.default_rng(0)))
    x = torch.arange(float(problem.dim))
    views = layout_of(module).views(x)
    assert all(torch.equal(v, views[k]) for k, v in problem.named(x).items())
    assert torch.equal(torch.cat([v.flatten() for v in views.values()]), x)
    assert all(v.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for v in views.values())


def test_frozen_parameters_stay_and_are_not_sent():
    module = MODELS["mlp"]()
    for p in module[1].parameters():
        p.requires_grad_(False)
    for vectorize in ("layers", "vmap", "loop"):
        problem = fn.NeuralProblem(module, clients(EQUAL), vectorize=vectorize)
        assert problem.dim == sum(p.numel() for p in module.parameters() if p.requires_grad)
        result = fn.train(problem, fn.fed_avg(fn.gd(0.5)), rounds=2)
        assert torch.equal(result.model[1].weight, module[1].weight)
        assert not torch.equal(result.model[3].weight, module[3].weight)


def test_training_lowers_the_loss_and_learns():
    """Separable data: accuracy must become perfect."""
    rng = np.random.default_rng(0)
    centres = 4 * np.eye(4)
    labels = [rng.integers(0, 4, 30) for _ in range(5)]
    pairs = [(centres[y] + 0.1 * rng.standard_normal((30, 4)), y) for y in labels]
    problem = fn.NeuralProblem(fn.models.mlp((4,), 4), pairs, pairs[0])
    result = fn.train(problem, fn.fed_normec(fn.gd(0.5, 3), server_normalization=False, server_step=0.5), rounds=60)
    assert result.history[-1]["test_accuracy"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"clients": []}, "there are no clients"),
        ({"clients": [(np.zeros((0, 1, 8, 8)), np.zeros(0, int))]}, "client 0 has no data"),
        ({"clients": [(np.zeros((3, 1, 8, 8)), np.zeros(2, int))]}, "client 0 has inputs of shape"),
        ({"clients": [(np.zeros((3, 5)), np.zeros(3, int))]}, r"does not take examples of shape \(5,\)"),
        ({"clients": [(np.zeros((3, 1, 8, 8)), np.array([0, 1, 9]))]}, "labels go up to 9: it needs 10"),
        ({"clients": [(np.zeros((3, 1, 8, 8)), np.zeros(3))]}, "one whole number"),
        ({"clients": [*clients([3]), *clients([3], shape=(1, 9, 9))]}, r"client 1 has examples of shape \(1, 9, 9\)"),
        ({"loss": lambda o, t: o}, "the loss must be one number per example"),
        ({"vectorize": "fast"}, "'auto' or 'layers' or 'vmap' or 'loop'"),
        ({"tile": 0}, "at least 1"),
        ({"module": nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Dropout(0.5))}, "drops out"),
        ({"module": nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 4))}, "running statistics"),
        ({"module": nn.Flatten()}, "no trainable parameter"),
        ({"module": Forgetful()}, "global generator"),
        ({"module": Counting()}, "changes its buffer 'calls'"),
        ({"dtype": torch.float16}, "float32 or float64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_at_once(arguments, sentence):
    settings = {"module": MODELS["mlp"](), "clients": clients(EQUAL), **arguments}
    with pytest.raises(fn.UserError, match=sentence):
        fn.NeuralProblem(settings.pop("module"), settings.pop("clients"), **settings)


def test_a_part_holds_its_own_clients_examples_alone_at_like_addresses():
    """Where rows begin in memory decides how they are added up: the bits are those of the whole."""
    problem = fn.NeuralProblem(MODELS["mlp"](), clients([8, 8, 3, 9, 8, 2, 8, 5]), tile=2)
    for first, last in ((0, 8), (2, 5), (5, 8), (7, 8)):
        part = problem.part(first, last)
        assert len(part._x) == part.client_sizes.sum() == problem.client_sizes[first:last].sum()
        assert part._x.data_ptr() % 64 == (problem._x[int(problem._starts[first]) :]).data_ptr() % 64


# evaluation


def normalised(seed=0):
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    return nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))


@torch.no_grad()
def test_statistics_of_the_training_data_are_those_of_a_trainer():
    """By hand: mean and unbiased variance of each channel over the clients' examples, in the test and in the loss."""
    pairs, (inputs, targets) = clients([5, 9], (2, 6, 6), 4), clients([7], (2, 6, 6), 4)[0]
    module = normalised()
    problem = fn.NeuralProblem(module, pairs, (inputs, targets), dtype=torch.float64, statistics="training")
    x = problem.init(np.random.default_rng(0))
    conv, norm, _, _, last = problem.model(x)
    everything = conv(torch.cat([torch.as_tensor(a).double() for a, _ in pairs]))
    mean, var = everything.mean((0, 2, 3)), everything.var((0, 2, 3), unbiased=True)

    def outputs(a):
        z = (conv(torch.as_tensor(a).double()) - mean[:, None, None]) / (var + norm.eps).sqrt()[:, None, None]
        return last(z.relu().flatten(1))

    found = problem.evaluate(x)
    expected = float(cross_entropy(outputs(inputs), torch.as_tensor(targets)).mean())
    own = [float(cross_entropy(outputs(a), torch.as_tensor(b)).mean()) for a, b in pairs]
    assert found.public == {}, "they look at clients' data"
    assert found.not_private["test_loss"] == pytest.approx(expected, rel=1e-10)
    assert found.not_private["train_loss"] == pytest.approx(np.mean(own), rel=1e-10)
    batch = fn.NeuralProblem(module, pairs, (inputs, targets), dtype=torch.float64).evaluate(x)
    assert batch.public["test_loss"] != pytest.approx(expected, rel=1e-3)


def test_gradients_take_the_statistics_of_their_batch_either_way():
    pairs = clients([5, 5], (2, 6, 6), 4)
    one, other = (fn.NeuralProblem(normalised(), pairs, statistics=kind) for kind in ("batch", "training"))
    x = one.init(np.random.default_rng(0))
    assert torch.equal(one.grad(x, np.arange(2)), other.grad(x, np.arange(2)))


def test_an_evaluation_can_look_at_some_of_each_clients_examples():
    pairs, test = clients([5, 2, 9], (2, 6, 6), 4), clients([7], (2, 6, 6), 4)[0]
    module = MODELS["small_cnn"]()
    some = fn.NeuralProblem(module, clients([5, 2, 9]), loss_examples=3)
    few = fn.NeuralProblem(module, [(a[:3], b[:3]) for a, b in clients([5, 2, 9])])
    x = some.init(np.random.default_rng(0))
    assert some.evaluate(x).not_private["train_loss"] == pytest.approx(few.evaluate(x).not_private["train_loss"])
    mixing = fn.NeuralProblem(normalised(), pairs, test, loss_examples=3)
    x = mixing.init(np.random.default_rng(0))
    alone = fn.NeuralProblem(normalised(), [(a[:3], b[:3]) for a, b in pairs], test)
    assert mixing.evaluate(x).not_private["train_loss"] == pytest.approx(alone.evaluate(x).not_private["train_loss"])
    assert mixing.client_sizes.tolist() == [5, 2, 9]


def test_what_evaluations_do_not_take_is_said():
    with pytest.raises(fn.UserError, match="this one has none"):
        fn.NeuralProblem(MODELS["mlp"](), clients([4, 4]), statistics="training")
    with pytest.raises(fn.UserError, match="loss_examples"):
        fn.NeuralProblem(MODELS["mlp"](), clients([4, 4]), loss_examples=0)
