"""Train a model across clients: `fednormec run`."""

from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.options import ConfigPath, NotPrivate, Overrides, Quiet, read_config
from fednormec.cli.printing import print_end
from fednormec.errors import UserError, known

ENGINES = ("threads", "ray")
HELP = """Train a model across clients. Without CONFIG: the built-in quickstart on real data.

Where --set chooses another method, model, partition or source, it keeps the settings that this one takes too, and notes
which it drops. `fednormec settings` lists what there is.

\b
Examples:
  fednormec run
  fednormec run my.toml --out runs/first
  fednormec run --set run.rounds=50 --set method.beta=0.05
  fednormec run --set data.source=mydata.npz --set data.clients=50
  fednormec run --set data.source=mine.csv --set data.label=outcome --set data.client=hospital
  fednormec run --set method.name=dp_fed_avg_clip --set method.tau=0.5
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


def run(
    config: ConfigPath = None,
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option(help="A new folder for the run.", show_default="runs/NAME-N")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print exactly one JSON object on stdout at the end.")
    ] = False,
    quiet: Quiet = False,
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
    from fednormec.config.settings import THEORY
    from fednormec.engine.ray_cluster import Ray
    from fednormec.results.report import with_report
    from fednormec.runs.interrupts import STOPPING, asked_to_stop
    from fednormec.runs.runner import Site, go_on, perform

    known("engine", engine, ENGINES)
    if address is not None and engine != "ray":
        raise UserError("--address is that of a Ray cluster: add --engine ray, or leave it out.")
    site = Site(on=Ray(address) if engine == "ray" else None)
    with asked_to_stop(STOPPING) as stop:
        if resume is not None:
            if config is not None or overrides or out is not None or not_private or plan:
                raise UserError("--resume takes the settings from the run folder: leave CONFIG, --set, --out, "
                                "--not-private and --plan out.")  # fmt: skip
            done = go_on(Path(resume), quiet, (), tensorboard, profile, stop, site, workers)
        else:
            asked = read_config(config, overrides, not_private, THEORY if plan else None)
            where = None if out is None else Path(out)
            done = perform(
                asked.config, asked.name, where, quiet, plan, tensorboard=tensorboard, profile=profile, stop=stop,
                site=site, workers=workers, notes=asked.dropped,
            )  # fmt: skip
        summary = with_report(done)
    print_end(summary, as_json)
