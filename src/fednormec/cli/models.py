"""List the built-in models: `fednormec models`."""

from fednormec.cli.options import AsJson
from fednormec.cli.printing import constructor, print_rows

HELP = "List the built-in models with their settings and sizes."


def models(as_json: AsJson = False) -> None:
    from fednormec.config.constructors import CONSTRUCTORS
    from fednormec.problems.models import TOKEN_MODELS

    rows = {}
    for name, model in CONSTRUCTORS["model"].items():
        takes, shape, outputs = ("texts of 80 tokens, 97 of them", (80,), 97)
        if name not in TOKEN_MODELS:
            takes, shape, outputs = ("3x32x32, 10 classes", (3, 32, 32), 10)
        parameters = sum(p.numel() for p in model.build(shape, outputs).parameters())
        rows[name] = {f"parameters on {takes}": parameters, **constructor(model)}
    print_rows(rows, as_json)
