"""A claim that no method can talk its way around: the engine measures what it adds, and tries the rest before."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from simulations import CONTRACTS, build, mlp_problem

import fednormec as fn
from fednormec.core import kernels
from fednormec.core.algorithm import Step
from fednormec.core.bounds import Adding, TooLong, clip, smooth_normalize
from fednormec.core.vectors import norm_error
from fednormec.engine import planning
from fednormec.errors import BoundBroken, UserError

CLIP = fn.dp_fed_avg_clip(fn.gd(0.1))
PRIVACY = fn.Privacy(noise_std=1.0)


@pytest.fixture(params=["C", "torch"])
def sums(request, monkeypatch):
    """With the functions in C, where they are compiled, and without."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "library", lambda: None)


def scaled(base, factor):
    """The same with messages that many times as long as the bound gave them."""

    def client_(server, rows, updates):
        message = base.client_(server, rows, updates)
        return fn.Messages(message.whole() * factor, broken=message.broken)

    return base._replace(client_=client_)


def after(base, change, first=4):
    """The same until round `first`, from which on messages are changed: nothing that a look before the run can see."""

    def client_(server, rows, updates):
        message = base.client_(server, rows, updates)
        return message if server.round < first else change(message)

    return base._replace(client_=client_)


def fresh(method, **settings):
    return list(fn.simulate(mlp_problem(), method, privacy=PRIVACY, rounds=6, **settings))


# what the engine measures


def test_the_method_of_the_issue_is_refused_by_name_and_length():
    loud = CLIP._replace(client_=lambda server, rows, updates: fn.Messages(updates.mul_(1000.0)))
    with pytest.raises(
        BoundBroken, match=r"DP-FedAvg \(clip\) sent a message of length .*clip\(1\) promises at most 1,"
    ):
        fn.train(mlp_problem(), loud, privacy=PRIVACY, rounds=3)
    assert fn.train(mlp_problem(), loud, rounds=3).statement is None  # without privacy it may


@pytest.mark.long
@pytest.mark.parametrize("name", ["fed_normec", "clip21_sgd2m", "dp_fed_avg_clip", "dp_scaffold", "econtrol"])
@pytest.mark.parametrize("factor", [1.0001, 2.0, -1.5, 1e30, math.inf, math.nan])
def test_what_is_longer_than_the_radius_is_not_added(name, factor, sums):
    """Also where it begins after the run has: rounds before it stand, its own releases nothing."""

    def longer(message):
        rows = message.whole()
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return fn.Messages(rows / lengths * build(name).bound.radius * factor)

    late, paid, seen = after(build(name), longer), [], []
    with pytest.raises(BoundBroken, match="Nothing of this round was released"):
        for r in fn.simulate(
            mlp_problem(), late, privacy=PRIVACY, rounds=6, before_release=lambda number, plan: paid.append(number)
        ):
            seen.append(r.number)
    assert seen == paid and seen == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        lambda m: fn.Messages(m.rows.expand(-1, -1)[:, :-1]),
        lambda m: fn.Messages(torch.cat([m.rows, m.rows], dim=1)),
        lambda m: fn.Messages(m.rows[:1].expand(len(m.rows) + 1, -1)),
        lambda m: fn.Messages(m.whole().double()),
        lambda m: fn.Messages(m.whole(), torch.ones(len(m.rows), 1)),
        lambda m: fn.Messages(m.whole(), torch.ones(1)),
        lambda m: fn.Messages(m.whole(), torch.full((len(m.rows),), math.nan)),
        lambda m: fn.Messages(m.whole() * 1e-25, torch.full((len(m.rows),), 1e28)),  # whose squares are no numbers
        lambda m: fn.Messages(m.whole() * 1e25, torch.full((len(m.rows),), 1e-20)),
    ],
)
def test_messages_are_rows_of_the_width_and_factors_are_numbers(change, sums):
    with pytest.raises(BoundBroken, match="was expected|sent a message of length"):
        fresh(after(CLIP, change))


class Own(fn.Messages):
    def sum(self, sends, adding):
        return sends.double() @ self.rows.double()


@pytest.mark.parametrize(
    "given",
    [
        lambda u: Own(u.mul_(1000.0)),
        lambda u: u,
        lambda u: (u,),
        lambda u: fn.Messages(u.to_sparse()),
        lambda u: fn.Messages(u.numpy()),
        lambda u: fn.Messages(u, 1.0),
    ],
)
def test_what_is_no_plain_message_is_refused_with_a_sentence(given):
    with pytest.raises(BoundBroken, match="gave no Messages|gave factors that are no tensor"):
        fresh(CLIP._replace(client_=lambda server, rows, updates: given(updates)))


def test_rows_that_want_a_gradient_are_rows():
    def client_(server, rows, updates):
        return fn.Messages(CLIP.client_(server, rows, updates).whole().clone().requires_grad_())

    wanting = CLIP._replace(client_=client_)
    assert torch.allclose(fresh(wanting)[-1].x, fresh(CLIP)[-1].x) and fn.check_method(wanting, mlp_problem()).passed


