"""The report: all that was promised is on the page, the page is harmless, whole and always the same, and it fits a desk
and a phone in a real browser."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import Command, sentence
from folders import ANYTHING, made, spoilt, swept, two_methods
from hypothesis import HealthCheck, given, settings
from paths import PLAIN
from PIL import Image

import fednormec.results.report
from fednormec.config.schema import read
from fednormec.config.settings import THEORY
from fednormec.errors import UserError
from fednormec.privacy.labels import NOT_PRIVATE
from fednormec.results.compare import ranked
from fednormec.results.curves import AXES, draw_curves, draw_trade_off
from fednormec.results.groups import grouped
from fednormec.results.reading import find_runs
from fednormec.results.report import page, write_figures, write_report
from fednormec.runs.runner import perform

pytestmark = pytest.mark.usefixtures("undrawn")

HOSTILE = "<script>alert(1)<img src=x onerror=alert(2)>\"'&"


def text_of(content: str) -> str:
    """What a reader sees, without style and tags."""
    return html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r"<style.*?</style>", "", content, flags=re.S)))


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    return two_methods(tmp_path / "runs")


# what is on the page


@pytest.mark.long
def test_a_real_private_run_is_told_in_full(tmp_path: Path) -> None:
    overrides = ("model.name=linear", "data.partition=iid", "data.clients=4", "run.rounds=3", "privacy.noise_std=3")
    config = read(PLAIN, overrides)
    summary = perform(config, "test", tmp_path / "run", quiet=True)
    content = page(find_runs([tmp_path / "run"]))
    seen = text_of(content)
    assert html.escape(summary["statement"]) in content  # word for word
    for part in (f"{summary['metrics']['test_accuracy']:.1%}".replace("%", " %"), "central", "zero_out", "650"):
        assert part in seen
    for caption in ("Test accuracy", "Test loss", "ε spent"):
        assert f"<b>{caption}</b> against rounds." in content
    assert re.search(r"<b>Train loss</b> against rounds\. <span[^>]*>Not private", content)
    assert html.escape((tmp_path / "run" / "config.toml").read_text()) in content
    commit = json.loads((tmp_path / "run" / "environment.json").read_text())["commit"]
    assert commit is None or commit in content
    assert content.count("<svg ") == 4


def test_runs_are_compared_with_the_spread_of_their_seeds(compared: Path) -> None:
    content = page(find_runs([compared]))
    seen = " ".join(text_of(content).split())
    assert "<h1>fed_normec against clip21</h1>" in content
    assert "50.0 ± 10.0 %" in seen
    assert "band: the least to the largest of them" in seen
    assert "Runs on the same clients add up" in seen
    differ = content[content.index("What differs between the runs") : content.index("All settings of")]
    assert re.findall(r'<th scope="row">([^<]*)</th>', differ) == ["method.name", "method.tau"]
    assert len(re.findall(r"All settings of", content)) == 2


@pytest.mark.long
@pytest.mark.parametrize("several", [False, True])
def test_what_protects_nobody_says_so_everywhere(tmp_path: Path, several: bool) -> None:
    made(tmp_path / "runs" / "weak", [0.5, 0.6], epsilon=1845.2, label=True)
    if several:
        made(tmp_path / "runs" / "strong", [0.5, 0.6])
    runs = find_runs([tmp_path / "runs"])
    content, seen = page(runs), text_of(page(runs))
    name = "total_norm" if several else "weak"
    for at in re.finditer(rf"\b(1850|1\.85e\+03|{name})\b", seen[: seen.index("All settings of")]):
        if not seen[: at.start()].rstrip().endswith("total_norm"):  # the setting itself in the table of settings
            assert NOT_PRIVATE in seen[max(0, at.start() - 80) : at.end() + 40], seen[at.start() - 80 : at.end() + 40]
    assert content.count('<div class="box alarm"') == 2  # at the top and around the statement
    for metric in ("test_accuracy", "test_loss", "train_loss", "epsilon"):
        figure = draw_curves(grouped(runs), metric)
        legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        assert NOT_PRIVATE in figure.axes[0].get_title()
        assert sum(NOT_PRIVATE in text for text in legends) == several


def test_a_run_without_privacy_says_so(tmp_path: Path) -> None:
    seen = text_of(page(find_runs([made(tmp_path / "run", [0.5], epsilon=None)])))
    assert "No privacy" in seen
    assert "none: no noise was added" in seen
    assert "ε ≤" not in seen


def test_an_unfinished_run_says_what_it_spent_and_what_is_missing(tmp_path: Path) -> None:
    path = made(tmp_path / "run", [0.5, 0.6])
    (path / "summary.json").unlink()
    (path / "privacy.txt").unlink()
    seen = text_of(page(find_runs([path])))
    assert "summary.json is missing: the run did not come to its end" in seen
    assert "ε ≤ 2.00 at δ = 1e-05 after 4 releases" in seen
    assert "There is no privacy statement" in seen
    assert "so far: the run is unfinished" in seen


def test_a_guarantee_stands_beside_what_was_measured(tmp_path: Path) -> None:
    overrides = ["problem.clients=50", "problem.dim=3", "run.rounds=20"]
    config = read(THEORY, overrides)
    summary = perform(config, "test", tmp_path / "run", quiet=True)
    content = page(find_runs([tmp_path / "run"]))
    assert "Measured against guaranteed" in content
    assert f"{summary['guarantee']['bound']:.4g}" in content
    assert f"{summary['guarantee']['measured']:.4g}" in content
    assert content.count("Not private: it looks at the clients&#x27; data") >= 4
    assert "gradient norm (not private)" in content


# harmless, whole, always the same


@pytest.mark.long
@pytest.mark.drawn
def test_what_comes_from_files_is_escaped(tmp_path: Path) -> None:
    path = made(tmp_path / HOSTILE, [0.5], method={"name": HOSTILE}, data={"source": f"</pre>{HOSTILE}"})
    for name in ("privacy.txt", "summary.json", "environment.json"):
        content = (path / name).read_text()
        for word in ("the client", "central", "Fed-alpha-NormEC", "3.12.1", "2026-01-02", "done"):
            content = content.replace(word, json.dumps(HOSTILE)[1:-1])
        (path / name).write_text(content)
    made(tmp_path / "other", [0.4], method={"name": "clip21"})
    for runs in (find_runs([path]), find_runs([tmp_path])):
        content = page(runs)
        assert "<script" not in content
        assert "<img" not in content
        assert html.escape(HOSTILE) in content


@pytest.mark.long
@pytest.mark.drawn
@pytest.mark.parametrize("name", ["_$x^2$", "数据 😀", "a\nb\x1b[31m", "x" * 200, "%s {0} \\"])
def test_any_name_can_be_drawn(tmp_path: Path, name: str) -> None:
    made(tmp_path / name, [0.5, 0.6])
    made(tmp_path / "broken", [0.5, 0.6])
    (tmp_path / "broken" / "config.toml").unlink()
    content = page(find_runs([tmp_path]))
    assert "\x1b" not in content
    write_figures(find_runs([tmp_path]), tmp_path / "figures")


@pytest.mark.drawn
def test_the_page_needs_nothing_from_elsewhere(compared: Path) -> None:
    content = page(find_runs([compared]))
    assert set(re.findall(r"https?://[^\s\"<]*", content)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
    }  # fmt: skip
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import|@font-face|\bsrc=|url\((?!#)", content)
    ids = re.findall(r'\bid="([^"]*)"', content)
    assert len(ids) == len(set(ids)) > 0
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', content)) <= set(ids)
    assert '<meta name="viewport" content="width=device-width' in content


@pytest.mark.long
@pytest.mark.drawn
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANYTHING)
def test_no_content_of_a_folder_stops_a_report(tmp_path: Path, contents: dict[str, Any]) -> None:
    where = tmp_path / str(len(list(tmp_path.iterdir())))
    spoilt(where / "run", contents)
    assert write_report(find_runs([where]), where / "report.html").read_text(encoding="utf-8").endswith("</html>\n")


def test_of_many_settings_the_first_ten_are_drawn(tmp_path: Path) -> None:
    for k in range(12):
        made(tmp_path / str(k), [0.1, 0.01 * k], method={"beta": float(k)})
    runs = find_runs([tmp_path])
    assert "The first 10 of 12 lines of the table." in page(runs)
    lines = draw_curves(grouped(runs), "test_accuracy").axes[0].lines
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == 10
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == 10  # in grey, too


@pytest.mark.parametrize("many", [1, 2, 12])
def test_axes_keep_their_size_whatever_the_legend(tmp_path: Path, many: int) -> None:
    groups = grouped(find_runs([swept(tmp_path, many)]))
    assert max(len(group.label) for group in groups) > 40 or many == 1
    figure = draw_curves(groups, "test_accuracy")
    figure.draw_without_rendering()
    taken, whole = figure.axes[0].get_window_extent(), figure.bbox
    assert (taken.width / figure.dpi, taken.height / figure.dpi) == pytest.approx(AXES, abs=0.1)
    assert len(figure.legends) == (many > 1)
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.y1 < taken.y0
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= whole.x1


@pytest.mark.long
@pytest.mark.drawn
def test_the_figures_of_a_page_share_one_legend(tmp_path: Path) -> None:
    runs = find_runs([swept(tmp_path / "runs", 12)])
    content = page(runs)
    (legend,) = re.findall(r'<ul class="legend".*?</ul>', content)
    entries = re.findall(r"<li>(<svg .*?</svg>)<span>(.*?)</span></li>", legend)
    assert [label for _, label in entries] == [html.escape(group.label) for group in ranked(grouped(runs))[:10]]
    assert len({swatch for swatch, _ in entries}) == 10
    colours = [re.findall(r'stroke="(#\w{6})"', swatch)[0].lower() for swatch, _ in entries]
    figures = re.findall(r"<figure>(.*?)</figure>", content, flags=re.S)
    assert len(figures) == 4
    for figure in figures:
        assert "some_other_setting" not in figure
        assert re.findall(r"stroke: (#\w{6}); stroke-width: 1.6", figure) == colours
    assert 'class="legend"' not in page(runs[:1])


def test_of_many_settings_the_first_twelve_are_unfolded(tmp_path: Path) -> None:
    content = page(find_runs([swept(tmp_path, 14)]))
    results = content[content.index("<h2>Results") : content.index("<h2>Over the rounds")]
    seen, rest = results.split('<details class="more"><summary>2 more settings</summary>')
    assert (seen.count('<th scope="row">'), rest.count('<th scope="row">')) == (12, 2)
    (columns,) = set(re.findall(r"<col>.*?(?=<thead>)", results))  # of the same widths
    assert columns.count("<col") == seen.count('<th scope="col">')


# the command


@pytest.mark.long
@pytest.mark.drawn
def test_the_command_writes_a_page_and_figures_once(fednormec_: Command, compared: Path, tmp_path: Path) -> None:
    said = fednormec_("report", "runs", "--figures", "paper")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0] == "report   report.html"
    names = {f"{name}{kind}" for name in ("accuracy", "loss", "epsilon") for kind in (".png", ".pdf")}
    assert {path.name for path in (tmp_path / "paper").iterdir()} == names | {"table.md", "table.csv"}
    with Image.open(tmp_path / "paper" / "accuracy.png") as drawn:
        assert drawn.width > 600
    assert (tmp_path / "paper" / "loss.pdf").read_bytes().startswith(b"%PDF")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for arguments in ((), ("--out", "new.html", "--figures", "paper"), ("--out", "paper")):
        again = fednormec_("report", "runs", *arguments)
        assert (again.code, again.out) == (2, "")
        assert sentence(again.err)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert fednormec_("report", "runs", "--figures", "paper", "--force").code == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_ends_with_its_report(fednormec_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("run", PLAIN, "--quiet", "--set", "run.rounds=1")
    said = fednormec_(*small, "--out", "first")
    assert said.out.splitlines()[-1] == f"report         {Path('first') / 'report.html'}"
    assert (tmp_path / "first" / "report.html").read_text(encoding="utf-8") == page(find_runs([tmp_path / "first"]))

    def fails(runs: object) -> str:
        raise ZeroDivisionError("no page today")

    monkeypatch.setattr(fednormec.results.report, "page", fails)
    said = fednormec_(*small, "--out", "second")
    assert (said.code, said.err) == (0, "note: the report could not be made: no page today\n")
    assert "report  " not in said.out
    assert (tmp_path / "second" / "summary.json").exists()


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    runs = find_runs([made(tmp_path / "run", [0.5])])
    with pytest.raises(UserError, match="cannot be written"):
        write_report(runs, tmp_path / "no" / "report.html")
    with pytest.raises(UserError, match="cannot be made"):
        write_figures(runs, tmp_path / "run" / "config.toml" / "figures")


def test_a_comparison_begins_with_the_best_private_run(tmp_path: Path) -> None:
    made(tmp_path / "bare", [0.9], epsilon=None)
    made(tmp_path / "low", [0.5], epsilon=1.0, privacy={"epsilon": 1.0})
    made(tmp_path / "high", [0.6], epsilon=8.0, privacy={"epsilon": 8.0})
    shown = page(find_runs([tmp_path]))
    text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", shown)).split())
    first, spent = text.index("test accuracy 60.0 % of ε=8, the best of 2 private ones"), text.index("ε ≤ 8.00")
    assert first < spent < text.index("without privacy, for reference 90.0 % of no privacy")
    assert "Accuracy against ε" in text


def test_accuracy_is_drawn_against_epsilon_where_private_runs_differ_in_it(tmp_path: Path) -> None:
    low = made(tmp_path / "low", [0.5], epsilon=1.0, privacy={"epsilon": 1.0})
    high = made(tmp_path / "high", [0.6], epsilon=8.0, privacy={"epsilon": 8.0})
    bare = made(tmp_path / "bare", [0.9], epsilon=None)
    same = made(tmp_path / "same", [0.7], epsilon=1.0, method={"beta": 0.3})
    shown = page(find_runs([low, high, bare]))
    (label,) = re.findall(r'aria-label="(Test accuracy against ε\.[^"]*)"', shown)
    assert html.unescape(label).endswith(
        "ε=8: 60.0 % at ε ≤ 8.00; ε=1: 50.0 % at ε ≤ 1.00; no privacy, without privacy: 90.0 %"
    )
    (axes,) = draw_trade_off(ranked(grouped(find_runs([low, high, bare]))), (4.6, 3.1)).axes
    points = sorted((float(one[0].get_xdata()[0]), float(one[0].get_ydata()[0])) for one in axes.containers)
    assert points == [(1.0, 0.5), (8.0, 0.6)]
    (level,) = [one for one in axes.get_lines() if one.get_linestyle() == "--"]
    assert set(level.get_ydata()) == {0.9}
    for runs in ([low, same], [low, bare], [high]):
        assert "Accuracy against ε" not in page(find_runs(runs))


def test_a_pictures_text_is_escaped_once(tmp_path: Path) -> None:
    made(tmp_path / "run", [0.5])
    labels = re.findall(r'aria-label="([^"]*)"', page(find_runs([tmp_path])))
    assert any("the clients' data" in html.unescape(label) for label in labels)
    assert not any("&amp;" in label for label in labels)


def test_on_a_phone_figures_carry_the_names_of_their_columns(tmp_path: Path) -> None:
    made(tmp_path / "a", [0.5])
    made(tmp_path / "b", [0.6], method={"beta": 0.3})
    shown = page(find_runs([tmp_path]))
    rows = re.findall(r"<tr class.*?</tr>", shown.partition("figures-table")[2].partition("</table>")[0])
    assert len(rows) == 2
    for row, accuracy in zip(rows, ("60.0 %", "50.0 %"), strict=True):
        assert f'<td data-label="test accuracy">{accuracy}</td>' in row
        assert '<td data-label="ε">2.00</td>' in row
    assert "content: attr(data-label)" in shown
