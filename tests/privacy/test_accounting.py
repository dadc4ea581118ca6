"""What the accountant says, against other accountants, exact sums, integrals and the theorems it must obey."""

import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian, get_sigma_gaussian
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism, identity
from dp_accounting.rdp import RdpAccountant
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

import fednormec as fn
from fednormec.privacy import accounting, composition, round_loss
from fednormec.privacy.accounting import Hidden, Open, delta, epsilon, epsilon_of_all, tuned_epsilon
from fednormec.privacy.calibrate import paper_noise_std

M, ROUNDS, DELTA = 20, 300, 1e-5
TRUSTS = ("central", "secagg", "local")
RELATIONS = {False: dp.NeighboringRelation.REPLACE_SPECIAL, True: dp.NeighboringRelation.REPLACE_ONE}


@pytest.fixture(autouse=True, scope="module")
def no_grid_fills_the_memory():
    """Fails where a round's privacy loss is resolved on more points than anybody needs."""

    def checked(*asked):
        found = round_loss.on_grid(*asked)
        assert len(found.probabilities) <= 100_000
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounting, "on_grid", checked)
        yield


def mechanism(trust, p, std, adjacency="zero_out", **more):
    return fn.Mechanism(more.pop("clients", M), fn.poisson(p), std, trust=trust, adjacency=adjacency, **more)


def gaussian_delta(eps, mu):
    """Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) for ε ≥ 0, written once more; 0 for μ = 0."""
    if mu == 0:
        return 0.0
    inside, outside = special.log_ndtr(mu / 2 - eps / mu), eps + special.log_ndtr(-mu / 2 - eps / mu)
    return math.exp(inside) * -math.expm1(min(0.0, outside - inside))


def inverse(delta_at, target, top=1e4):
    """The ε at which a falling exact δ(ε) takes the target."""
    return optimize.brentq(lambda e: delta_at(e) - target, 0.0, top, xtol=1e-13, rtol=1e-12)


# The numbers of the design document: δ = 1e-5, 300 rounds, 20 clients.


