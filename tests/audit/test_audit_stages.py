"""An audit of secure aggregation through its real stages: right passes; what is planted wrong is caught."""

from typing import Any

import numpy as np
import pytest

import fednormec as fn
import fednormec.secagg.graph
import fednormec.secagg.terms
from fednormec import secagg
from fednormec.audit.audit import Audit, audit_mechanism
from fednormec.engine import together
from fednormec.privacy.mechanism import Mechanism

pytestmark = pytest.mark.long
STAGED = fn.Mechanism(
    6, fn.full(), 2.0, secure=True, trust="secagg", grid_dim=64, protocol=True, draws="server", min_survivors=4,
    colluders=1,
)  # fmt: skip
OWN = Mechanism.own_noise


def audited() -> Audit:
    return audit_mechanism(STAGED, 6, 1e-5, trials=60, side_rounds=120)


def test_what_is_right_passes() -> None:
    found = audited()
    assert found.verdict == "consistent", found.reasons
    assert found.checks["the least number of messages in a sum"] == 1.0


def planted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first: dict[int, np.ndarray] = {}

    def noise(self: Mechanism, dim: int) -> np.ndarray:
        if name == "half":
            return OWN(self, dim) // 2
        return first.setdefault(dim, OWN(self, dim))

    if name == "floor":  # both sides take two members for enough, in all that is counted
        terms: Any = together.Terms
        monkeypatch.setattr(together, "Terms", lambda *given: terms(*given)._replace(floor=2, colluders=0))
        for module in (secagg.terms, secagg.graph):
            monkeypatch.setattr(module, "signatures_needed", lambda n, floor, colluders: 2)
        monkeypatch.setattr(secagg.terms, "neighbourhood", secagg.graph.neighbourhood.__wrapped__)
    else:
        monkeypatch.setattr(Mechanism, "own_noise", noise)


@pytest.mark.parametrize(("name", "check"), [("half", "noise level"), ("same", "noise of any two rounds"),
                                             ("floor", "the least number of messages in a sum")])  # fmt: skip
def test_what_is_planted_wrong_is_caught(name: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(name, monkeypatch)
    found = audited()
    assert found.verdict == "violated" and found.checks[check] < 1e-6, found.text()
