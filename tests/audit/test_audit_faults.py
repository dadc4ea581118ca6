"""The faults of `make audit-faults`: each is found, and docs/privacy.md has what was measured."""

import json

import audit_faults
import pytest
from paths import ROOT

from fednormec.audit import audit

pytestmark = pytest.mark.long

STORED = json.loads((audit_faults.HERE / "results.json").read_text())
PAGE = ROOT / "docs" / "privacy.md"
PLAIN = {  # large enough for few rounds
    "noise level": 0.05, "beyond 1,000": 0.2, "left out": 0.05, "lag 2": 0.1, "noise of three": 1.0,
    "rate": 0.05, "three cohorts": 1.0, "three clients": 1.0, "length": 0.05, "momentum": 1e-6,
}  # fmt: skip


def test_the_page_has_the_stored_figures():
    page = PAGE.read_text()
    assert audit_faults.table(STORED) in page
    assert f"{STORED['right']['audits']:,} small audits" in page


def test_all_faults_were_measured_and_found_and_nothing_right_was_accused():
    assert list(STORED["faults"]) == list(audit_faults.FAULTS)
    for name, found in STORED["faults"].items():
        last = found["tried"][-1]
        assert found["says"] == audit_faults.FAULTS[name].says
        assert (last["size"], last["found"] >= 0.99 * last["runs"]) == (found["size"], True)
        assert all(size["found"] < 0.99 * size["runs"] for size in found["tried"][:-1])
    assert STORED["right"]["audits"] >= 1000 and 1000 * STORED["right"]["accused"] < STORED["right"]["audits"]


@pytest.mark.parametrize("name", [name for name in audit_faults.FAULTS if name != "training"])
def test_a_planted_fault_is_found(monkeypatch, name):
    monkeypatch.setattr(audit, "SIDE_ROUNDS", 250)
    assert audit_faults.caught(name, PLAIN.get(name, 1.0), seed=1)


def test_without_a_fault_nothing_is_found(monkeypatch):
    monkeypatch.setattr(audit, "SIDE_ROUNDS", 250)
    for part in (audit_faults.noise, audit_faults.cohorts, audit_faults.messages, audit_faults.momentum):
        assert part(1, 0.0) == []
    assert not any(audit_faults.accused(number) for number in range(len(audit_faults.RIGHT)))