@pytest.mark.parametrize(("p", "trust", "adjacency", "pld", "rdp"), [
    (0.25, "central", "zero_out", 13.70, 15.08), (1.0, "central", "zero_out", 12.27, 13.14),
    (0.25, "central", "replace_one", 29.56, math.inf), (1.0, "central", "replace_one", 30.52, None),
    (0.25, "secagg", "zero_out", 11.12, 12.05), (1.0, "secagg", "zero_out", 2.11, 2.30),
    (0.25, "local", "zero_out", 32.20, None), (1.0, "local", "zero_out", 12.27, None),
    (0.25, "local", "replace_one", 91.53, None), (1.0, "local", "replace_one", 30.52, None),
])  # fmt: skip
def test_the_true_epsilon_of_the_paper_s_eight(p, trust, adjacency, pld, rdp):
    asked = mechanism(trust, p, paper_noise_std(8, DELTA, p, ROUNDS), adjacency)
    assert asked.noise_std == pytest.approx({0.25: 1.837, 1.0: 7.346}[p], rel=1e-3)
    assert asked.epsilon(ROUNDS, DELTA) == pytest.approx(pld, rel=0.01)
    if rdp is not None:
        assert asked.epsilon(ROUNDS, DELTA, "rdp") == pytest.approx(rdp, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize(("p", "trust", "stds"), [
    (0.25, "central", (16.26, 8.73, 4.80, 2.73)), (1.0, "central", (64.62, 34.53, 18.73, 10.40)),
    (0.25, "secagg", (14.72, 7.89, 4.30, 2.40)), (1.0, "secagg", (14.45, 7.72, 4.19, 2.32)),
    (0.25, "local", (32.81, 17.57, 9.56, 5.33)), (1.0, "local", (64.62, 34.53, 18.73, 10.40)),
])  # fmt: skip
def test_the_noise_for_a_true_epsilon(p, trust, stds):
    found = [mechanism(trust, p, 1.0).calibrate(eps, DELTA, ROUNDS).noise_std for eps in (1, 2, 4, 8)]
    assert found == pytest.approx(stds, rel=0.01)
    noises = {"central": 1.0, "secagg": math.sqrt(p * M), "local": math.sqrt(p * M)}[trust]
    on_the_mean = {("central", 0.25): 0.547, ("secagg", 0.25): 1.07, ("local", 0.25): 2.38,
                   ("central", 1.0): 0.520, ("secagg", 1.0): 0.520, ("local", 1.0): 2.33}  # fmt: skip
    assert found[-1] * noises / (p * M) == pytest.approx(on_the_mean[trust, p], rel=0.01)


def test_colluders_tuning_and_total_norm():
    for p, eps in ((0.25, 13.30), (1.0, 2.49)):
        std = paper_noise_std(8, DELTA, p, ROUNDS)
        assert mechanism("secagg", p, std, colluders=5).epsilon(ROUNDS, DELTA) == pytest.approx(eps, rel=0.01)
    eight = mechanism("central", 0.25, 1.0).calibrate(8, DELTA, ROUNDS)
    assert eight.epsilon(9 * ROUNDS, DELTA) == pytest.approx(32.1, rel=0.01)
    tuned = [tuned_epsilon(eight.release(), ROUNDS, DELTA, 9, shape) for shape in (0, 1, math.inf)]
    assert tuned == sorted(tuned)
    assert (tuned[0], tuned[-1]) == pytest.approx((12.5, 18.2), rel=0.01)
    for trust, p, order in (("secagg", 1.0, 4e4), ("local", 0.25, 4e6)):
        std = paper_noise_std(8, DELTA, p, ROUNDS) / math.sqrt(269_722)
        assert float(f"{mechanism(trust, p, std).epsilon(ROUNDS, DELTA):.0e}") == order


# Oracles.


@pytest.mark.long
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(("p", "std", "rounds", "at", "width"), [
    (0.25, 1.837, 300, 1e-5, 1e-3), (0.25, 8.73, 300, 1e-3, 4e-4), (0.01, 1.0, 1000, 1e-5, 2e-4),
    (0.1, 2.0, 2000, 1e-6, 5e-4), (0.5, 4.0, 100, 0.01, 1e-3), (0.9, 1.5, 10, 1e-9, 5e-3), (0.05, 0.8, 1, 1e-4, 1e-3),
    (0.25, 1e4, 20_000, 1e-5, 4e-7),
])  # fmt: skip
def test_central_agrees_with_dp_accounting(p, std, rounds, at, width, mirrored):
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(p, dp.GaussianDpEvent(std)), rounds)
    fine, coarse = (
        PLDAccountant(RELATIONS[mirrored], value_discretization_interval=w).compose(event).get_epsilon(at)
        for w in (width, 2 * width)
    )
    ours = epsilon(Hidden(p, 1 / std, mirrored), rounds, at)
    assert ours == pytest.approx(fine, rel=2e-3)
    assert ours >= fine - abs(coarse - fine)  # both overstate, by a power of their grid
    if not mirrored:
        renyi = RdpAccountant(neighboring_relation=RELATIONS[False]).compose(event).get_epsilon(at)
        assert epsilon(Hidden(p, 1 / std), rounds, at, "rdp") == pytest.approx(renyi, rel=2e-3)


@pytest.mark.long
@pytest.mark.parametrize(("p", "std", "adjacency", "colluders", "rounds", "width"), [
    (0.25, 1.837, "zero_out", 0, 300, 1e-3), (0.25, 4.0, "replace_one", 5, 300, 1e-3),
    (0.6, 1.0, "zero_out", 10, 40, 5e-3),
])  # fmt: skip
def test_secagg_agrees_with_a_mixture_of_dp_accounting_s_distributions(p, std, adjacency, colluders, rounds, width):
    others = M - 1 - colluders
    mix, weight = identity(value_discretization_interval=width), 1 - p
    for s in range(others + 1):
        noise = std * math.sqrt(s + 1) / (2 if adjacency == "replace_one" else 1)
        here = from_gaussian_mechanism(noise, value_discretization_interval=width)
        mass = p * stats.binom.pmf(s, others, p)
        mix, weight = mix.compute_mixture(here, weight / (weight + mass)), weight + mass
    theirs = mix.self_compose(rounds).get_epsilon_for_delta(DELTA)
    ours = mechanism("secagg", p, std, adjacency, colluders=colluders)
    assert ours.epsilon(rounds, DELTA) == pytest.approx(theirs, rel=2e-3)
    orders = np.array(accounting.RENYI_ORDERS)  # the formula of the Rényi curve, term by term
    shift = 2 if adjacency == "replace_one" else 1
    curve = [
        math.log((1 - p) + p * math.fsum(
            stats.binom.pmf(s, others, p) * math.exp(min(700, a * (a - 1) * shift**2 / (2 * std**2 * (s + 1))))
            for s in range(others + 1)
        )) / (a - 1) for a in orders
    ]  # fmt: skip
    renyi = dp.rdp.compute_epsilon(orders, rounds * np.array(curve), DELTA)[0]
    assert ours.epsilon(rounds, DELTA, "rdp") == pytest.approx(renyi, rel=1e-9)


