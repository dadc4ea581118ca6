"""The guide to a method of one's own runs from top to bottom, and prints what it says."""

import re
from pathlib import Path

import pytest
from paths import ROOT

from fednormec.results.reading import read_run

PAGE = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")
ROW = re.compile(r"^(?:\*| ) +(\S+) +([\d.]+) +([\d.]+)? +2 +([\d.]+) ± [\d.]+ +([\d.]+)$", re.M)


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_the_guide_runs_and_its_table_is_what_comes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
    exec(compile(code, "docs/own-method.md", "exec"), {})
    out = capsys.readouterr().out
    assert out.startswith("FedAdam: passed\n")
    (promised,) = re.findall(r"```text\n(.*?)```", PAGE, re.S)
    found, wanted = ({row[:3]: row[3:] for row in ROW.findall(text)} for text in (out, promised))
    assert found.keys() == wanted.keys() and len(wanted) == 6
    for settings, (accuracy, epsilon) in wanted.items():
        assert found[settings][1] == epsilon
        assert abs(float(found[settings][0]) - float(accuracy)) <= 0.02
    assert "cost ε ≤ 32.8 at" in out
    assert read_run("runs/mine").problems == () and Path("adam.html").exists()


def test_the_guide_uses_the_public_api_alone() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
    assert set(re.findall(r"^(?:import|from) (\S+)", code, re.M)) == {"torch", "numpy", "fednormec"}
    assert not re.search(r"\bfn\.(?:\w+\.)*_|\bfednormec\.", code)
