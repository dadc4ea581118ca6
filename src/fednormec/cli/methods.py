"""List the methods: `fednormec methods`."""

from fednormec.cli.options import AsJson
from fednormec.cli.printing import constructor, print_rows

HELP = "List the methods with their papers and settings."


def methods(as_json: AsJson = False) -> None:
    from fednormec.algorithms.methods import METHODS
    from fednormec.config.constructors import CONSTRUCTORS

    rows = {
        name: {
            "paper": method.paper,
            "can_be_private": method.can_be_private,
            "takes_local": method.takes_local,
            **constructor(CONSTRUCTORS["method"][name]),
        }
        for name, method in METHODS.items()
    }
    print_rows(rows, as_json)