@pytest.mark.parametrize(("clients", "rounds", "p", "std", "adjacency", "colluders", "least"), [
    (3, 3, 0.4, 1.0, "zero_out", 0, 1), (4, 2, 0.7, 0.6, "replace_one", 0, 1), (4, 3, 0.3, 0.8, "zero_out", 1, 1),
    (4, 3, 0.5, 1.5, "zero_out", 0, 3), (5, 2, 0.5, 1.0, "zero_out", 2, 4), (2, 4, 0.9, 0.5, "replace_one", 1, 2),
])  # fmt: skip
def test_secagg_agrees_with_all_participation_patterns(clients, rounds, p, std, adjacency, colluders, least):
    """Client 0 is the one to protect; the last `colluders` are always there when that helps, and hide nothing."""
    shift, honest = (2 if adjacency == "replace_one" else 1), clients - colluders
    one = {}
    for pattern in itertools.product((0, 1), repeat=honest):
        chance = math.prod(p if drawn else 1 - p for drawn in pattern)
        called_off = sum(pattern) + colluders < least
        squared = 0.0 if called_off or not pattern[0] else shift**2 / (std**2 * sum(pattern))
        one[squared] = one.get(squared, 0.0) + chance
    runs = [
        (math.prod(q for _, q in run), sum(s for s, _ in run)) for run in itertools.product(one.items(), repeat=rounds)
    ]

    def exact(eps):
        return math.fsum(q * gaussian_delta(eps, math.sqrt(squared)) for q, squared in runs)

    ours = mechanism("secagg", p, std, adjacency, clients=clients, colluders=colluders, min_cohort=least)
    for eps in (0.0, 0.5, 2.0, 6.0):
        assert exact(eps) * (1 - 1e-9) <= delta(ours.release(), rounds, eps) <= exact(eps) * 1.005 + 1e-12
    for at in (0.05, 1e-3, 1e-6, 1e-9):
        if exact(0.0) > at:
            tight = inverse(exact, at)
            assert tight * (1 - 1e-9) <= ours.epsilon(rounds, at) <= tight * 1.002 + 1e-6


@pytest.mark.parametrize(("p", "mu"), [(0.25, 0.5), (0.01, 1.5), (0.6, 3.0), (0.95, 0.1), (0.003, 0.02)])
def test_one_round_agrees_with_the_integral_of_its_densities(p, mu):
    """δ(ε) = ∫ (P − e^ε Q)₊, for the client present or absent, and for one message against its opposite."""

    nodes, weights = np.polynomial.legendre.leggauss(200)

    def mixed(shift):
        return lambda x: ((1 - p) * np.exp(-(x**2) / 2) + p * np.exp(-((x - shift) ** 2) / 2)) / math.sqrt(2 * math.pi)

    def hockey_stick(over, under, eps, end):
        """The loss is monotone: over what lies from where it is ε to the end at which it is more."""
        start = optimize.brentq(lambda x: math.log(over(x) / under(x)) - eps, -30, 30, xtol=1e-14) if (
            math.log(over(end) / under(end)) > eps and math.log(over(-end) / under(-end)) < eps) else end  # fmt: skip
        x = start + (end - start) * (nodes + 1) / 2
        return abs(end - start) / 2 * float(weights @ (over(x) - math.exp(eps) * under(x)))

    present, absent, opposite = mixed(mu), mixed(0.0), mixed(-mu)
    for eps in (0.0, p * mu, 0.2 * mu, mu):
        zero_out = max(hockey_stick(present, absent, eps, 20.0), hockey_stick(absent, present, eps, -20.0))
        replaced = hockey_stick(present, opposite, eps, 20.0)
        assert zero_out <= replaced
        for release, exact in ((Hidden(p, mu), zero_out), (Hidden(p, mu, True), replaced)):
            assert exact * (1 - 1e-6) - 1e-13 <= delta(release, 1, eps) <= exact * 1.005 + 1e-11


