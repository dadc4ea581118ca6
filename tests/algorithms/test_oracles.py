"""Every named method against its literal loop, in float64: rtol 1e-12."""

from functools import partial

import numpy as np
import oracles
import pytest
import torch
from literal import norm_alpha

import fednormec as fn
from fednormec.algorithms.methods import METHODS
from fednormec.core.randomness import generator

ROUNDS, SEED = 12, 5
QUADRATIC = fn.random_quadratic(7, 6, parts=5, heterogeneity=1.0, seed=2)
LOGISTIC = fn.Logistic(
    [torch.from_numpy(np.random.default_rng(i).standard_normal((3 + i, 4))) for i in range(6)],
    [torch.from_numpy(np.random.default_rng(i).choice([-1.0, 1.0], 3 + i)) for i in range(6)],
    regularizer=0.1,
)  # clients of 3 to 8 examples
GRADIENTS = {
    "quadratic": oracles.quadratic_gradient(QUADRATIC.curvatures.numpy(), QUADRATIC.minimisers.numpy()),
    "logistic": oracles.logistic_gradient(
        [np.random.default_rng(i).standard_normal((3 + i, 4)) for i in range(6)],
        [np.random.default_rng(i).choice([-1.0, 1.0], 3 + i) for i in range(6)],
        0.1,
    ),
}
PROBLEMS = {"quadratic": QUADRATIC, "logistic": LOGISTIC}
PARTICIPATIONS = {
    "full": fn.full(),
    "poisson": fn.poisson(0.4),
    "sleep": fn.poisson(0.4, "sleep"),
    "fixed": fn.fixed_size(3),
}
LOCALS = {
    "gd1": (fn.gd(0.3), oracles.gd(0.3, 1)),
    "gd4": (fn.gd(0.3, steps=4), oracles.gd(0.3, 4)),
    "ig": (fn.ig(0.3), oracles.ig(0.3, 1, "cyclic", 1)),
    "ig batches": (fn.ig(0.3, batch_size=2), oracles.ig(0.3, 2, "cyclic", 1)),
    "ig reshuffled": (fn.ig(0.3, 2, "reshuffle", 3), oracles.ig(0.3, 2, "reshuffle", 3)),
    "sgd": (fn.sgd(0.3, steps=5, batch_size=2), oracles.sgd(0.3, 5, 2)),
    "sgd, batch above some sizes": (fn.sgd(0.3, steps=3, batch_size=4), oracles.sgd(0.3, 3, 4)),
}


def on_gradients(build, oracle):
    return lambda local: build(), lambda world, local: oracle(world)


BOUNDS = {
    "clip": ({"bound": "clip", "tau": 0.3}, lambda v: oracles.clip(v, 0.3)),
    "normalize": ({"bound": "normalize", "tau": 0.4, "alpha": 0.2}, lambda v: 0.4 * norm_alpha(v, 0.2)),
    "top_k": ({"bound": "top_k", "k": 2}, lambda v: oracles.largest(v, 2)),
}


def with_bound(name, build, oracle):
    settings, C = BOUNDS[name]
    return partial(build, server_step=0.2, **settings), partial(oracle, gamma=0.3, C=C, eta=0.2)


