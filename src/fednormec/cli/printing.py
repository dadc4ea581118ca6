"""Results and notes that several commands print."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fednormec.errors import UserError, note, visible

if TYPE_CHECKING:
    from fednormec.config.constructors import Constructor
    from fednormec.results.reading import Run


def print_end(summary: dict[str, Any], as_json: bool) -> None:
    """Print how a run ended, and what to be warned of; raises UserError if it diverged."""
    from fednormec.files import to_json
    from fednormec.runs.summary import describe

    print(to_json(summary) if as_json else describe(summary), flush=True)
    tell(summary.get("warnings", ()))
    if summary["status"] == "diverged":
        raise UserError(f"{summary['message']}. The rounds before it are kept in {summary['out']}.")


def tell(notes: Iterable[str]) -> None:
    """Note each of these sentences on stderr."""
    for sentence in notes:
        note(sentence)


def tell_problems(found: "list[Run]") -> None:
    """Note on stderr what is wrong with the folders of these runs."""
    for run in found:
        for problem in run.problems:
            note(f"{run.title}: {problem}.")


def constructor(named: "Constructor") -> dict[str, Any]:
    """The settings of a method or model, and what it is about."""
    return {"settings": {name: p.default for name, p in named.parameters.items()}, "about": named.about}


def print_rows(rows: dict[str, dict[str, Any]], as_json: bool) -> None:
    """Print a table by name: what each row is about, then its other entries."""
    from fednormec.files import to_json

    if as_json:
        print(to_json(rows))
        return
    for name, row in rows.items():
        print(f"{visible(name)}\n    {visible(row['about'])}")
        for key, value in row.items():
            if key != "about":
                print(visible(f"    {key.replace('_', ' ')}: {_words(value)}"))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "none"
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