@pytest.mark.parametrize(("p", "std", "shift", "rounds"), [
    (0.25, 1.837, 1, 300), (0.5, 0.9, 2, 40), (0.01, 3.0, 1, 2000), (0.999, 20.0, 2, 7)
])  # fmt: skip
def test_local_agrees_with_a_loop_over_the_number_of_participations(p, std, shift, rounds):
    def exact(eps):
        chances = stats.binom.pmf(range(1, rounds + 1), rounds, p)
        return math.fsum(q * gaussian_delta(eps, math.sqrt(n) * shift / std) for n, q in enumerate(chances, 1))

    ours = mechanism("local", p, std, "replace_one" if shift == 2 else "zero_out")
    for at in (0.01, 1e-5, 1e-12):
        if exact(0.0) > at:
            assert ours.epsilon(rounds, at) == pytest.approx(inverse(exact, at), rel=1e-7)
    assert delta(ours.release(), rounds, 1.0) == pytest.approx(exact(1.0), rel=1e-9)


@pytest.mark.parametrize("at", [1e-2, 1e-5, 1e-12])
@pytest.mark.parametrize(("std", "rounds"), [(1.0, 1), (10.4, 300), (500.0, 2000)])
def test_full_participation_has_the_closed_form_of_the_gaussian(std, rounds, at):
    theirs = get_epsilon_gaussian(std / math.sqrt(rounds), at)
    for trust in ("central", "local"):
        assert mechanism(trust, 1.0, std).epsilon(rounds, at) == pytest.approx(theirs, rel=1e-6, abs=1e-9)
        assert mechanism(trust, 1.0, 2 * std, "replace_one").epsilon(rounds, at) == pytest.approx(theirs, 1e-6, 1e-9)
        needed = mechanism(trust, 1.0, 1.0).calibrate(0.7, at, rounds).noise_std
        assert 1 - 1e-6 <= needed / (get_sigma_gaussian(0.7, at) * math.sqrt(rounds)) <= 1 + 1.1e-4
    assert mechanism("secagg", 1.0, std / math.sqrt(M)).epsilon(rounds, at) == pytest.approx(theirs, 1e-6, 1e-9)


# prv-accountant 0.2.0:
#   PRVAccountant(PoissonSubsampledGaussianMechanism(p, std), eps_error=1e-3, delta_error=1e-4 * at,
#                 max_self_compositions=rounds).compute_epsilon(at, rounds)    (the last: eps_error=2e-3)
# It looks at one direction, the client present against absent, which is the worse of the two for ε > 0.
PRV = [
    ((0.25, 1.837, 300, 1e-5), (13.691622726237473, 13.6926859185178, 13.693749116789494)),
    ((0.25, 2.734, 300, 1e-5), (7.992541431259718, 7.993581463620536, 7.994621499674079)),
    ((0.25, 8.73, 300, 1e-5), (1.9989622084263468, 1.9999743640735936, 2.0009865206717063)),
    ((0.01, 1.0, 1000, 1e-5), (1.8272234954025222, 1.8282366950392293, 1.8292498959894417)),
    ((0.01, 0.6, 2000, 1e-6), (11.437646745968303, 11.438709892559613, 11.439773045359923)),
    ((0.1, 2.0, 2000, 1e-6), (13.804711017095476, 13.805762535115006, 13.806814058085463)),
    ((0.5, 4.0, 100, 1e-3), (4.251998924850784, 4.253039798285247, 4.25408067525481)),
    ((0.9, 1.5, 10, 1e-7), (11.71993063138203, 11.720969557445768, 11.72200848470236)),
    ((0.05, 0.8, 1, 1e-4), (1.2040829394481423, 1.2051127566699131, 1.2061425730026438)),
    ((0.002, 0.7, 10_000, 1e-5), (2.4830530111392974, 2.4850737709220247, 2.487094532799258)),
]


