"""Write the model of a run in a format of others: `fednormec export`."""

from pathlib import Path
from typing import Annotated

import typer

from fednormec.cli.options import Code, Force, Model, Quiet
from fednormec.errors import note, visible

HELP = """Write a run's model in a format of others. It is compared with the model before it is kept.

safetensors has the tensors by name, and what they are of; torchscript (torch.jit.load) and onnx need no code of ours
or yours, and take batches of any size. Inputs are as they were in training: images of cifar10 and fashion_mnist
normalised by their public constants. Outputs are the model's own, scores before any softmax.

onnx needs further packages: pip install 'fednormec[onnx]'.

\b
Examples:
  fednormec export runs/quickstart-1 --format torchscript --out model.pt
  fednormec export runs/quickstart-1 --format onnx --out model.onnx
  fednormec export runs/quickstart-1 --format safetensors --out model.safetensors
"""


def export(
    run: Model,
    format: Annotated[str, typer.Option(help="safetensors, torchscript or onnx.")],
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="A new file.", show_default="RUN.safetensors, .pt or .onnx")
    ] = None,
    code: Code = ".",
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    from fednormec.errors import known
    from fednormec.results.exporting import ENDINGS
    from fednormec.results.exporting import export as exported
    from fednormec.runs.progress import counted

    known("format", format, ENDINGS)
    path = Path(f"{Path(run).resolve().name}{ENDINGS[format]}") if out is None else Path(out)
    with counted("exporting", quiet):
        done = exported(run, format, path, force, code)
    print(visible(f"{done.path}: {done.size:,} bytes, {done.compared}"))
    for said in done.notes:
        note(f"{said}.")
