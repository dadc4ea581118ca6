"""Clients report how good a model is on examples that they hold out: if the agreement says so, and not otherwise."""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated import DIM, LOCAL, NAMES, Network, config, data, request_for
from hypothesis import given
from hypothesis import strategies as st

import fednormec as fn
from fednormec.config.schema import Config
from fednormec.core.randomness import generator
from fednormec.data import Examples, hold_out
from fednormec.engine.record import Record
from fednormec.errors import UserError
from fednormec.federation.agreement import Federation, for_client, for_server
from fednormec.federation.client import answering, reported
from fednormec.federation.disclosure import besides, promise
from fednormec.federation.messages import (
    Refused,
    Report,
    Request,
    framed,
    read_report,
    read_request,
    report_bytes,
    request_bytes,
)
from fednormec.federation.reports import Reporting, taken_report
from fednormec.federation.wire import Wire

SHARE = 0.25


def asked(report: bool = True, **sections: dict[str, Any]) -> Config:
    base = config(**sections)
    told = {"report": True, "held_out": SHARE} if report else {}
    return base | {"federation": base["federation"] | told}


def party(of: Config, client: int) -> Federation:
    return for_client(of, NAMES[client], Examples(*data()[client]))


class Asking:
    """All clients in this process; every message is the bytes that a network would carry."""

    def __init__(self, parties: list[Federation]) -> None:
        self.parties, self.said = parties, list[str]()

    def __call__(self, requests: Mapping[int, Request]) -> dict[int, Report | Refused]:
        answers = dict[int, Report | Refused]()
        for client, request in requests.items():
            arrived = read_request(request_bytes(request), DIM, 0, request.x.dtype)
            answers[client] = read_report(report_bytes(reported(self.parties[client], arrived)))
        return answers

    def reports(self, agreed: str) -> Reporting:
        return Reporting(NAMES, lambda: "a", agreed, self, self.said.append)


def rounds(of: Config, folder: Path, reports: Reporting | None) -> list[Any]:
    """The rounds of a federation that evaluates every second one."""
    network, server = Network(of, folder), for_server(of, folder, reports)
    experiment = server.experiment
    place = Wire(NAMES, lambda: "a", server.agreed, network.ask, network.said.append)
    return list(fn.simulate(
        experiment.problem, experiment.algorithm, experiment.participation, experiment.privacy, rounds=4, seed=3,
        evaluate_every=2, on=place,
    ))  # fmt: skip


def held_out(client: int) -> tuple[np.ndarray, np.ndarray]:
    """What a client holds out, by hand."""
    x, y = data()[client]
    _, aside = hold_out(np.arange(len(x)), SHARE, generator(3, "split", client))
    return x[aside], y[aside]


def test_the_server_records_how_the_figure_is_spread_over_held_out_examples(tmp_path: Path) -> None:
    of = asked()
    asking = Asking([party(of, i) for i in range(len(NAMES))])
    done = rounds(of, tmp_path, asking.reports(for_server(of, tmp_path).agreed))
    assert [r.metrics is not None for r in done] == [False, True, False, True] and not asking.said
    for r in done[1::2]:
        weight, bias = r.x[: DIM - 3].view(3, -1), r.x[DIM - 3 :]
        expected = []
        for client in range(len(NAMES)):
            x, y = held_out(client)
            scores = torch.from_numpy(x) @ weight.T + bias
            expected.append(float((scores.argmax(1).numpy() == y).mean()))
        assert r.metrics.by_client.values == pytest.approx(sorted(expected))
        assert r.metrics.by_client.held_out and r.metrics.not_private == r.metrics.by_client.figures
        assert not r.metrics.public


def test_what_is_held_out_is_never_trained_on(tmp_path: Path) -> None:
    """Other labels of the examples that a client holds out change no message; of the others they do."""
    of, (x, y) = asked(), data()[0]
    kept, aside = hold_out(np.arange(len(x)), SHARE, generator(3, "split", 0))
    assert len(aside) == 2

    def message(labels: np.ndarray, name: str) -> torch.Tensor:
        federation = for_client(of, NAMES[0], Examples(x, labels))
        request = request_for(Network(of, folder(tmp_path / name)), 1, 0)
        found = answering(federation, 0, folder(tmp_path / f"{name}-own"))(request).message
        assert found is not None
        return found

    others, own = y.copy(), y.copy()
    others[aside], own[kept[0]] = (y[aside] + 1) % 3, (y[kept[0]] + 1) % 3
    assert torch.equal(message(y, "a"), message(others, "b"))
    assert not torch.equal(message(y, "c"), message(own, "d"))


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_without_consent_a_client_refuses_and_the_server_says_so(tmp_path: Path) -> None:
    yes, no = asked(), asked(report=False)
    assert for_server(yes, tmp_path).agreed != for_server(no, tmp_path).agreed
    asking = Asking([party(no if i == 1 else yes, i) for i in range(len(NAMES))])
    values = asking.reports(for_server(yes, tmp_path).agreed)(torch.zeros(DIM, dtype=torch.float64), "accuracy")
    assert len(values) == 3
    (said,) = asking.said
    assert said == "south reported nothing that counts: it says: the federation.toml here does not let a client report"


