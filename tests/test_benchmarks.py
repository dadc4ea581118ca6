"""The page about performance says what was measured, and the contestants compute the same thing."""

import json

import convolutions
import federation
import numpy as np
import ours
import pytest
import records
import rounds
import secagg
import texts
import torch

import fednormec as fn
from fednormec.core.local import Moment
from fednormec.secagg.layout import upload_bytes

STORED = json.loads((rounds.HERE / "results" / "rounds.json").read_text())


def test_the_page_has_the_stored_figures():
    assert rounds.tables(STORED) in rounds.PAGE.read_text()


def test_ratios_are_those_of_the_stored_medians():
    for found in STORED.values():
        assert found["ratios"] == rounds.ratios(found)
        assert found["date"] and found["machine"]["cores"] and found["together"]["about"]["fednormec"]["versions"]


def test_the_page_has_the_cost_of_measuring():
    found = json.loads((rounds.HERE / "results" / "measuring.json").read_text())["mlp"]
    medians = found["median_seconds"]
    assert found["ratio"] == medians["measured"] / medians["not measured"] <= found["goal"]
    assert f"makes a round {found['ratio']:.3f} times as long" in rounds.PAGE.read_text()
    assert found["grid_ratio"] == medians["on a grid"] / medians["measured"]
    assert f"make the same round {found['grid_ratio']:.2f} times as\nlong" in rounds.PAGE.read_text()


def test_the_page_has_what_convolutions_of_our_own_bring():
    found = json.loads((rounds.HERE / "results" / "convolutions.json").read_text())
    assert list(found) == list(convolutions.CASES)
    for case in found.values():
        assert case["ratio"] == case["median_seconds"]["torch"] / case["median_seconds"]["ours"]
    row = " | ".join(f"{case['ratio']:.2f}" for case in found.values())
    assert f"| {row} |" in rounds.PAGE.read_text()


def test_the_page_has_what_bounding_each_record_costs():
    stored = json.loads(records.RESULTS.read_text())
    assert list(stored) == [f"{name} {size}" for name in records.NAMES for size in records.BATCHES]
    for found in stored.values():
        assert found["ratios"] == records.ratios(found["median_seconds"])
        assert found["ratios"]["ours / plain"] <= found["goal"]
    assert records.table(stored) in records.PAGE.read_text()


@pytest.mark.long
def test_contestants_add_up_the_same_records():
    kinds = (*records.OWN, *records.PLAIN)
    marks = {kind: records.build("mlp", 50, kind)[1]["marks"] for kind in kinds}
    assert np.allclose(marks["rows"], marks["ours"], rtol=1e-4)
    assert marks["plain"][0] * 50 > 2 * marks["ours"][0]  # the bound cuts
    assert np.allclose(marks["plain, in layers"], marks["plain"], rtol=1e-4)


def test_the_page_has_what_a_federation_was_measured_at():
    assert federation.table(json.loads(federation.RESULTS.read_text())) in federation.PAGE.read_text()


def test_the_page_has_what_secure_aggregation_was_measured_at():
    stored, page = json.loads(secagg.RESULTS.read_text()), " ".join(secagg.PAGE.read_text().split())
    assert secagg.table(stored) in secagg.PAGE.read_text()
    assert secagg.sentence(stored[secagg.FEDERATION]) in page
    ten, many = (stored[f"{clients} clients, 25000 parameters"]["nobody leaves"]["seconds"] for clients in (10, 200))
    assert ten["attempt"] < 1.0
    assert f"{many['attempt']:.0f} s where 200 clients share one core" in page
    assert f"{many['server'] + many['one client']:.2f} s where each has its own" in page


def test_what_secure_aggregation_costs_is_measured_and_stored(tmp_path, capsys):
    out = tmp_path / "secagg.json"
    for clients in ("4", "5"):
        secagg.main(["--clients", clients, "--dims", "10000", "--repeat", "2", "--out", str(out)])
    found = json.loads(out.read_text())
    assert list(found) == ["4 clients, 10000 parameters", "5 clients, 10000 parameters"]
    for one in found.values():
        assert one["date"] and one["machine"]["python"] and one["versions"]["cryptography"] and one["command"]
        everyone, *fewer = (one[name] for name in secagg.LEAVES)
        assert everyone["bytes"]["upload"] == one["formula_bytes"] == upload_bytes(one["clients"], 10**6, 10_000)
        assert all(way["bytes"]["upload_enveloped"] > one["plain_bytes"] for way in (everyone, *fewer))
        assert all(seconds > 0 for way in (everyone, *fewer) for seconds in way["seconds"].values())
        assert everyone["seconds"]["one client"] <= everyone["seconds"]["slowest client"]
    assert len(capsys.readouterr().out.splitlines()) == 2 * (1 + len(secagg.LEAVES))


@pytest.mark.parametrize("local", ours.STEPS)
def test_the_bare_loop_takes_the_steps_that_we_take(local):
    module, inputs, targets = ours.draw("mlp")
    inputs, targets = inputs[:1], targets[:1]
    problem = fn.NeuralProblem(module, list(zip(inputs, targets, strict=True)))
    x = problem.init(np.random.default_rng(0))
    update = ours.local_update(local).run(problem, x, np.arange(1), Moment(0, 1), None)[0]
    ours.bare_loop(module, inputs, targets, local)()
    after = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert torch.linalg.vector_norm((x - after) / ours.RATE - update) <= 1e-4 * torch.linalg.vector_norm(update)


def test_the_operations_of_convolutions_are_counted():
    """By hand: a stem of 3 to 16 channels, and three stages of six convolutions, the first of two halving the image."""
    stem, stage = 32 * 32 * 16 * 27, 32 * 32 * 16 * 16 * 9  # products; a stage with twice the width has half the side
    rest = 6 * stage + 2 * (stage // 2 + 5 * stage)
    assert ours.convolution_operations("resnet20") == 20 * 32 * 2 * (2 * stem + 3 * rest)


def test_the_nets_of_texts_are_causal_and_are_all_measured(capsys):
    found = texts.main(clients=2, widths=(8,), repeats=1)
    assert set(found) == {(name, 8, way) for name in texts.NETS for way in ("loop", "vmap")} - {("GRU", 8, "vmap")}
    assert len(capsys.readouterr().out.splitlines()) == len(found) and min(found.values()) > 0
    x = torch.arange(texts.LENGTH)[None] % texts.TOKENS
    later = x.clone()
    later[0, 50:] = 3
    for build in texts.NETS.values():
        net = build(8)
        torch.testing.assert_close(net(x)[0, :50], net(later)[0, :50])
