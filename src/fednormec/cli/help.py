"""Classes of commands that print their help whole and as it was written."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command whose help is plain text."""

    def get_help(self, ctx: Any) -> str:
        return _plain(super().get_help(ctx))


class Group(TyperGroup):
    """A group of commands whose help is plain text."""

    def get_help(self, ctx: Any) -> str:
        return _plain(super().get_help(ctx))


def _plain(help: str) -> str:
    """Remove the backslashes that Typer puts before brackets for Rich, which does not print this help."""
    return help.replace("\\[", "[")
