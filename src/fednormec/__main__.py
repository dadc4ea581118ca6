"""Run the command line: `python -m fednormec`."""

from fednormec.cli.main import main

main()