def test_other_settings_are_refused(tmp_path: Path) -> None:
    request = Request("a", "another", 0, 0, False, b"n" * 16, torch.zeros(DIM, dtype=torch.float64))
    assert reported(party(asked(), 0), request).why == "the server has other settings than the federation.toml here"


def test_a_client_with_too_few_examples_has_nothing_to_report(tmp_path: Path) -> None:
    of = asked()
    one = for_client(of, NAMES[0], Examples(np.zeros((1, 5)), np.zeros(1)))
    request = Request("a", one.agreed, 0, 0, False, b"n" * 16, torch.zeros(DIM, dtype=torch.float64))
    assert reported(one, request).why == "there are too few examples here to hold one out"


def test_nobody_is_asked_unless_all_agreed(tmp_path: Path) -> None:
    """Without report = true the model is evaluated as ever."""
    done = rounds(asked(report=False), tmp_path, None)
    assert all(r.metrics is None or (r.metrics.by_client is None and not r.metrics.not_private) for r in done)


def test_the_share_is_part_of_the_agreement(tmp_path: Path) -> None:
    base = asked()
    other = base | {"federation": base["federation"] | {"held_out": 0.5}}
    usual = base | {"federation": {k: v for k, v in base["federation"].items() if k != "held_out"}}
    spelled = base | {"federation": base["federation"] | {"held_out": 0.2}}
    agreed = [for_server(of, tmp_path).agreed for of in (base, other, usual, spelled)]
    assert len(set(agreed)) == 3 and agreed[2] == agreed[3]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"federation": {"held_out": 0.3}}, "held_out is for clients that report: set report = true, or leave it out"),
        ({"federation": {"report": True, "held_out": 1.0}}, "held_out must be above 0 and below 1, not 1"),
        ({"federation": {"report": 1}}, "report must be true or false, not 1"),
        ({"problem": {"per_client": True}}, "problem.per_client looks at clients' data, which are with the clients"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, settings: Config, said: str) -> None:
    base = config()
    of = {name: base.get(name, {}) | settings.get(name, {}) for name in base | settings}
    with pytest.raises(UserError, match=said):
        for_server(of, tmp_path)


def test_the_statement_and_the_promise_say_that_no_epsilon_covers_it(tmp_path: Path) -> None:
    plan = for_server(asked(privacy=LOCAL), tmp_path).plan
    assert plan is not None
    said = [text for name, text in besides(plan, True) if name == "not covered"]
    assert any("what clients report of the model" in text and "no noise protects them" in text for text in said)
    assert len(besides(plan, False)) == len(besides(plan.mechanism, True)) - 1
    assert "tells the server, exactly, how good the model is on 25% of its examples" in promise(plan, 0.25)
    assert "no ε covers that" in promise(None, 0.25) and "report" not in promise(plan, None)


# What others send

REQUEST = Request("a", "b", 0, 0, False, b"n" * 16, torch.zeros(1))


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (Report(b"other", name="accuracy", value=0.5), "it answers another request"),
        (Report(REQUEST.nonce, name="loss", value=0.5), "it reports the loss, not the accuracy"),
        (Report(REQUEST.nonce, name="accuracy", value=math.nan), "its accuracy is nan"),
        (Report(REQUEST.nonce, name="accuracy", value=1e300), "its accuracy is 1e"),
        (Report(REQUEST.nonce, name="accuracy", value=-0.1), "its accuracy is -0.1"),
        (Report(REQUEST.nonce, "refused", "no"), "it says: no"),
        (Refused("it is an error"), "it is an error"),
    ],
)
def test_a_report_that_cannot_be_one_does_not_count(report: Report | Refused, why: str) -> None:
    with pytest.raises(Refused, match=why):
        taken_report(report, REQUEST, "accuracy")


@given(st.dictionaries(
    st.sampled_from(["nonce", "status", "why", "name", "value"]),
    st.integers(-9, 9) | st.floats() | st.text(max_size=5) | st.booleans(),
))  # fmt: skip
def test_whatever_arrives_is_a_report_or_refused(about: dict[str, Any]) -> None:
    with suppress(Refused):
        assert isinstance(read_report(framed(about)), Report)
    with pytest.raises(Refused, match="it is no message"):
        read_report(b"")


def test_a_record_of_reports_alone_is_whole() -> None:
    apart = {"client_accuracy": 0.5, "client_accuracy_worst": None, "computed": 3, "sent": 3, "left_out": 0}
    assert Record.read({"round": 1, "not_private": apart}, 1) is not None
    assert Record.read({"round": 1, "not_private": apart | {"gradient_norm": 0.1}}, 1) is None
