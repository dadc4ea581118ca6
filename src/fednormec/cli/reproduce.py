"""Run the paper's experiments and check its claims: `fednormec reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.options import AsJson, Quiet, crew
from fednormec.errors import known, note, visible, visible_lines

HELP = """Run the paper's experiments and check its claims. Its figures are drawn; the claims are C1 to C5.

FIGURE is figure1, figure2, figure3, figure4 or all. --scale paper is ResNet20 on all of CIFAR-10 with seed 42: hours
or days on a CPU, and the command says how many before it starts. --scale small is a test of it all in under fifteen
minutes on two cores: a small convolutional net, 2,000 images, three seeds. The same command goes on where it was
stopped, and --records takes the runs that another machine has done.

The paper does not say what a round holds. --local-work has five readings: minibatch (one gradient on 32 examples),
epoch (a round is a pass, with an exchange for every mini-batch), gradient (over all local data), pass (one pass, steps
of length γ in all) and steps (--local-steps steps of length γ each). --noise says what K is in the paper's formula,
where a round holds several exchanges: the rounds (stated) or the exchanges.

The noise is the paper's, read as the norm of the whole vector: NOT PRIVATE, its true ε stands beside every result.
Needs: fednormec data fetch cifar10

\b
Examples:
  fednormec reproduce all --scale small
  fednormec reproduce figure1 --local-work minibatch
  fednormec reproduce all --local-work epoch --model conv
  fednormec reproduce all --local-work epoch --model conv --examples 10800 --seed 42 --seed 43 --out reproduction/fifth
  fednormec reproduce all --local-work epoch --model conv --records docs/reproduction/epoch-conv/records.jsonl
  fednormec reproduce all --local-work epoch --device cuda --workers 1
"""


def reproduce(
    figure: Annotated[str, typer.Argument(metavar="FIGURE", help="figure1 … figure4, or all.")],
    scale: Annotated[str, typer.Option(help="paper or small.")] = "paper",
    out: Annotated[
        str | None,
        typer.Option(help="A folder, new or to go on with.", show_default="reproduction/SCALE-LOCAL_WORK-MODEL"),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="How many runs at once.", show_default="one per core")] = None,
    seed: Annotated[
        list[int] | None, typer.Option("--seed", help="A seed; may be repeated.", show_default="42, small also 43, 44")
    ] = None,
    local_work: Annotated[str, typer.Option(help="epoch, minibatch, gradient, pass or steps.")] = "minibatch",
    local_steps: Annotated[int, typer.Option(help="With --local-work steps: how many.")] = 8,
    noise: Annotated[str, typer.Option(help="What K is in the size of the noise: stated or exchanges.")] = "stated",
    model: Annotated[str | None, typer.Option(help="resnet20 or conv.", show_default="resnet20, small: conv")] = None,
    examples: Annotated[
        int | None, typer.Option(help="How many images to train on.", show_default="54000, small: 2000")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.", show_default="300")] = None,
    records: Annotated[
        str | None, typer.Option(help="A records.jsonl of the same options: its runs are not run again.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    from fednormec.files import to_json
    from fednormec.runs.progress import tallied
    from fednormec.sweeps import paper, paper_claims
    from fednormec.sweeps.paper_runs import read_records
    from fednormec.sweeps.ranking import line

    known("figure", figure, [*paper.FIGURES, "all"])
    chosen = paper.scale(scale, model, examples, seed, local_work, local_steps, noise, rounds, device)
    figures = list(paper.FIGURES) if figure == "all" else [figure]
    name = f"{chosen.name}-{chosen.local_work}-{chosen.model}"
    folder = Path("reproduction") / name if out is None else Path(out)
    past = {} if records is None else read_records(Path(records), chosen)
    asked = [cell for cell in paper.cells(figures, chosen) if paper.point_of(cell) not in past]
    at_once = crew(workers)
    estimated = paper.hours(asked, folder, at_once)
    if not quiet:
        note(f"{len(asked)} runs of {chosen.rounds * chosen.exchanges:,} exchanges, about {_time(estimated)} for those "
             "that are missing. Stop it whenever you like: the same command goes on.")  # fmt: skip
    with tallied(len(asked), line, quiet) as tell:
        found = paper_claims.reproduce(figures, chosen, folder, at_once, tell, past)
    print(to_json(found.facts()) if as_json else visible_lines(found.text()))
    if not as_json:
        print(visible(f"figures and claims.md are in {folder}"))


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{max(1, round(60 * hours))} minutes" if hours > 0 else "no time"
