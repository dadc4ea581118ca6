"""List the built-in models: `fednormec models`."""

from fednormec.cli.options import AsJson
from fednormec.cli.printing import constructor, print_rows

HELP = "List the built-in models with their settings and sizes."


def models(as_json: AsJson = False) -> None:
    from fednormec.config.constructors import CONSTRUCTORS
    from fednormec.problems.models import TOKEN_MODELS

    rows = {}
    for name, model in CONSTRUCTORS["model"].items():
        tokens = name in TOKEN_MODELS
        built = model.build((80,), 97) if tokens else model.build((3, 32, 32), 10)
        takes = "texts of 80 tokens, 97 of them" if tokens else "3x32x32, 10 classes"
        rows[name] = {f"parameters on {takes}": sum(p.numel() for p in built.parameters()), **constructor(model)}
    print_rows(rows, as_json)
