"""List the built-in models: `fednormec models`."""

from fednormec.cli.options import AsJson
from fednormec.cli.printing import constructor, print_rows

HELP = "List the built-in models with their settings and sizes."


def models(as_json: AsJson = False) -> None:
    from fednormec.problems.models import MODELS

    rows = {
        name: {
            "parameters on 3x32x32, 10 classes": sum(p.numel() for p in build((3, 32, 32), 10).parameters()),
            **constructor(build, skip=2),
        }
        for name, build in MODELS.items()
    }
    print_rows(rows, as_json)
