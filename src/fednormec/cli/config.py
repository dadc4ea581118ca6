"""Check a config and print it with every default: `fednormec config`."""

from fednormec.cli.options import ConfigPath, NotPrivate, Overrides, read_config
from fednormec.cli.printing import tell

HELP = """Check a config and print it with every default. Nothing is run.

\b
Examples:
  fednormec config > my.toml          the quickstart, as a start for your own
  fednormec config my.toml --set method.name=dp_scaffold
"""


def config(config: ConfigPath = None, overrides: Overrides = None, not_private: NotPrivate = False) -> None:
    from fednormec.config.assemble import assemble
    from fednormec.config.schema import dump

    asked = read_config(config, overrides, not_private)
    resolved = assemble(asked.config).config
    tell(asked.dropped)
    print(dump(resolved), end="")