def test_who_is_not_drawn_has_no_say_whatever_it_holds(sums):
    rows, sends = torch.tensor([[1.0, 2.0], [math.nan, math.inf]]), torch.tensor([1.0, 0.0])
    for exactly in (False, True):
        assert fn.Messages(rows).sum(sends, Adding(exactly, 3.0)).tolist() == [1.0, 2.0]


def test_whoever_writes_into_the_servers_state_is_stopped_before_the_release():
    """In a round that no look before the run can see, and from the model's side too."""

    def run(problem, x, ids, moment, correction):
        if moment.round == 3:
            x += 1e-3
        return problem.grad(x, ids)

    paid = []
    with pytest.raises(BoundBroken, match="wrote into the server's state from a client"):
        list(fn.simulate(mlp_problem(), fn.dp_fed_avg_clip(fn.gd(0.1)._replace(run=run)), privacy=PRIVACY, rounds=5,
                         before_release=lambda number, plan: paid.append(number)))  # fmt: skip
    assert paid == [1, 2]


@pytest.mark.parametrize("place", [fn.Threads(3), fn.Threads(chunk_size=1)])
def test_every_worker_measures(place):
    with pytest.raises(BoundBroken, match="length 1.5"):
        fresh(after(CLIP, lambda m: fn.Messages(torch.full_like(m.rows, 1.5 / math.sqrt(m.rows.shape[1])))), on=place)


def test_one_message_among_many_is_found_and_idle_ones_do_not_count(sums):
    rows = torch.eye(200, 40)[:, torch.arange(40)] * 0.5
    rows[150] = 3.0
    sends = torch.ones(200)
    with pytest.raises(TooLong) as found:
        fn.Messages(rows).sum(sends, Adding(longest=1.0))
    assert found.value.length == pytest.approx(3 * math.sqrt(40), rel=1e-6)
    sends[150] = 0
    for exactly in (False, True):
        assert torch.equal(fn.Messages(rows).sum(sends, Adding(exactly, 1.0)), (rows.T @ sends).double())