CASES = {
    "fed_normec": (
        partial(fn.fed_normec, alpha=0.05, beta=0.2, server_step=0.1),
        partial(oracles.fed_normec, gamma=0.3, alpha=0.05, beta=0.2, eta=0.1),
    ),
    "fed_normec, plain step, alpha 0": (
        partial(fn.fed_normec, alpha=0.0, beta=0.2, server_step=0.1, server_normalization=False),
        partial(oracles.fed_normec, gamma=0.3, alpha=0.0, beta=0.2, eta=0.1, normalize=False),
    ),
    "fed_normec, warm-up": (
        partial(fn.fed_normec, alpha=0.05, beta=0.2, server_step=0.1, server_normalization=False, warmup_rounds=4),
        partial(oracles.warmed_up_fed_normec, gamma=0.3, alpha=0.05, beta=0.2, eta=0.1, warmup=4),
    ),
    "alpha_normec": on_gradients(
        partial(fn.alpha_normec, alpha=0.05, beta=0.2, server_step=0.1),
        partial(oracles.alpha_normec, alpha=0.05, beta=0.2, eta=0.1),
    ),
    "clip21": on_gradients(partial(fn.clip21, tau=0.3, server_step=0.2), partial(oracles.clip21, tau=0.3, eta=0.2)),
    "clip21, exact start": on_gradients(
        partial(fn.clip21, tau=0.3, server_step=0.2, initial_memory="local_updates"),
        partial(oracles.clip21, tau=0.3, eta=0.2, start_exact=True),
    ),
    "clip21_sgd2m": on_gradients(
        partial(fn.clip21_sgd2m, tau=0.3, client_momentum=0.3, server_momentum=0.6, server_step=0.2),
        partial(oracles.clip21_sgd2m, tau=0.3, m=0.3, b=0.6, eta=0.2),
    ),
    "clip21_sgd2m, exact start": on_gradients(
        partial(fn.clip21_sgd2m, tau=0.3, client_momentum=0.3, initial_memory="local_updates"),
        partial(oracles.clip21_sgd2m, tau=0.3, m=0.3, b=0.5, eta=0.1, start_exact=True),
    ),
    "ef21": on_gradients(partial(fn.ef21, k=2, server_step=0.2), partial(oracles.ef21, k=2, eta=0.2)),
    "ef21_pp": on_gradients(partial(fn.ef21_pp, k=2, server_step=0.2), partial(oracles.ef21_pp, k=2, eta=0.2)),
    **{
        f"ef21_sgdm, {name}": with_bound(
            name, partial(fn.ef21_sgdm, client_momentum=0.3), partial(oracles.ef21_sgdm, m=0.3)
        )
        for name in BOUNDS
    },
    "ef21_sgdm, exact start": with_bound(
        "clip",
        partial(fn.ef21_sgdm, client_momentum=0.3, initial_memory="local_updates"),
        partial(oracles.ef21_sgdm, m=0.3, start_exact=True),
    ),
    **{f"ef14, {name}": with_bound(name, fn.ef14, oracles.ef14) for name in BOUNDS},
    **{
        f"econtrol, {name}": with_bound(name, partial(fn.econtrol, error_weight=0.3), partial(oracles.econtrol, w=0.3))
        for name in BOUNDS
    },
    **{
        f"centred, {name}": with_bound(name, partial(fn.centred, beta=0.6), partial(oracles.centred, beta=0.6))
        for name in ("clip", "normalize")
    },
    **{
        f"centred, {name}, leaky": with_bound(
            name,
            partial(fn.centred, beta=0.6, leak=0.2, deviation_step=0.5),
            partial(oracles.centred, beta=0.6, leak=0.2, a=0.5),
        )
        for name in ("clip", "normalize")
    },
    "fed_normec_adaptive": (
        partial(fn.fed_normec_adaptive, alpha=0.3, beta=0.2, quantile=0.6, start=0.2, bit_share=0.1, server_step=0.1),
        partial(oracles.fed_normec_adaptive, gamma=0.3, alpha=0.3, beta=0.2, q=0.6, C=0.2, rate=0.2, s=0.1, eta=0.1),
    ),
    "fed_normec_adaptive, plain step, warm-up": (
        partial(
            fn.fed_normec_adaptive, start=3.0, rate=1.0, server_step=0.3, server_normalization=False, warmup_rounds=4
        ),
        partial(
            oracles.fed_normec_adaptive,
            gamma=0.3,
            alpha=0.1,
            beta=0.1,
            q=0.9,
            C=3.0,
            rate=1.0,
            s=0.01,
            eta=0.3,
            normalize=False,
            warmup=4,
        ),
    ),
    "fed_avg": (partial(fn.fed_avg, server_step=0.9), partial(oracles.fed_avg, eta=0.9)),
    "dp_fed_avg_clip": (
        partial(fn.dp_fed_avg_clip, tau=0.1, server_step=0.9),
        partial(oracles.dp_fed_avg_clip, tau=0.1, eta=0.9),
    ),
    "dp_fed_avg_adaptive": (
        partial(fn.dp_fed_avg_adaptive, quantile=0.7, start=0.5, rate=0.4, bit_share=0.1, server_step=0.9),
        partial(oracles.dp_fed_avg_adaptive, q=0.7, C=0.5, rate=0.4, s=0.1, eta=0.9),
    ),
    "dp_fed_avg_normalized": (
        partial(fn.dp_fed_avg_normalized, alpha=0.05, beta=0.2, server_step=0.9),
        partial(oracles.dp_fed_avg_normalized, alpha=0.05, beta=0.2, eta=0.9),
    ),
    "dp_fed_avg_normalized, as in the paper's experiments": (
        partial(fn.dp_fed_avg_normalized, alpha=0.05, beta=0.2, server_step=0.3, bounded="update"),
        partial(oracles.paper_baseline, gamma=0.3, alpha=0.05, beta=0.2),
    ),
    "scaffold": (partial(fn.scaffold, server_step=0.9), partial(oracles.scaffold, gamma=0.3, eta=0.9)),
    "dp_scaffold": (
        partial(fn.dp_scaffold, tau=0.5, server_step=0.9),
        partial(oracles.scaffold, gamma=0.3, eta=0.9, tau=0.5),
    ),
    "soteria": (
        partial(fn.soteria, k=2, shift_step=0.3, server_step=0.2),
        partial(oracles.soteria, gamma=0.3, k=2, a=0.3, eta=0.2),
    ),
    "mr_mtl": (partial(fn.mr_mtl, pull=0.7), partial(oracles.personal, pull=0.7)),
    "local_training": (fn.local_training, partial(oracles.personal, pull=0.0)),
}


