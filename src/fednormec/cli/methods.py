"""List the methods: `fednormec methods`."""

from typing import Annotated

import typer

from fednormec.cli.options import AsJson
from fednormec.cli.printing import constructor, print_rows

HELP = """List the methods, or the optimisers of the server.

Each has its paper and its settings.

\b
Examples:
  fednormec methods
  fednormec methods --server
  fednormec run --set method.name=dp_fed_avg_clip --set server.name=momentum --set server.schedule=cooldown
"""


def methods(
    server: Annotated[bool, typer.Option("--server", help="The optimisers of the server, which cost no ε.")] = False,
    as_json: AsJson = False,
) -> None:
    from fednormec.algorithms.methods import METHODS
    from fednormec.algorithms.optimizers import OPTIMIZERS
    from fednormec.config.constructors import CONSTRUCTORS

    if server:
        optimizers = {
            name: {
                "paper": optimizer.paper,
                "vectors_kept": optimizer.memory,
                **constructor(CONSTRUCTORS["server"][name]),
            }
            for name, optimizer in OPTIMIZERS.items()
        }
        print_rows(optimizers, as_json)
        return

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
