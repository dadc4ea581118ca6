"""The command line: parse, call, print. Heavy imports wait inside the commands, so that --help answers at once."""

import inspect
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fednormec import __version__
from fednormec.errors import UserError

if TYPE_CHECKING:
    from fednormec.config import Config

app = typer.Typer(
    help="Differentially private federated learning: Fed-α-NormEC and its family.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RUN_HELP = """Train a model across clients. Without CONFIG: the built-in quickstart on real data.

\b
Examples:
  fednormec run
  fednormec run my.toml --out runs/first
  fednormec run --set run.rounds=50 --set method.beta=0.05
  fednormec run --set data.source=mydata.npz --set data.clients=50
  fednormec run --set method.name=clip21 --set method.tau=0.5
  fednormec run --set privacy.epsilon=1                     calibrated to another budget
  fednormec run --set privacy.noise_std=2                   your own noise; its true ε is reported
  fednormec run --not-private --set method.name=fed_avg     no noise, nothing protected
  fednormec run --plan                                      settings by theory, measured against the guarantee
  fednormec run my.toml --json > result.json
"""
PRIVACY_HELP = """The noise for an ε, or the ε of a noise, for each trust model and adjacency.

noise_std is per coordinate for a radius of 1: of the sum in central, of each message in secagg and local.
Answers need no training and no data.

\b
Examples:
  fednormec privacy --clients 500 --p 0.25 --rounds 60 --epsilon 4
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --noise-std 1.837 --trust central
  fednormec privacy --clients 20 --rounds 300 --epsilon 8 --trust secagg --colluders 5
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --epsilon 8 --runs 9       the price of tuning
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --epsilon 8 --plot eps.png
  fednormec privacy --clients 20 --p 0.25 --rounds 300 --epsilon 8 --calibration paper
"""
THEORY_HELP = """What is guaranteed before training, and the settings that guarantee most.

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
AUDIT_HELP = """Attack a run's own privacy mechanism with canaries and compare with what it claims.

Without CONFIG: the quickstart. The mechanism audit sends known messages through the real sampling, noise and
summing code; --training trains the whole config once with canaries among the clients. An audit can refute a claim,
it can never prove one. Exit code 1 if the claim is violated.

\b
Examples:
  fednormec audit
  fednormec audit my.toml --training
  fednormec audit --set privacy.trust=secagg --json
"""
CONFIG_HELP = """Check a config and print it with every default spelled out, without running it.

\b
Examples:
  fednormec config > my.toml          the quickstart, as a start for your own
  fednormec config my.toml --set method.name=dp_scaffold
"""

ConfigPath = Annotated[str | None, typer.Argument(metavar="CONFIG", help="A TOML file; default: the quickstart.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting.")]
NotPrivate = Annotated[bool, typer.Option("--not-private", help="Drop [privacy]: no noise, nothing is protected.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for scripts.")]


def main() -> None:
    """The program: a user's mistake is one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without ε still gets its result
    try:
        app()
    except UserError as error:
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))
        print(f"fednormec: {line}", file=sys.stderr)
        sys.exit(2)


def _version(asked: bool) -> None:
    if asked:
        print(f"fednormec {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass


@app.command(help=RUN_HELP)
def run(
    config: ConfigPath = None,
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option(help="A new folder for the run.", show_default="runs/NAME-N")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print exactly one JSON object on stdout at the end.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    not_private: NotPrivate = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Take the settings that `fednormec theory` recommends; without CONFIG its problem."
        ),
    ] = False,
) -> None:
    from fednormec.config import QUICKSTART, THEORY
    from fednormec.runner import describe, perform
    from fednormec.runs import to_json

    name, asked = _read(config, overrides, not_private, THEORY if plan else QUICKSTART)
    summary = perform(asked, name, None if out is None else Path(out), quiet, plan)
    print(to_json(summary) if as_json else describe(summary))
    if summary["status"] == "diverged":
        raise UserError(f"{summary['message']}. The rounds before it are kept in {summary['out']}.")


@app.command(help=CONFIG_HELP)
def config(config: ConfigPath = None, overrides: Overrides = None, not_private: NotPrivate = False) -> None:
    from fednormec.config import dump
    from fednormec.experiment import assemble

    print(dump(assemble(_read(config, overrides, not_private)[1]).config), end="")


@app.command(help=PRIVACY_HELP)
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
    calibration: Annotated[str, typer.Option(help="exact, or paper: σ = p √(rounds log 1/δ)/ε.")] = "exact",
    total_norm: Annotated[int | None, typer.Option(metavar="DIM", help="NOT PRIVATE: σ/√DIM per coordinate.")] = None,
    runs: Annotated[int, typer.Option(help="Also the price of so many runs on the same clients.")] = 1,
    plot: Annotated[str | None, typer.Option(help="Draw ε against rounds into this .png, .pdf or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    from fednormec.privacy.table import Question, rows, text

    question = Question(
        clients, rounds, delta, p, fixed_size, epsilon, noise_std, tuple(trust or ()), tuple(adjacency or ()),
        colluders, min_cohort, calibration, total_norm, runs,
    )  # fmt: skip
    answers = list(rows(question))
    if not any(row.accountant == "pld" for row in answers):
        raise UserError("no finite ε holds for this: ask for a larger delta, more noise or fewer rounds.")
    if plot is not None:
        from fednormec.plots import epsilon_against_rounds

        epsilon_against_rounds(
            [row for row in answers if row.accountant == "pld"], rounds, Path(plot), total_norm is None
        )
    if as_json:
        print(json.dumps([row.facts(private=total_norm is None) for row in answers]))
    else:
        print(text(question, answers))
        if plot is not None:
            print(f"ε against rounds is drawn in {plot}")


@app.command(help=THEORY_HELP)
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
    from fednormec.config import THEORY
    from fednormec.progress import counted
    from fednormec.runs import to_json
    from fednormec.theory.answer import answer, with_plan

    _, asked = _read(config, overrides, not_private, THEORY)
    with counted("planning", as_json):
        found = answer(asked)
        if plot is not None:
            from fednormec.plots import bound_against_rounds_and_epsilon

            bound_against_rounds_and_epsilon(found, Path(plot))
    if write is not None:
        _write_config(Path(write), with_plan(asked, found))
    if as_json:
        print(to_json(found.facts()))
        return
    print(found.text())
    if write is not None:
        print(f"the config with this plan is in {write}; run it with: fednormec run {write}")
    if plot is not None:
        print(f"the bound against rounds and against ε is drawn in {plot}")


@app.command(help=AUDIT_HELP)
def audit(
    config: ConfigPath = None,
    overrides: Overrides = None,
    training: Annotated[
        bool, typer.Option("--training", help="One whole training with canaries among clients.")
    ] = False,
    canaries: Annotated[int | None, typer.Option(help="How many canaries.", show_default="by trust model")] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    from fednormec.runner import audited
    from fednormec.runs import to_json

    found = audited(_read(config, overrides, False)[1], training, canaries, quiet)
    print(to_json(found.facts()) if as_json else found.text())
    if found.verdict == "violated":
        raise typer.Exit(1)


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the methods with their papers and settings."""
    from fednormec.algorithms.named import METHODS

    rows = {
        name: {
            "paper": method.paper,
            "can_be_private": method.can_be_private,
            "takes_local": method.takes_local,
            "settings": _settings(method.build, skip=1 if method.takes_local else 0),
            "about": _first_line(method.build),
        }
        for name, method in METHODS.items()
    }
    _print_rows(rows, as_json)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the built-in models with their settings and sizes."""
    from fednormec.models import MODELS

    rows = {
        name: {
            "parameters on 3x32x32, 10 classes": sum(p.numel() for p in build((3, 32, 32), 10).parameters()),
            "settings": _settings(build, skip=2),
            "about": _first_line(build),
        }
        for name, build in MODELS.items()
    }
    _print_rows(rows, as_json)


def _read(
    path: str | None, overrides: list[str] | None, not_private: bool, default: Path | None = None
) -> tuple[str, "Config"]:
    """The name and the sections of a config file, or of the built-in one (the quickstart)."""
    from fednormec.config import QUICKSTART, read

    source = default or QUICKSTART if path is None else Path(path)
    sections = read(source, overrides or [])
    if not_private:
        sections.pop("privacy", None)
    return source.stem, sections


def _write_config(path: Path, config: "Config") -> None:
    """A new file: nothing is written over."""
    from fednormec.config import dump

    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(dump(config))
    except FileExistsError:
        raise UserError(f"{path} exists already: nothing was changed; choose another name.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error


def _settings(build: Callable[..., Any], skip: int) -> dict[str, Any]:
    return {name: p.default for name, p in list(inspect.signature(build).parameters.items())[skip:]}


def _first_line(build: Callable[..., Any]) -> str:
    return (build.__doc__ or "").splitlines()[0]


def _print_rows(rows: dict[str, dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name}\n    {row['about']}")
        for key, value in row.items():
            if key != "about":
                print(f"    {key.replace('_', ' ')}: {_words(value)}")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