def can_be_private(case):
    algorithm = CASES[case][0](LOCALS["gd4"][0])
    return algorithm.bound.radius < np.inf and algorithm.prime is None


def agree(problem_name, case, local_name, participation_name, privacy):
    problem, participation = PROBLEMS[problem_name], PARTICIPATIONS[participation_name]
    local, literal_local = LOCALS[local_name]
    build, oracle = CASES[case]
    algorithm = build(local)
    width = algorithm.message_width(problem.dim)
    m = problem.num_clients
    draws = [participation.draw(m, generator(SEED, "cohort", k)) for k in range(1, ROUNDS + 1)]
    cohorts = [set(d.computing[d.sending].tolist()) for d in draws]
    noises = [np.zeros(width) for _ in draws]
    if privacy is not None:
        std = privacy.noise_std * algorithm.bound.radius
        stds = [std * (1 if privacy.trust == "central" else np.sqrt(len(S))) for S in cohorts]
        noises = [s * generator(SEED, "noise", k).standard_normal(width) for k, s in enumerate(stds, start=1)]
    x0 = np.linspace(-1, 1, problem.dim)
    world = oracles.World(
        GRADIENTS[problem_name], problem.client_sizes.tolist(), x0, cohorts, noises, participation.rate(m),
        participation.idle == "sleep", SEED,
    )  # fmt: skip
    *_, last = fn.simulate(
        problem, algorithm, participation, privacy, rounds=ROUNDS, seed=SEED, x0=torch.from_numpy(x0)
    )
    end = oracle(world, literal_local)
    for ours, theirs in [(last.x, end.x), (last.server.memory, end.server_memory), (last.memory, end.memories)]:
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-12, atol=1e-12 * np.abs(theirs).max(initial=0))


def test_every_named_method_has_an_oracle():
    assert {case.split(",")[0] for case in CASES} == set(METHODS)


@pytest.mark.long
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("participation", PARTICIPATIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_method_is_its_literal_loop(case, participation, problem):
    if case == "alpha_normec" and participation != "full":
        pytest.skip("alpha-NormEC is the method with full participation")
    agree(problem, case, "gd4", participation, None)


@pytest.mark.long
@pytest.mark.parametrize("trust", ["central", "secagg", "local"])
@pytest.mark.parametrize("case", [case for case in CASES if can_be_private(case)])
def test_every_method_with_noise_is_its_literal_loop(case, trust):
    participation = "full" if case == "alpha_normec" else "poisson"
    agree("quadratic", case, "gd4", participation, fn.Privacy(noise_std=0.7, trust=trust))


@pytest.mark.long
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("case", ["fed_normec", "scaffold", "mr_mtl"])
def test_every_local_operator_is_its_literal_loop(case, local, problem):
    agree(problem, case, local, "poisson", None)


def test_an_oracle_notices_a_wrong_factor():
    """The comparison can fail: another server step is told apart."""
    build, _ = CASES["clip21"]
    CASES["wrong"] = (build, lambda world, local: oracles.clip21(world, tau=0.3, eta=0.2 * (1 + 1e-9)))
    with pytest.raises(AssertionError):
        agree("quadratic", "wrong", "gd4", "poisson", None)
    del CASES["wrong"]
