"""The report from another process has the same bytes, and in a real browser it fits a desk and a phone."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from folders import made, swept, two_methods
from PIL import Image
from processes import command_line

from fednormec.results.reading import find_runs
from fednormec.results.report import page, write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    return two_methods(tmp_path / "runs")


def test_the_same_runs_give_the_same_bytes(compared: Path, tmp_path: Path) -> None:
    write_report(find_runs([compared]), tmp_path / "first.html")
    command = command_line("report", compared, "--out", tmp_path / "again.html")
    subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True)
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "again.html").read_bytes()


MEASURE = """<!DOCTYPE html><body style="margin:0"><iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}"
onload="const d = this.contentDocument, w = {width}, all = e => [...d.querySelectorAll(e)];
  const boxes = all('svg, table, pre, .tile, .box, h1, p').map(e => [e, e.getBoundingClientRect()]);
  const out = boxes.filter(([e, r]) => r.right > w + 1 && !e.closest('.scroll, pre'));
  const held = d.querySelector('.figures-table');
  document.body.setAttribute('data-found', JSON.stringify({{page: d.documentElement.scrollWidth, out: out.length,
    table: held.getBoundingClientRect().width, room: held.parentElement.clientWidth,
    figures: all('figure svg').map(e => Math.round(e.getBoundingClientRect().width)),
    smallest: Math.min(...all('p, td, th, dd, li, figcaption').map(e => parseFloat(getComputedStyle(e).fontSize)))}}))">
</iframe></body>"""


def browse(folder: Path, *arguments: str) -> str:
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    ]  # fmt: skip
    command = [str(CHROMIUM), *flags, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_a_desk_and_a_phone(compared: Path, tmp_path: Path, width: int) -> None:
    made(compared / "weak with a name that is rather long and_has_no_place_to_break_it", [0.5], label=True)
    (made(compared / "cut", [0.5], method={"alpha": 0.5}) / "summary.json").unlink()
    content = page(find_runs([compared]))
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(MEASURE.format(width=width, page=html.escape(content)), encoding="utf-8")
    dom = browse(tmp_path, "--dump-dom", "--window-size=1400,1000", wrapper.as_uri())
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', dom)[1]))
    assert found["page"] <= width  # nobody scrolls sideways
    assert found["out"] == 0
    assert len(found["figures"]) == 4
    assert all(340 <= w < 540 for w in found["figures"])
    assert found["smallest"] >= 13


@needs_browser
def test_the_whole_table_of_a_sweep_fits_a_desk(tmp_path: Path) -> None:
    runs = swept(tmp_path / "runs", 14)
    for seed in range(2):
        weak = {"method": {"beta": 2.0}, "run": {"seed": seed, "rounds": 20_000}}
        made(runs / f"weak{seed}", [0.52, 0.5 + 0.1 * seed], epsilon=33500.0, label=True, **weak)
    made(runs / "weak2", [0.5], label=True, **(weak | {"run": {"seed": 2, "rounds": 20_000}}))
    (runs / "weak2" / "summary.json").unlink()
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(MEASURE.format(width=1280, page=html.escape(page(find_runs([runs])))), encoding="utf-8")
    dom = browse(tmp_path, "--dump-dom", "--window-size=1400,1000", wrapper.as_uri())
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', dom)[1]))
    assert found["table"] <= found["room"] + 1


@needs_browser
@pytest.mark.parametrize("weak", [False, True])
def test_the_page_can_be_seen_and_an_alarm_is_red(tmp_path: Path, weak: bool) -> None:
    path = write_report(find_runs([made(tmp_path / "run", [0.5, 0.6], label=weak)]), tmp_path / "report.html")
    shot = tmp_path / "shot.png"
    browse(tmp_path, f"--screenshot={shot}", "--window-size=1280,2000", path.as_uri())
    with Image.open(shot) as taken:
        image = taken.convert("RGB")
    colours = dict((colour, count) for count, colour in image.getcolors(maxcolors=2**24))
    assert image.size == (1280, 2000)
    assert colours[(255, 255, 255)] > 0.5 * 1280 * 2000
    assert colours.get((0x00, 0x72, 0xB2), 0) > 300  # the curves
    assert (colours.get((0xFD, 0xF0, 0xF1), 0) > 10_000) == weak  # the alarm's ground