@pytest.mark.parametrize(("case", "bounds"), PRV)
def test_central_agrees_with_prv_accountant(case, bounds):
    (p, std, rounds, at), (lower, estimate, _) = case, bounds
    ours = epsilon(Hidden(p, 1 / std), rounds, at)
    assert ours == pytest.approx(estimate, rel=5e-3)
    assert ours >= lower


# What holds for every release.

RELEASES = [
    Hidden(0.25, 0.5), Hidden(0.25, 0.5, True), Hidden(0.01, 1.2), Open((0.3,), (0.4,)), Open((1.0,), (0.1,)),
    Open((0.1, 0.2), (0.2, 0.3)), Open((0.1, 0.2), (0.2, 0.3), 1e-19),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES)
def test_delta_and_epsilon_invert_each_other(release):
    for rounds, at in itertools.product((1, 30, 400), (1e-2, 1e-5, 1e-9, 1e-15)):
        eps = epsilon(release, rounds, at)
        assert delta(release, rounds, eps) <= at * (1 + 1e-6)
        if eps > 0:
            assert delta(release, rounds, eps * (1 - 1e-4)) > at
            assert epsilon(release, rounds, delta(release, rounds, eps)) == pytest.approx(eps, rel=1e-6)
    assert epsilon(release, 0, 1e-5) == 0 == delta(release, 0, 1.0)


@pytest.mark.parametrize("release", RELEASES)
def test_a_tiny_delta_is_still_an_upper_bound(release):
    for rounds in (1, 300):
        falling = [epsilon(release, rounds, at) for at in (1e-11, 9.9e-12, 1e-15, 1e-16, 1e-30)]
        assert falling == sorted(falling)
        assert math.isfinite(falling[-2])
        assert math.isfinite(falling[-1]) or release.unsure > 1e-30


@pytest.mark.parametrize("rounds", [300, 2000, 20_000])
@pytest.mark.parametrize("release", RELEASES)
def test_every_delta_from_the_smallest_on_has_an_answer(release, rounds):
    found = [epsilon(release, rounds, at) for at in (1e-9, 1e-10, 1e-11, 0.99e-11)]
    assert math.isfinite(found[-1])
    assert found == sorted(found)


def test_what_was_not_looked_into_counts_at_a_tiny_delta_too():
    """60 clients at p = .9: cohorts that are so small that they were left away still weigh more than δ = 1e-50."""
    std = 0.07
    ours = mechanism("secagg", 0.9, std, clients=60)
    assert ours.release().unsure > 1e-50
    eps = ours.epsilon(1, 1e-50)
    exact = math.fsum(
        0.9 * stats.binom.pmf(s, 59, 0.9) * gaussian_delta(eps, 1 / (std * math.sqrt(s + 1))) for s in range(60)
    ) if math.isfinite(eps) else 0.0  # fmt: skip
    assert exact <= 1e-50


@pytest.mark.long
@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_extremes_are_finite_little_work_and_in_order(trust, adjacency, monkeypatch):
    """Work: numbers that are transformed for a composition or looked at in a closed form."""
    work, transform, closed = [], composition.rfft, accounting.gaussian_log_delta
    monkeypatch.setattr(composition, "rfft", lambda values: work.append(len(values)) or transform(values))
    monkeypatch.setattr(
        accounting, "gaussian_log_delta", lambda e, mu: work.append(np.size(mu)) or closed(e, mu)
    )  # fmt: skip
    epsilon.cache_clear()
    for p, rounds in itertools.product((1e-4, 0.25, 1.0), (1, 20_000)):
        found = [mechanism(trust, p, std, adjacency).epsilon(rounds, DELTA) for std in (1e-4, 1e-2, 1.0, 1e2, 1e4)]
        assert all(math.isfinite(e) and e >= 0 for e in found)
        assert found == sorted(found, reverse=True)
        assert found[0] > 1e5 > 1 > found[-1]
    assert 0 < sum(work) < 2_000_000


