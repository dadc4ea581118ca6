"""`fednormec privacy --unit record`: what a run would be planned with, as a table, as data and as a picture."""

import json
import math
import re
from pathlib import Path

import pytest
from command import Command, sentence, sets
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from paths import ROOT
from strict_json import strictly

import fednormec as fn
from fednormec.privacy.accounting import Hidden, epsilon

pytestmark = pytest.mark.usefixtures("undrawn")

ASKED = ("privacy", "--unit", "record", "--rounds", 40, "--steps", 5)
Row = dict[str, float | int | str]


def answers(fednormec_: Command, *options: object) -> dict[tuple[int, str, str], Row]:
    """The rows by silo, adjacency and accountant."""
    found = fednormec_(*ASKED, *options, "--json")
    assert (found.code, found.err) == (0, "")
    rows = strictly(found.out)
    return {(row["silo"], row["adjacency"], row["accountant"]): row for row in rows}


# the answers


@pytest.mark.long
def test_the_noise_for_an_epsilon_is_told(fednormec_: Command) -> None:
    rows = answers(fednormec_, "--records", 500, "--batch", 50, "--epsilon", 3)
    assert list(rows) == [(0, "zero_out", "pld"), (0, "zero_out", "rdp"), (0, "replace_one", "pld")]
    for (_, adjacency, accountant), row in rows.items():
        assert (row["unit"], row["records"], row["rate"], row["releases"]) == ("record", 500, 0.1, 200)
        assert 2.999 < row["epsilon"] <= 3.0 and row["delta"] == 1e-5 and "warning" not in row
        asked = fn.Mechanism(500, fn.poisson(0.1), 1.0, adjacency=adjacency)
        assert row["noise_std"] == asked.calibrate(3.0, 1e-5, 200, accountant).noise_std
    tight, loose, replaced = (row["noise_std"] for row in rows.values())
    assert tight < loose < replaced


