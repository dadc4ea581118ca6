"""Plan the settings that guarantee most: `fednormec theory`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fednormec.cli.options import AsJson, NotPrivate, Overrides, read_config
from fednormec.cli.printing import tell
from fednormec.errors import UserError, visible, visible_lines

if TYPE_CHECKING:
    from fednormec.config.schema import Config

HELP = """Plan the settings that guarantee most, before training. It says what these and your own guarantee.

The plan (α, β, the steps, warm-up, rounds) makes the corrected bound on min E‖∇f‖ least, within run.rounds. Quadratic
and logistic problems know their constants; for any other give them as [constants]. Without CONFIG: a built-in quadratic
problem with a thousand clients and ε = 8.

\b
Examples:
  fednormec theory
  fednormec theory --set problem.clients=20                        too few clients: vacuous, and it says so
  fednormec theory --not-private --set local.steps=5
  fednormec theory --set privacy.epsilon=2 --plot bound.png
  fednormec theory my.toml --write planned.toml                    the config with the plan's settings
  fednormec theory --set constants.smoothness=2 --set constants.gap=3 --set constants.gradient_norm=1 \\
      --set constants.client_norm=2 --set constants.clients=5000 --set constants.dim=100      no problem needed
  fednormec run --plan                                             the same plan, carried out
"""


def theory(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="A TOML file; default: see above.")] = None,
    overrides: Overrides = None,
    not_private: NotPrivate = False,
    plot: Annotated[
        str | None, typer.Option(help="Draw the bound against rounds and against ε into this .png, .pdf or .svg.")
    ] = None,
    write: Annotated[str | None, typer.Option(help="Write the config with the plan's settings into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    from fednormec.config.settings import THEORY
    from fednormec.files import to_json
    from fednormec.runs.progress import counted
    from fednormec.theory.answer import answer, with_plan

    asked = read_config(config, overrides, not_private, THEORY)
    with counted("planning", as_json):
        found = answer(asked.config)
        if plot is not None:
            from fednormec.drawing import require_drawable
            from fednormec.theory.plots import bound_against_rounds_and_epsilon
            from fednormec.theory.trade_off import trade_off

            require_drawable(Path(plot))  # the curves take seconds
            bound_against_rounds_and_epsilon(trade_off(found), Path(plot))
    if write is not None:
        _write_config(Path(write), with_plan(asked.config, found))
    tell(asked.dropped)
    if as_json:
        print(to_json(found.facts()))
        return
    print(visible_lines(found.text()))
    if write is not None:
        print(visible(f"the config with this plan is in {write}; run it with: fednormec run {write}"))
    if plot is not None:
        print(visible(f"the bound against rounds and against ε is drawn in {plot}"))


def _write_config(path: Path, config: "Config") -> None:
    """Write a config into a new file; raises UserError if it exists or cannot be written."""
    from fednormec.config.schema import dump

    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(dump(config))
    except FileExistsError:
        raise UserError(f"{path} exists already: nothing was changed; choose another name.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
