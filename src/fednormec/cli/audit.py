"""Attack a run's own privacy mechanism: `fednormec audit`."""

from typing import Annotated

import typer

from fednormec.cli.options import AsJson, ConfigPath, Overrides, Quiet, read_config
from fednormec.cli.printing import tell
from fednormec.errors import visible_lines

HELP = """Attack a run's own privacy mechanism with canaries. What they lose is compared with what it claims.

Without CONFIG: the quickstart. The mechanism audit plays the config's own method, dtype and number of parameters
with clients that send known messages, then 1,000 rounds of noise alone and 3,000 cohorts; large models get fewer
canaries and rounds, and the report says what was played. --training trains the whole config once with canaries among
the clients. Where records are protected (privacy.unit), canaries are records: the config's own local steps are played,
seen at every step, and --training plants canaries among one client's records. With both units there are two reports.
An audit can refute a claim, it can never prove one. Exit code 1 if a claim is violated.

\b
Examples:
  fednormec audit
  fednormec audit my.toml --training
  fednormec audit --set privacy.trust=secagg --json
  fednormec audit --set local.name=dp_sgd --set local.rate=0.5 --set privacy.unit=record
"""


def audit(
    config: ConfigPath = None,
    overrides: Overrides = None,
    training: Annotated[bool, typer.Option("--training", help="One whole training with canaries in it.")] = False,
    canaries: Annotated[int | None, typer.Option(help="How many canaries.", show_default="by trust model")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    from fednormec.audit.asked import audited
    from fednormec.files import to_json

    asked = read_config(config, overrides, False)
    found = audited(asked.config, training, canaries, quiet)
    tell(() if quiet else asked.dropped)
    print(to_json(found.facts()) if as_json else visible_lines(found.text()))
    if found.violated:
        raise typer.Exit(1)
