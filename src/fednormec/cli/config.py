"""Check a config and print it with every default: `fednormec config`."""

from fednormec.cli.options import ConfigPath, NotPrivate, Overrides, read_config

HELP = """Check a config and print it with every default. Nothing is run.

\b
Examples:
  fednormec config > my.toml          the quickstart, as a start for your own
  fednormec config my.toml --set method.name=dp_scaffold
"""


def config(config: ConfigPath = None, overrides: Overrides = None, not_private: NotPrivate = False) -> None:
    from fednormec.config.assemble import assemble
    from fednormec.config.schema import dump

    print(dump(assemble(read_config(config, overrides, not_private)[1]).config), end="")
