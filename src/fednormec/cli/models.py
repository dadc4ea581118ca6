"""List the built-in models: `fednormec models`."""

from fednormec.cli.options import AsJson
from fednormec.cli.printing import constructor, print_rows

HELP = "List the built-in models with their settings and sizes."


def models(as_json: AsJson = False) -> None:
    from fednormec.config.constructors import CONSTRUCTORS

    rows = {
        name: {
            "parameters on 3x32x32, 10 classes": sum(p.numel() for p in model.build((3, 32, 32), 10).parameters()),
            **constructor(model),
        }
        for name, model in CONSTRUCTORS["model"].items()
    }
    print_rows(rows, as_json)