@pytest.mark.parametrize(("p", "std", "more"), [
    (0.25, 1e-4, {"clients": 1000}), (0.25, 1e-5, {"clients": 1000}), (0.9, 1e-5, {"clients": 100}),
    (0.02, 0.7, {"min_cohort": 10}), (0.02, 0.7, {"min_cohort": 20}), (1e-5, 3.0, {}),
])  # fmt: skip
def test_secagg_needs_no_large_grid(p, std, more):
    """Next to no noise while part of the cohorts is unsure; rounds that hardly ever take place (see the fixture)."""
    assert math.isfinite(mechanism("secagg", p, std, **more).epsilon(300, 1e-6))


@pytest.mark.parametrize("p", [0.1, 0.25])
def test_much_noise_in_many_rounds_is_one_gaussian(p):
    """The central limit: mu = p √rounds/std (times 2 for replace-one)."""
    for mirrored, shift in ((False, 1), (True, 2)):
        limit = get_epsilon_gaussian(1e4 / (shift * p * math.sqrt(20_000)), DELTA)
        assert epsilon(Hidden(p, 1e-4, mirrored), 20_000, DELTA) == pytest.approx(limit, rel=3e-3)


# Orders that are theorems.


@pytest.mark.long
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("trust", TRUSTS)
def test_epsilon_grows_with_the_rounds_and_falls_with_noise_and_delta(trust, adjacency):
    base = mechanism(trust, 0.25, 2.0, adjacency)
    by_rounds = [base.epsilon(k, DELTA) for k in (0, 1, 2, 3, 10, 100, 300, 301, 1000)]
    by_delta = [base.epsilon(100, at) for at in (0.5, 0.1, 1e-2, 1e-5, 1e-5 / 1.01, 1e-9, 1e-12, 1e-20)]
    by_noise = [mechanism(trust, 0.25, s, adjacency).epsilon(100, DELTA) for s in (100, 10, 2.02, 2, 1, 0.1, 0.01)]
    for found in (by_rounds, by_delta, by_noise):
        assert found == sorted(found)
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("trust", ["central", "local"])
def test_epsilon_grows_with_the_participation(trust):
    """In secagg it need not: more senders, more noise."""
    for adjacency in ("zero_out", "replace_one"):
        found = [mechanism(trust, p, 2.0, adjacency).epsilon(100, DELTA) for p in (0.01, 0.05, 0.25, 0.5, 0.99, 1.0)]
        assert found == sorted(found)
        assert len(set(found)) == len(found)


@pytest.mark.long
@pytest.mark.parametrize("p", [0.02, 0.25, 0.7, 1.0])
@pytest.mark.parametrize("std", [0.7, 3.0])
def test_orders_between_models(p, std):
    for rounds in (1, 100):
        eps = {(t, a): mechanism(t, p, std, a).epsilon(rounds, DELTA)
               for t in TRUSTS for a in ("zero_out", "replace_one")}  # fmt: skip
        for trust in TRUSTS:
            assert eps[trust, "zero_out"] <= eps[trust, "replace_one"]
        for adjacency in ("zero_out", "replace_one"):
            assert eps["central", adjacency] <= eps["local", adjacency] * (1 + 1e-9)  # hidden or seen, the same noise
            assert eps["secagg", adjacency] <= eps["local", adjacency]  # a sum shows less than its terms
        for trust in TRUSTS:
            renyi = mechanism(trust, p, std).epsilon(rounds, DELTA, "rdp")
            assert eps[trust, "zero_out"] <= renyi * (1 + 1e-3)
    colluding = [mechanism("secagg", p, std, colluders=t).epsilon(100, DELTA) for t in (0, 1, 5, 18, 19)]
    assert colluding == sorted(colluding)
    assert colluding[-1] == pytest.approx(mechanism("local", p, std).epsilon(100, DELTA), rel=1e-6)
    demanding = [mechanism("secagg", p, std, min_cohort=c).epsilon(100, DELTA) for c in (1, 2, 5, 10, 20)]
    assert demanding == sorted(demanding, reverse=True)