@pytest.mark.long
def test_each_silo_has_an_answer_of_its_own(fednormec_: Command) -> None:
    rows = answers(fednormec_, "--records", "500,300,120,300", "--batch", 50, "--noise-std", 1.1)
    assert [key[0] for key in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for (silo, adjacency, accountant), row in rows.items():
        size = (500, 300, 120, 300)[silo]
        mirrored = adjacency == "replace_one"
        assert (row["records"], row["rate"], row["noise_std"]) == (size, 50 / size, 1.1)
        assert row["epsilon"] == epsilon(Hidden(50 / size, 1 / 1.1, mirrored), 200, 1e-5, accountant)
    by_rate = answers(fednormec_, "--records", "500,300", "--rate", 0.1, "--noise-std", 1.1, "--adjacency", "zero_out")
    assert {row["epsilon"] for (_, _, accountant), row in by_rate.items() if accountant == "pld"} == {
        rows[0, "zero_out", "pld"]["epsilon"]
    }


def test_the_rate_is_that_of_a_run_where_nobody_says(fednormec_: Command) -> None:
    told = [answers(fednormec_, "--records", "50,12", "--noise-std", 2, *more) for more in ((), ("--rate", 0.1))]
    rule = fn.dp_sgd(1.0).per_record
    assert rule is not None and rule.rate_of(50) == 0.1
    assert told[0] == told[1]


def test_with_all_records_in_every_batch_nothing_is_amplified(fednormec_: Command) -> None:
    rows = answers(fednormec_, "--records", 40, "--rate", 1, "--noise-std", 30)
    for adjacency, shift in (("zero_out", 1), ("replace_one", 2)):
        expected = get_epsilon_gaussian(30 / shift / math.sqrt(200), 1e-5)
        assert rows[0, adjacency, "pld"]["epsilon"] == pytest.approx(expected, rel=1e-6)
        assert rows[0, adjacency, "rdp"]["epsilon"] > expected


@pytest.mark.long
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("asked", [("--epsilon", "3"), ("--noise-std", "1.3")])
def test_it_is_what_a_run_is_planned_with(
    fednormec_: Command, tmp_path: Path, asked: tuple[str, str], adjacency: str
) -> None:
    """Bit by bit: noise and ε of each silo of a run, whose sizes are unlike."""
    name, value = asked
    run = fednormec_(
        "run", "--quiet", "--out", "out", *sets(
            "data.clients=5", "data.partition=dirichlet", "model.name=linear", "method.name=fed_avg",
            "local.name=dp_sgd", "local.step=0.5", "local.steps=5", "local.batch_size=20", "run.rounds=4",
            "privacy.unit=record", f"privacy.adjacency={adjacency}", "run.evaluate_every=4",
        ), *(sets("privacy.epsilon=3") if name == "--epsilon" else sets("privacy.noise_std=1.3", "privacy.epsilon=90")),
    )  # fmt: skip
    assert run.code == 0
    silos = strictly((tmp_path / "out" / "privacy.json").read_text())["silos"]
    sizes = [silo["records"] for silo in silos]
    assert len(set(sizes)) > 1
    told = fednormec_(
        "privacy", "--unit", "record", "--records", ",".join(map(str, sizes)), "--batch", 20, "--steps", 5, "--rounds",
        4, "--adjacency", adjacency, name, value, "--json",
    )  # fmt: skip
    rows = [row for row in strictly(told.out) if row["accountant"] == "pld"]
    same = ("records", "rate", "noise_std", "epsilon", "releases")
    assert [[row[key] for key in same] for row in rows] == [[silo[key] for key in same] for silo in silos]


@pytest.mark.long
def test_several_runs_are_priced(fednormec_: Command) -> None:
    rows = answers(fednormec_, "--records", "500,120", "--batch", 50, "--noise-std", 2, "--runs", 9)
    for (_, adjacency, accountant), row in rows.items():
        release = Hidden(50 / row["records"], 0.5, adjacency == "replace_one")
        assert row["epsilon_of_all_runs"] == epsilon(release, 9 * 200, 1e-5, accountant) > row["epsilon"]
    text = fednormec_(*ASKED, "--records", "500,120,120", "--batch", 50, "--noise-std", 2, "--runs", 9).out
    assert len(re.findall(r"^silo 0, \w+: 9 runs on them, all seen: ε ≤ \d", text, re.M)) == 2
    assert len(re.findall(r"^silos of 120 records, \w+: 9 runs on them, all seen: ε ≤ \d", text, re.M)) == 2


# for a person


@pytest.mark.long
def test_the_table_fits_a_terminal(fednormec_: Command) -> None:
    options = ("--batch", 50, "--noise-std", 1.1, "--runs", 3, "--delta", 0.003)
    said = fednormec_(*ASKED, "--records", "500,300,120,500,500,500", *options)
    assert (said.code, said.err) == (0, "")
    title, head, *rows = said.out.splitlines()
    assert title == "6 silos, 40 rounds of 5 steps, δ = 0.003, for each record"
    assert head.split() == ["silo", "records", "rate", "adjacency", "by", "noise_std", "ε", "at", "most", "after", "¼,",
                            "½,", "¾"]  # fmt: skip
    assert max(map(len, said.out.splitlines())) <= 80
    assert rows[0].startswith("4 of them     500    0.1  zero_out    pld       1.1 ")
    assert rows[8].startswith("2             120 0.4167  replace_one pld       1.1 ")
    assert "warning: δ = 0.003 is at least 1/N for N = 500 records: one may be given away" in rows
    assert not any("N = 300 " in row or "N = 120 " in row for row in rows)


def test_after_a_part_of_the_rounds_a_part_is_spent(fednormec_: Command) -> None:
    out = fednormec_("privacy", "--unit", "record", "--records", 100, "--rate", 0.2, "--rounds", 10, "--noise-std", 2,
                     "--adjacency", "zero_out").out  # fmt: skip
    row = next(line for line in out.splitlines() if " pld " in line)
    parts = [epsilon(Hidden(0.2, 0.5), k, 1e-5) for k in (10, 3, 5, 8)]
    shown = [float(number) for number in re.findall(r"\d\.\d\d+", row.split(" pld ")[1])]
    assert shown == pytest.approx(parts, abs=0.01) and all(a >= b for a, b in zip(shown, parts, strict=True))
    assert "1 silo, 10 rounds of 1 step, δ" in out


def test_a_delta_that_is_too_large_is_a_warning_and_no_error(fednormec_: Command) -> None:
    options = ("--records", "99,100", "--rate", 0.1, "--noise-std", 1, "--delta", 0.01)
    warned = {key[0] for key, row in answers(fednormec_, *options).items() if "warning" in row}
    assert warned == {1}
    assert fednormec_(*ASKED, *options).out.count("warning: ") == 1


@pytest.mark.long
@pytest.mark.drawn
def test_epsilon_is_drawn_against_rounds(fednormec_: Command, tmp_path: Path) -> None:
    said = fednormec_(*ASKED, "--records", "500,120", "--batch", 50, "--noise-std", 2, "--plot", "eps.png")
    assert said.code == 0 and said.out.endswith("ε against rounds is drawn in eps.png\n")
    assert (tmp_path / "eps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_there_is_a_curve_for_each_size_and_adjacency(fednormec_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    curves, plot = dict[str, tuple[list[int], list[float]]](), Axes.plot

    def plotted(self: Axes, x: list[int], y: list[float], *form: object, **more: object) -> object:
        curves[str(more["label"])] = (list(x), list(y))
        return plot(self, x, y, *form, **more)

    monkeypatch.setattr(Axes, "plot", plotted)
    words = ("privacy", "--unit", "record", "--rounds", 6, "--steps", 5, "--noise-std", 2, "--plot", "eps.png")
    assert fednormec_(*words, "--records", "500,120,500", "--batch", 50).code == 0
    assert list(curves) == [f"{n} records, {a}, σ = 2" for n in (120, 500) for a in ("zero_out", "replace_one")]
    for label, (rounds, spent) in curves.items():
        release = Hidden(50 / int(label.split()[0]), 0.5, "replace_one" in label)
        assert rounds == list(range(1, 7))
        assert spent == [epsilon(release, 5 * k, 1e-5) for k in rounds]
    curves.clear()
    assert fednormec_(*words, "--records", "500,120", "--rate", 0.1).code == 0
    assert list(curves) == ["rate 0.1, zero_out, σ = 2", "rate 0.1, replace_one, σ = 2"]
    curves.clear()
    sizes = range(60, 160, 10)
    assert fednormec_(*words, "--records", ",".join(map(str, sizes)), "--batch", 50).code == 0
    assert [label.split()[0] for label in curves][::2] == ["60", "80", "90", "100", "120", "140", "150"]


@pytest.mark.long
def test_the_help_has_examples(fednormec_: Command) -> None:
    said = fednormec_("privacy", "--help").out
    for example in re.findall(r"fednormec (privacy --unit record .*)", said):
        assert fednormec_(*example.split()).code == 0
    assert said.count("fednormec privacy --unit record ") == 2


# bad questions


GOOD = {"--records": "500,300", "--batch": "50", "--epsilon": "3"}


@pytest.mark.parametrize(("change", "message"), [
    ({"--records": "500,49"}, "silo 1 has 49 records, fewer than a batch of 50: ask for smaller batches"),
    ({"--records": "500,0"}, "a silo must have between 1 and 1,000,000,000 records, and silo 1 has 0."),
    ({"--records": "-5"}, "and silo 0 has -5."),
    ({"--records": "9" * 12}, "and silo 0 has 999,999,999,999."),
    ({"--records": "500,many"}, "--records takes whole numbers with commas, such as 500,300,120, not '500,many'."),
    ({"--records": ""}, "--records takes whole numbers with commas, such as 500,300,120, not ''."),
    ({"--records": "500,"}, "not '500,'."),
    ({"--records": None}, "--records is missing: say how many records each silo has, with commas"),
    ({"--rate": "0.1"}, "give either batch (how many records a batch is expected to have) or rate (the share of a"),
    ({"--batch": "0"}, "batch must be at least 1, not 0."),
    *(({"--batch": None, "--rate": bad}, f"rate must lie in (0, 1], not {float(bad)}.")
      for bad in ("0", "-0.1", "1.5", "nan", "inf")),
    ({"--epsilon": None}, "give either epsilon (to get the noise) or noise_std (to get the ε)."),
    ({"--noise-std": "1"}, "give either epsilon (to get the noise) or noise_std (to get the ε)."),
    ({"--epsilon": "0"}, "epsilon must be a positive number, not 0.0."),
    ({"--epsilon": "nan"}, "epsilon must be a positive number, not nan."),
    ({"--epsilon": None, "--noise-std": "-1"}, "noise_std must be a positive number, not -1.0."),
    ({"--epsilon": None, "--noise-std": "1e-20"}, "noise_std must lie between 1e-12 and 1e12, not 1e-20."),
    ({"--steps": "0"}, "steps must be at least 1, not 0."),
    ({"--rounds": "0"}, "rounds must be at least 1, not 0."),
    ({"--runs": "0"}, "runs must be at least 1, not 0."),
    ({"--runs": "999999999"}, "accounting goes up to 1,000,000,000 steps, those of all rounds and runs together"),
    ({"--delta": "0"}, "delta must lie strictly between 0 and 1, not 0.0."),
    ({"--delta": "1"}, "delta must lie strictly between 0 and 1, not 1.0."),
    ({"--adjacency": "add"}, "adjacency must be 'zero_out' or 'replace_one', not 'add'."),
    ({"--unit": "patient"}, "unit must be 'client' or 'record', not 'patient'."),
    ({"--plot": "eps.txt"}, "a figure is written as .png, .pdf or .svg, not as 'eps.txt'."),
    ({"--plot": "nowhere/eps.png"}, "cannot be written"),
    *(({option: value}, f"{option} is for --unit client, and here the unit is a record: leave it out.")
      for option, value in (("--trust", "central"), ("--clients", "5"), ("--p", "0.5"), ("--fixed-size", "5"),
                            ("--colluders", "0"), ("--min-cohort", "1"), ("--min-survivors", "2"),
                            ("--calibration", "exact"), ("--total-norm", "10"))),
])  # fmt: skip
def test_bad_questions_get_a_sentence(fednormec_: Command, change: dict[str, str | None], message: str) -> None:
    asked = {"--unit": "record", "--rounds": "4", "--steps": "1"} | GOOD | change
    words = [word for option, value in asked.items() if value is not None for word in (option, value)]
    found = fednormec_("privacy", *words)
    assert (found.code, found.out) == (2, "")
    assert message in sentence(found.err)


@pytest.mark.parametrize(("options", "message"), [
    ("--epsilon 3", "--clients is missing: say how many there are, or ask for --unit record."),
    *((f"--clients 9 --epsilon 3 {option}", f"{option.split()[0]} is for --unit record, and here the unit is a client")
      for option in ("--records 5", "--batch 5", "--rate 0.1", "--steps 1")),
])  # fmt: skip
def test_clients_have_options_of_their_own(fednormec_: Command, options: str, message: str) -> None:
    found = fednormec_("privacy", "--rounds", 4, *options.split())
    assert (found.code, found.out) == (2, "")
    assert message in sentence(found.err)


def test_without_a_unit_it_is_about_clients(fednormec_: Command) -> None:
    words = ("privacy", "--clients", 20, "--p", 0.25, "--rounds", 30, "--noise-std", 2, "--trust", "central", "--json")
    assert fednormec_(*words) == fednormec_(*words, "--unit", "client")
    assert json.loads(fednormec_(*words).out)[0]["trust"] == "central"


@pytest.mark.long
def test_the_figures_of_the_docs_are_what_it_says(fednormec_: Command) -> None:
    sections = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8").split("\n## ")
    (text,) = (section for section in sections if section.startswith("Privacy for records\n"))
    command, shown = re.findall(r"\$ fednormec (privacy .*)\n((?:.+\n)+)```", text)[0]
    assert fednormec_(*command.split()).out.startswith(shown) and shown.count("\n") == 8
    table = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    assert len(table) == 6
    for batch, steps, std, left in table:
        words = ("--records", 500, "--batch", batch, "--steps", steps, "--epsilon", 3, "--adjacency", "zero_out")
        row = strictly(fednormec_("privacy", "--unit", "record", "--rounds", 40, *words, "--json").out)[0]
        assert f"{row['noise_std']:.5g}".lstrip("0") == std
        assert f"{row['noise_std'] / int(batch):.4f}".lstrip("0") == left
