"""Scale-then-privatise: a literal loop at rtol 1e-12, reductions, the bound, and what it is for."""

import numpy as np
import pytest
import torch

import fednormec as fn
from fednormec.core.randomness import generator

PROBLEM = fn.random_quadratic(9, 6, parts=2, heterogeneity=1.0, seed=2)
M, P, NOISE, TAU, ETA = 9, 0.5, 0.3, 0.7, 0.4


def literal(x, total, cohort, k, u, c, floor, variance):
    """One round from its released sum: the next model, second moments, and what clients sent before any noise."""
    s = np.ones_like(x)
    if k > 1:
        corrected = u / (1 - c ** (k - 1))
        w = np.maximum(corrected, floor * np.mean(np.abs(corrected)))
        s = np.sqrt(np.mean(w) / w)
    sent = np.zeros_like(x)
    for i in cohort:
        y = x.copy()
        for _ in range(2):
            y = y - 0.15 * PROBLEM.curvatures.mean(1).numpy()[i] @ y + 0.15 * np.mean(
                PROBLEM.curvatures.numpy()[i] @ PROBLEM.minimisers.numpy()[i][:, :, None], axis=0)[:, 0]  # fmt: skip
        moved = s * (x - y)
        sent += moved * min(1.0, TAU / np.linalg.norm(moved))
    d = total / M / s
    return x - ETA / P * d, c * u + (1 - c) * (d**2 - variance / s**2), sent


@pytest.mark.parametrize("private", [False, True], ids=["no noise", "noise"])
def test_scaling_is_its_literal_loop(private):
    method = fn.scaled(fn.dp_fed_avg_clip(fn.gd(0.3, steps=2), tau=TAU, server_step=ETA), decay=0.8, floor=0.05)
    privacy = fn.Privacy(noise_std=NOISE) if private else None
    x, u = PROBLEM.init(generator(4, "init")).numpy(), np.zeros(6)
    for r in fn.simulate(PROBLEM, method, fn.poisson(P), privacy, rounds=10, seed=4):
        variance = (NOISE * TAU * (1 + r.plan.mechanism.rounding) / M) ** 2 if private else 0.0
        who = r.cohort.computing[r.cohort.sending]
        x, u, sent = literal(x, r.released.numpy(), who, r.number, u, 0.8, 0.05, variance)
        np.testing.assert_allclose(r.x.numpy(), x, rtol=1e-12)
        np.testing.assert_allclose(r.server.memory.numpy(), u, rtol=1e-10, atol=1e-18)
        if not private:
            np.testing.assert_allclose(r.released.numpy(), sent, rtol=1e-9, atol=1e-12)


def test_where_all_second_moments_are_the_same_nothing_is_scaled():
    """floor = 1 leaves no coordinate below the mean, and a signal of one size in all none above."""
    plain = fn.dp_fed_avg_clip(fn.gd(1.0), tau=5.0)
    method = fn.scaled(plain, floor=1.0)
    server = method.start(torch.zeros(4, dtype=torch.float64))
    for _ in range(3):
        updates = torch.tensor([[1.0, -1.0, 1.0, 1.0]], dtype=torch.float64)
        message, _ = method.client(server, torch.zeros(1, 0, dtype=torch.float64), updates)
        torch.testing.assert_close(message, plain.client(server, torch.zeros(1, 0), updates)[0], rtol=1e-14, atol=0)
        server = method.advance(server, message[0], fn.Weights(1.0, 1.0))


def test_it_lowers_the_noise_where_updates_are_small():
    """Two coordinates of a thousand carry the signal: relative to it, what the noise does to the others shrinks."""
    rng, dim = np.random.default_rng(0), 1000
    signal = np.full(dim, 0.001)
    signal[:2] = 0.7
    errors = {}
    for name, method in {
        "plain": fn.dp_fed_avg_clip(fn.gd(1.0)),
        "scaled": fn.scaled(fn.dp_fed_avg_clip(fn.gd(1.0))),
    }.items():
        server, weights = method.start(torch.zeros(dim, dtype=torch.float64)), fn.Weights(1.0, 1.0, noise=0.02**2)
        for _ in range(40):
            message, _ = method.client(server, torch.zeros(1, 0, dtype=torch.float64), torch.from_numpy(signal)[None])
            mean = message[0] + torch.from_numpy(0.02 * rng.standard_normal(dim))
            step = method.server(server, mean, weights)
            errors[name] = float((step.direction[2:] - torch.from_numpy(signal[2:])).norm())
            server = method.advance(server, mean, weights)
    assert errors["scaled"] < 0.5 * errors["plain"]


@pytest.mark.parametrize("inner", [fn.dp_fed_avg_clip, fn.dp_fed_avg_normalized])
def test_it_keeps_its_side_of_a_private_run(inner):
    assert fn.check_method(fn.scaled(inner(fn.gd(0.1))), PROBLEM).passed


@pytest.mark.parametrize("inner", [fn.fed_normec, fn.centred, fn.dp_scaffold, fn.ef14])
def test_methods_with_memories_are_refused(inner):
    with pytest.raises(fn.UserError, match="cannot be scaled"):
        fn.scaled(inner(fn.gd(0.1)))


@pytest.mark.parametrize(("settings", "words"), [({"decay": 1.0}, "decay"), ({"floor": 0.0}, "floor")])
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(fn.UserError, match=words):
        fn.scaled(fn.fed_avg(fn.gd(0.1)), **settings)