@pytest.mark.long
@pytest.mark.parametrize("weight", [1e-6, 1e-3, 0.2])
def test_mixed_noise_lies_between_its_least_and_its_most(weight):
    """One level has a closed form, several take the grid, which may overstate a little and never understates."""
    for mu, (rounds, at) in itertools.product((0.04, 0.4, 4.0), ((1, 1e-8), (300, 1e-7), (20_000, 1e-6))):
        mixed = epsilon(Open((weight / 2, weight / 2), (0.999 * mu, mu)), rounds, at)
        least, most = (epsilon(Open((weight,), (m,)), rounds, at) for m in (0.999 * mu, mu))
        assert least * (1 - 1e-6) <= mixed <= most * (1 + 1e-3)


# Searches.

budgets = st.builds(lambda x: 0.05 * 1000**x, st.floats(0, 1))
deltas = st.builds(lambda x: 1e-9 * 1e8**x, st.floats(0, 1))
probabilities = st.one_of(st.just(1.0), st.floats(0.0101, 1.0))


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@given(budgets, deltas, st.integers(1, 2000), probabilities, st.sampled_from(TRUSTS),
       st.sampled_from(["zero_out", "replace_one"]), st.sampled_from(["pld", "rdp"]))  # fmt: skip
def test_calibrated_noise_protects_and_wastes_nothing(eps, at, rounds, p, trust, adjacency, accountant):
    assume((trust, adjacency, accountant) != ("central", "replace_one", "rdp") or p == 1)
    found = mechanism(trust, p, 1.0, adjacency).calibrate(eps, at, rounds, accountant)
    assert found.epsilon(rounds, at, accountant) <= eps
    if found.noise_std > 1e-8:  # else δ alone covers it: no noise is needed
        assert mechanism(trust, p, 0.999 * found.noise_std, adjacency).epsilon(rounds, at, accountant) > eps
    else:
        assert 1 - (1 - p) ** rounds <= at * 1.01


def test_a_target_that_no_noise_keeps_to_is_said():
    with pytest.raises(fn.UserError, match="no noise keeps to this target"):
        mechanism("central", 0.25, 1.0, "replace_one").calibrate(8.0, DELTA, ROUNDS, "rdp")


@pytest.mark.long
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.floats(0.3, 20), deltas, st.integers(1, 40), st.floats(0.05, 1), st.floats(0.5, 10), st.sampled_from(TRUSTS))
def test_affordable_rounds_are_exact(budget, at, planned, p, std, trust):
    asked = mechanism(trust, p, std)
    keeps = [asked.epsilon(k, at) <= budget for k in range(planned + 1)]
    assert asked.affordable(planned, budget, at) == keeps.count(True) - 1
    assert keeps == sorted(keeps, reverse=True)
    assert asked.would_exceed(planned, budget, at) is not keeps[-1]


# Several kinds together.

KINDS = [
    {Hidden(0.25, 0.5): 30, Hidden(0.25, 1.0): 10},
    {Hidden(0.25, 0.5): 30, Open((1.0,), (0.1,)): 10, Open((1.0,), (0.3,)): 5},
    {Hidden(0.01, 1.2): 100, Hidden(0.5, 0.05): 300, Hidden(0.25, 0.3): 60},
    {Hidden(0.25, 3.0): 1, Hidden(0.25, 0.01): 1000},
    {Hidden(0.25, 0.5, True): 30, Hidden(0.25, 1.0, True): 10},
]


@pytest.mark.parametrize("release", RELEASES)
def test_one_kind_alone_is_priced_as_ever(release):
    for rounds, at in itertools.product((1, 30), (1e-2, 1e-5, 1e-12)):
        assert epsilon_of_all({release: rounds}, at) == epsilon(release, rounds, at)
        assert epsilon_of_all({release: rounds, Hidden(0.5, 1.0): 0}, at) == epsilon(release, rounds, at)
    assert epsilon_of_all({}, 1e-5) == epsilon_of_all({release: 0}, 1e-5) == 0


