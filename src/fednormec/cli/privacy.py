"""Compute the noise for an ε, or the ε of a noise: `fednormec privacy`."""

from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.options import AsJson
from fednormec.errors import UserError, one_of, visible
from fednormec.files import to_json

HELP = """Compute the noise for an ε, or the ε of a noise. For each trust model and adjacency.

noise_std is per coordinate for a radius of 1: of the sum in central, of each message in secagg and local.
Answers need no training and no data.

With --unit record it is for single records in silos, such as the patients of hospitals, and local steps that are
dp_sgd: for each silo and adjacency. noise_std is then on the sum of a step, over tau.

\b
Examples:
  fednormec privacy --clients 500 --p 0.25 --rounds 60 --epsilon 4
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --noise-std 1.837 --trust central
  fednormec privacy --clients 20 --rounds 300 --epsilon 8 --trust secagg --colluders 5
  fednormec privacy --clients 100 --rounds 60 --epsilon 4 --trust secagg --min-survivors 70
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --epsilon 8 --runs 9       the price of tuning
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --epsilon 8 --plot eps.png
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --epsilon 8 --calibration paper
  fednormec privacy --unit record --records 500 --batch 50 --steps 5 --rounds 40 --epsilon 3
  fednormec privacy --unit record --records 500,300,120 --rate 0.1 --rounds 40 --noise-std 1.1
"""
OF_CLIENTS = (
    "clients", "p", "fixed_size", "trust", "colluders", "min_cohort", "min_survivors", "calibration", "total_norm",
)  # fmt: skip
OF_RECORDS = ("records", "batch", "rate", "steps")
NOTHING = "no finite ε holds for this: ask for a larger delta, more noise or fewer rounds."


def privacy(
    context: typer.Context,
    rounds: Annotated[int, typer.Option(help="How many rounds.")],
    unit: Annotated[str, typer.Option(help="What is protected: a client with all its data, or a record.")] = "client",
    clients: Annotated[int | None, typer.Option(help="client: M, how many there are; required.")] = None,
    p: Annotated[float | None, typer.Option(help="client: Poisson sampling, each with this probability.")] = None,
    fixed_size: Annotated[
        int | None, typer.Option(help="client: cohorts of exactly this size, instead of --p.")
    ] = None,
    records: Annotated[
        str | None, typer.Option(help="record: how many each silo has, with commas; required.", metavar="N,N,...")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="record: how many a batch is expected to have, instead of --rate.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="record: probability with which one is in a batch.", show_default="0.1")
    ] = None,
    steps: Annotated[int, typer.Option(help="record: local steps in a round, each of which is a release.")] = 1,
    delta: Annotated[float, typer.Option(help="The δ of the guarantee.")] = 1e-5,
    epsilon: Annotated[float | None, typer.Option(help="The target ε; the noise is computed.")] = None,
    noise_std: Annotated[float | None, typer.Option(help="The noise; its ε is computed.")] = None,
    trust: Annotated[
        list[str] | None, typer.Option(help="client: central, secagg or local.", show_default="all")
    ] = None,
    adjacency: Annotated[list[str] | None, typer.Option(help="zero_out or replace_one.", show_default="both")] = None,
    colluders: Annotated[int, typer.Option(help="secagg: clients who tell the server their noise.")] = 0,
    min_cohort: Annotated[int, typer.Option(help="secagg: rounds with fewer senders are called off.")] = 1,
    min_survivors: Annotated[
        int | None,
        typer.Option(help="secagg that really runs: messages in a sum, at least.", show_default="it is simulated"),
    ] = None,
    calibration: Annotated[str, typer.Option(help="client: exact, or paper: σ = p √(rounds log 1/δ)/ε.")] = "exact",
    total_norm: Annotated[
        int | None, typer.Option(metavar="DIM", help="client: NOT PRIVATE, σ/√DIM per coordinate.")
    ] = None,
    runs: Annotated[int, typer.Option(help="Also the price of so many runs on the same data.")] = 1,
    plot: Annotated[str | None, typer.Option(help="Draw ε against rounds into this .png, .pdf or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    one_of("unit", unit, ("client", "record"))
    _require_own_options(context, unit)
    if unit == "record":
        _of_records(
            _sizes(records), rounds, steps, batch, rate, delta, epsilon, noise_std, tuple(adjacency or ()), runs, plot,
            as_json,
        )  # fmt: skip
        return
    from fednormec.privacy.calculator import Question, rows, text, tolerances

    if clients is None:
        raise UserError("--clients is missing: say how many there are, or ask for --unit record.")
    question = Question(
        clients, rounds, delta, p, fixed_size, epsilon, noise_std, tuple(trust or ()), tuple(adjacency or ()),
        colluders, min_cohort, min_survivors, calibration, total_norm, runs,
    )  # fmt: skip
    answers = list(rows(question))
    if not any(row.accountant == "pld" for row in answers):
        raise UserError(NOTHING)
    if plot is not None:
        from fednormec.privacy.plots import epsilon_against_rounds

        epsilon_against_rounds(
            [row for row in answers if row.accountant == "pld"], rounds, Path(plot), total_norm is None
        )
    if as_json:
        drop_outs = [{"drop_outs": [one._asdict() for one in tolerances(question, row)]} for row in answers]
        facts = [row.facts(private=total_norm is None) for row in answers]
        print(to_json([one | (more if more["drop_outs"] else {}) for one, more in zip(facts, drop_outs, strict=True)]))
    else:
        _print(text(question, answers), plot)


def _of_records(
    sizes: tuple[int, ...], rounds: int, steps: int, batch: int | None, rate: float | None, delta: float,
    epsilon: float | None, noise_std: float | None, adjacencies: tuple[str, ...], runs: int, plot: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Answer for the records of silos."""
    from fednormec.privacy.record_calculator import RecordQuestion, record_rows, record_text

    question = RecordQuestion(
        sizes, rounds, steps, batch, rate, delta, epsilon, noise_std, adjacencies, runs
    )  # fmt: skip
    answers = list(record_rows(question))
    tight = [row for row in answers if row.accountant == "pld"]
    if len({row.silo.number for row in tight}) < len(sizes):
        raise UserError(NOTHING)
    if plot is not None:
        from fednormec.privacy.plots import record_epsilon_against_rounds

        record_epsilon_against_rounds(tight, rounds, Path(plot))
    if as_json:
        print(to_json([row.facts(rounds, runs) for row in answers]))
    else:
        _print(record_text(question, answers), plot)


def _print(text: str, plot: str | None) -> None:
    """Print an answer for a person, and where its picture is."""
    print(text)
    if plot is not None:
        print(visible(f"ε against rounds is drawn in {plot}"))


def _require_own_options(context: typer.Context, unit: str) -> None:
    """Raises UserError if an option of the other unit is given."""
    own, others = ("record", OF_CLIENTS) if unit == "record" else ("client", OF_RECORDS)
    for name in others:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            other = "client" if own == "record" else "record"
            raise UserError(f"--{name.replace('_', '-')} is for --unit {other}, and here the unit is a {own}: leave it "
                            "out.")  # fmt: skip


def _sizes(text: str | None) -> tuple[int, ...]:
    """Return the number of records of each silo; raises UserError if the text does not say it."""
    if text is None:
        raise UserError("--records is missing: say how many records each silo has, with commas, such as 500,300,120.")
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise UserError(f"--records takes whole numbers with commas, such as 500,300,120, not '{text}'.") from None
