"""Run the paper's experiments and check its claims: `fednormec reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.options import AsJson, Quiet, crew
from fednormec.errors import known, visible, visible_lines

HELP = """Run the paper's experiments and check its claims. Its figures are drawn; the claims are C1 to C5.

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
    quiet: Quiet = False,
) -> None:
    from fednormec.files import to_json
    from fednormec.runs.progress import tallied
    from fednormec.sweeps import paper
    from fednormec.sweeps.ranking import line

    known("figure", figure, [*paper.FIGURES, "all"])
    chosen = paper.scale(small, seed, local_work, local_steps, rounds, device)
    figures = list(paper.FIGURES) if figure == "all" else [figure]
    folder = Path("reproduction") / chosen.name if out is None else Path(out)
    with tallied(len(paper.cells(figures, chosen)), line, quiet) as tell:
        found = paper.reproduce(figures, chosen, folder, crew(workers), tell)
    print(to_json(found.facts()) if as_json else visible_lines(found.text()))
    if not as_json:
        print(visible(f"figures and claims.md are in {folder}"))