@pytest.mark.long
@pytest.mark.parametrize("exactly", [False, True])
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_what_a_bound_gives_is_never_refused_and_what_is_longer_always(exactly, data):
    """Whatever the numbers: the measure errs by less than the bound stays below its radius."""
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    count, dim = draw(st.integers(1, 70)), draw(st.sampled_from([1, 2, 3, 15, 17, 63, 1023, 1025, 3000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = 10.0 ** rng.uniform(-44, 38, (count, 1)) * rng.choice([0.0, 1.0, 1.0, 1.0], (count, 1))
    rows = torch.from_numpy(rng.standard_normal((count, dim)) * sizes).to(dtype)
    radius = draw(st.sampled_from([1e-30, 1e-3, 1.0, 7.5, 1e30]))
    bound = clip(radius) if draw(st.booleans()) else smooth_normalize(draw(st.sampled_from([0.0, 0.01])), radius)
    message, sends = bound.scale_(rows.clone()), torch.ones(count, dtype=dtype)
    total = message.sum(sends, Adding(exactly, radius))
    whole = message.whole().double()
    assert torch.linalg.vector_norm(total - whole.sum(0)) <= radius * count**2 * torch.finfo(dtype).eps
    longer = radius * (1 + 3 * norm_error(rows))
    one = torch.zeros(count, dim, dtype=dtype)
    one[-1, -1] = longer
    with pytest.raises(TooLong):
        fn.Messages(one).sum(sends, Adding(exactly, radius))


@pytest.mark.skipif(kernels.library() is None, reason="not compiled: there was no C compiler")
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.integers(1, 2100), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_the_sum_in_c_is_torchs(count, dim, exactly, dtype):
    rng = np.random.default_rng(count * dim)
    rows, weights = (torch.from_numpy(rng.standard_normal(shape)).to(dtype) for shape in ((count, dim), (count,)))
    weights[rng.random(count) < 0.3] = 0
    rows[weights == 0] = math.nan  # what is not sent is not looked at
    total, squares = kernels.sum_rows(rows, weights, exactly)
    heard = weights != 0
    expected = weights[heard].double() @ rows[heard].double()
    error = torch.finfo(torch.float64 if exactly else dtype).eps * 64
    size = weights[heard].abs().double() @ rows[heard].abs().double()
    assert ((total - expected).abs() <= error * size + 1e-300).all()
    norms = torch.linalg.vector_norm(rows[heard].double(), dim=1)
    assert ((squares[heard].sqrt() - norms).abs() <= norm_error(rows) * norms).all() and not squares[~heard].any()


def test_no_tile_and_no_client_size_decides_how_much_noise_there_is():
    def noise(sizes, tile):
        return planning.planned(mlp_problem(sizes=sizes, tile=tile), CLIP, fn.full(), PRIVACY, 3).mechanism.rounding

    assert noise([8] * 9, 1) == noise([8] * 9, 9) == noise([1, 99] + [8] * 7, 4)


# what is tried before


def smuggling(kind):
    """Methods that bound every message and are not private all the same."""
    seen = []

    def mean(server, rows, updates):
        return CLIP.client_(server, rows, updates.sub_(updates.mean(0)))

    def running(server, rows, updates):
        return CLIP.client_(server, rows, updates.cumsum(0).flip(0).cumsum(0) if len(updates) > 1 else updates)

    def memory(server, rows, updates):
        message = CLIP.client_(server, rows, updates + rows)
        rows.add_(updates.mean(0))
        return message

    def closure(server, rows, updates):
        seen.append(updates.nan_to_num().sum())
        return CLIP.client_(server, rows, updates)

    def told(server, rows, updates):
        server.x.add_(updates.nan_to_num(posinf=0.0, neginf=0.0).clamp(-1, 1).mean(0))
        return CLIP.client_(server, rows, updates)

    def counted(server, rows, updates):
        seen.append(0)
        return CLIP.client_(server, rows, updates * len(seen))

    def server(server, mean, weights):
        return Step(mean * float(sum(seen, torch.tensor(1.0))), 1.0, server.memory)

    latest = {"norm": 1.0}

    def overwritten(server, rows, updates):
        latest["norm"] = float(updates.norm(dim=1).mean())
        return CLIP.client_(server, rows, updates)

    def scaled_by_latest(server, mean, weights):
        return CLIP.server(server, mean * latest["norm"], weights)

    def trimmed(server, rows, updates):
        updates[updates.norm(dim=1).topk(len(updates) // 10).indices] = 0
        return CLIP.client_(server, rows, updates)

    corrected = fn.dp_scaffold(fn.gd(0.1))
    return {
        "mean": CLIP._replace(client_=mean),
        "running": CLIP._replace(client_=running),
        "memory": CLIP._replace(client_=memory, memory_slots=1),
        "closure": CLIP._replace(client_=closure, server=server),
        "told": CLIP._replace(client_=told),
        "counted": CLIP._replace(client_=counted),
        "overwritten": CLIP._replace(client_=overwritten, server=scaled_by_latest),
        "trimmed": CLIP._replace(client_=trimmed),
        "correction": corrected._replace(
            correction=lambda server, rows: (server.memory - rows.mean(0)).expand(len(rows), -1)
        ),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mean", "lets other clients' updates into"),
        ("running", "lets other clients' updates into a client's message"),
        ("memory", "lets other clients' updates into a client's message"),
        ("closure", "remembers something outside its state"),
        ("told", "writes into the server's state from a client"),
        ("counted", "than alone|remembers something|into a client's message"),
        ("overwritten", "remembers something outside its state"),
        ("trimmed", "lets other clients' updates into"),
        ("correction", "lets other clients' updates into"),
    ],
)
def test_a_method_that_smuggles_is_refused_before_the_first_round(kind, said):
    paid = []
    with pytest.raises(BoundBroken, match=said):
        list(fn.simulate(mlp_problem(), smuggling(kind), privacy=PRIVACY, rounds=2,
                         before_release=lambda number, plan: paid.append(number)))  # fmt: skip
    assert not paid
    assert not fn.check_method(smuggling(kind), mlp_problem()).passed
    fn.train(mlp_problem(), smuggling(kind), rounds=2)  # without privacy nobody minds


def test_an_exact_round_before_the_first_is_refused():
    primed = CLIP._replace(prime=fn.fed_avg(fn.gd(0.1)))
    with pytest.raises(UserError, match="no later noise mends"):
        fresh(primed)
    found = fn.check_method(primed, mlp_problem())
    assert [f.tried for f in found.findings if f.wrong] == ["no exact round before the first"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONTRACTS)
def test_our_own_methods_pass_or_have_no_bound(name, dtype, sums):
    found = fn.check_method(build(name), mlp_problem(dtype=dtype))
    wrong = [f.wrong for f in found.findings if f.wrong]
    assert found.passed == math.isfinite(build(name).bound.radius)
    assert all("does not bound" in said for said in wrong) and len(wrong) == (not found.passed)
    assert found.text().startswith(f"{build(name).name}: {'passed' if found.passed else 'failed'}\n")


def test_a_local_update_that_looks_at_other_clients_is_found():
    def run(problem, x, ids, moment, correction):
        rows = problem.grad(x, ids)
        return rows + rows.mean(0)

    mixing = fn.dp_fed_avg_clip(fn.gd(0.1)._replace(name="mixing", run=run))
    found = fn.check_method(mixing, mlp_problem())
    assert [f.tried for f in found.findings if f.wrong] == [
        "a local update that does not depend on who is computed beside"
    ]
    assert "mixing gives a client another update beside 7 others than alone" in found.text()


def test_a_momentum_kept_unbounded_is_found():
    """The bound on what is new, and then what is kept on top of it."""

    def client_(server, rows, updates):
        rows.mul_(0.9).add_(CLIP.bound(updates))
        return fn.Messages(rows.clone())

    assert not fn.check_method(CLIP._replace(client_=client_, memory_slots=1), mlp_problem()).passed


def test_the_example_of_the_docs_passes(capsys):
    page = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "docs/algorithm.md", "exec"), {})
    assert capsys.readouterr().out.startswith("mine: passed\n")