@pytest.mark.parametrize("at", [1e-2, 1e-5, 1e-12])
def test_gaussians_together_are_one_gaussian(at):
    """mu² = Σ rounds mu², the closed form."""
    counts = {0.1: 10, 0.3: 5, 0.02: 400}
    theirs = get_epsilon_gaussian(1 / math.sqrt(sum(k * mu**2 for mu, k in counts.items())), at)
    ours = epsilon_of_all({Open((1.0,), (mu,)): k for mu, k in counts.items()}, at)
    assert theirs * (1 - 1e-9) <= ours <= theirs * (1 + 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("kinds", KINDS)
def test_several_kinds_agree_with_dp_accounting(kinds):
    mirrored = any(getattr(release, "mirrored", False) for release in kinds)
    fine, coarse = (
        PLDAccountant(RELATIONS[mirrored], value_discretization_interval=width) for width in (5e-4, 1e-3)
    )  # fmt: skip
    for accountant in (fine, coarse):
        for release, rounds in kinds.items():
            gaussian = dp.GaussianDpEvent(1 / (release.mu if isinstance(release, Hidden) else release.mus[0]))
            sampled = isinstance(release, Hidden)
            accountant.compose(dp.PoissonSampledDpEvent(release.p, gaussian) if sampled else gaussian, rounds)
    for at in (1e-3, 1e-5, 1e-8):
        ours, theirs = epsilon_of_all(kinds, at), fine.get_epsilon(at)
        assert ours == pytest.approx(theirs, rel=2e-3)
        assert ours >= theirs - abs(coarse.get_epsilon(at) - theirs)  # both overstate, by a power of their grid


def test_several_kinds_seen_agree_with_all_participation_patterns():
    """Two noise levels, the client seen in n₁ of 4 and n₂ of 3 rounds: δ is a mean over n₁ and n₂."""
    p, mu, k = (0.3, 0.6), (0.8, 1.5), (4, 3)

    def exact(eps):
        return math.fsum(
            stats.binom.pmf(a, k[0], p[0]) * stats.binom.pmf(b, k[1], p[1])
            * gaussian_delta(eps, math.sqrt(a * mu[0] ** 2 + b * mu[1] ** 2))
            for a in range(k[0] + 1) for b in range(k[1] + 1)
        )  # fmt: skip

    for at in (0.05, 1e-3, 1e-6):
        tight = inverse(exact, at)
        ours = epsilon_of_all({Open((p[i],), (mu[i],)): k[i] for i in (0, 1)}, at)
        assert tight * (1 - 1e-9) <= ours <= tight * 1.002


@pytest.mark.long
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(RELEASES), st.integers(0, 200)), min_size=2, max_size=4),
       st.sampled_from([1e-2, 1e-5, 1e-9, 1e-12]))  # fmt: skip
def test_together_costs_more_than_any_alone_and_less_than_their_sum(parts, at):
    kinds = dict(parts)
    used = [(release, rounds) for release, rounds in kinds.items() if rounds]
    ours = epsilon_of_all(kinds, at)
    assert ours >= max([epsilon(release, rounds, at) for release, rounds in used], default=0.0) * (1 - 1e-3)
    assert ours <= math.fsum(epsilon(release, rounds, at / len(used)) for release, rounds in used) * (1 + 1e-9)


def test_kinds_that_numbers_would_not_do_for_are_added_up():
    wild, tame = Hidden(0.25, 2000.0), Hidden(0.25, 0.5)
    assert epsilon_of_all({wild: 3, tame: 4}, DELTA) == epsilon(wild, 3, DELTA / 2) + epsilon(tame, 4, DELTA / 2)


@settings(max_examples=100, deadline=None)
@given(
    weight=st.floats(0.001, 1), log_mu=st.floats(-4, 2.5), rounds=st.integers(1, 20_000), log_at=st.floats(-12, -0.1)
)
def test_the_search_for_epsilon_finds_what_halving_finds(weight, log_mu, rounds, log_at):
    """To the last bit: what it knows beforehand saves evaluations and decides nothing."""
    release, at = Open((weight,), (10**log_mu,)), 10**log_at
    low, high = 0.0, 1.0
    if delta(release, rounds, 0.0) <= at:
        assert epsilon(release, rounds, at) == 0
        return
    while accounting._log_delta_open(release, rounds, high) > math.log(at):
        low, high = high, 2 * high
    while high - low > accounting.CLOSEST * high:
        middle = (low + high) / 2
        fits = accounting._log_delta_open(release, rounds, middle) <= math.log(at)
        low, high = (low, middle) if fits else (middle, high)
    assert epsilon(release, rounds, at) == high
