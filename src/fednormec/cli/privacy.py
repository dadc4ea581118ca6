"""Compute the noise for an ε, or the ε of a noise: `fednormec privacy`."""

from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.options import AsJson
from fednormec.errors import UserError, visible

HELP = """Compute the noise for an ε, or the ε of a noise. For each trust model and adjacency.

noise_std is per coordinate for a radius of 1: of the sum in central, of each message in secagg and local.
Answers need no training and no data.

\b
Examples:
  fednormec privacy --clients 500 --p 0.25 --rounds 60 --epsilon 4
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --noise-std 1.837 --trust central
  fednormec privacy --clients 20 --rounds 300 --epsilon 8 --trust secagg --colluders 5
  fednormec privacy --clients 100 --rounds 60 --epsilon 4 --trust secagg --min-survivors 70
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --epsilon 8 --runs 9       the price of tuning
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --epsilon 8 --plot eps.png
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --epsilon 8 --calibration paper
"""


def privacy(
    clients: Annotated[int, typer.Option(help="M, how many clients there are.")],
    rounds: Annotated[int, typer.Option(help="How many releases.")],
    p: Annotated[float | None, typer.Option(help="Poisson sampling, each client with this probability.")] = None,
    fixed_size: Annotated[int | None, typer.Option(help="Cohorts of exactly this size, instead of --p.")] = None,
    delta: Annotated[float, typer.Option(help="The δ of the guarantee.")] = 1e-5,
    epsilon: Annotated[float | None, typer.Option(help="The target ε; the noise is computed.")] = None,
    noise_std: Annotated[float | None, typer.Option(help="The noise; its ε is computed.")] = None,
    trust: Annotated[list[str] | None, typer.Option(help="central, secagg or local.", show_default="all")] = None,
    adjacency: Annotated[list[str] | None, typer.Option(help="zero_out or replace_one.", show_default="both")] = None,
    colluders: Annotated[int, typer.Option(help="secagg: clients who tell the server their noise.")] = 0,
    min_cohort: Annotated[int, typer.Option(help="secagg: rounds with fewer senders are called off.")] = 1,
    min_survivors: Annotated[
        int | None,
        typer.Option(help="secagg that really runs: messages in a sum, at least.", show_default="it is simulated"),
    ] = None,
    calibration: Annotated[str, typer.Option(help="exact, or paper: σ = p √(rounds log 1/δ)/ε.")] = "exact",
    total_norm: Annotated[int | None, typer.Option(metavar="DIM", help="NOT PRIVATE: σ/√DIM per coordinate.")] = None,
    runs: Annotated[int, typer.Option(help="Also the price of so many runs on the same clients.")] = 1,
    plot: Annotated[str | None, typer.Option(help="Draw ε against rounds into this .png, .pdf or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    from fednormec.files import to_json
    from fednormec.privacy.calculator import Question, rows, text, tolerances

    question = Question(
        clients, rounds, delta, p, fixed_size, epsilon, noise_std, tuple(trust or ()), tuple(adjacency or ()),
        colluders, min_cohort, min_survivors, calibration, total_norm, runs,
    )  # fmt: skip
    answers = list(rows(question))
    if not any(row.accountant == "pld" for row in answers):
        raise UserError("no finite ε holds for this: ask for a larger delta, more noise or fewer rounds.")
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
        print(text(question, answers))
        if plot is not None:
            print(visible(f"ε against rounds is drawn in {plot}"))
