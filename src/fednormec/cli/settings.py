"""List every setting of a config: `fednormec settings`."""

import shutil
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fednormec.cli.options import AsJson
from fednormec.errors import UserError, known, visible

if TYPE_CHECKING:
    from fednormec.config.listing import Setting

HELP = """List the settings of a config: default, type and meaning.

Without SECTION: the sections. Where a section names what it takes (a method, a model, a partition), NAME shows one.

\b
Examples:
  fednormec settings
  fednormec settings run
  fednormec settings method fed_normec
  fednormec settings data dirichlet
  fednormec settings data table                             columns, categories, scales
  fednormec settings --json > settings.json                 all of them, for scripts
"""
WIDEST = 120


class Part(NamedTuple):
    """Part of a config: what it is for, its own settings, and what it can name, each with settings of its own."""

    about: str
    settings: "dict[str, Setting]"
    names: "dict[str, Part]"


def settings(
    section: Annotated[str | None, typer.Argument(metavar="[SECTION]", help="A section, such as method.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="What it names, such as fed_normec.")] = None,
    as_json: AsJson = False,
) -> None:
    from fednormec.files import to_json

    chosen = _chosen(_sections(), section, name)
    if as_json:
        print(to_json({key: _facts(part) for key, part in chosen.items()}))
        return
    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines = _overview(chosen, width) if section is None else _whole(section, chosen[section], width)
    print("\n".join(map(visible, lines)))


def _sections() -> dict[str, Part]:
    """Every section of a config, from the code that reads it."""
    from fednormec.algorithms.faults import Faults
    from fednormec.config.constructors import CONSTRUCTORS
    from fednormec.config.forms import PICTURES, TABLE
    from fednormec.config.listing import about, settings_of
    from fednormec.config.settings import BESIDE, PURPOSES, SWEEP, DataSettings, GivenConstants, RunSettings
    from fednormec.federation.agreement import FederationSettings
    from fednormec.privacy.asked import Privacy

    own = {
        "data": DataSettings, "privacy": Privacy, "constants": GivenConstants, "faults": Faults,
        "federation": FederationSettings, "run": RunSettings, **BESIDE,
    }  # fmt: skip
    forms = {"data": {"table": TABLE.build, "images": PICTURES.build}}
    found = {}
    for section, purpose in PURPOSES.items():
        table = CONSTRUCTORS.get(section, {})
        names = {name: Part(one.about, one.settings, {}) for name, one in table.items()}
        keys = settings_of(own[section]) if section in own else {}
        of_forms = {name: Part(about(form), settings_of(form), {}) for name, form in forms.get(section, {}).items()}
        found[section] = Part(purpose, _with_choice(section, keys, list(names)), names | of_forms)
    return found | {"sweep": Part(SWEEP, {}, {})}


def _with_choice(section: str, keys: "dict[str, Setting]", names: list[str]) -> "dict[str, Setting]":
    """The settings of a section, with the one that chooses among these names."""
    from fednormec.config.listing import Setting
    from fednormec.config.schema import as_toml
    from fednormec.config.settings import DEFAULT_NAMES

    if not names:
        return keys
    one_of = f"one of {', '.join(map(as_toml, names))}"
    if section == "data":
        return keys | {"partition": keys["partition"]._replace(type=one_of)}
    default = DEFAULT_NAMES.get(section)
    meaning = "which of these; each has settings of its own."
    return {"name": Setting(one_of, default, default is None, meaning), **keys}


def _chosen(sections: dict[str, Part], section: str | None, name: str | None) -> dict[str, Part]:
    """The parts that are asked for; raises UserError if there is no such section, or no such name in it."""
    if section is None:
        return sections
    known("section", section, sections)
    part = sections[section]
    if name is None:
        return {section: part}
    if not part.names:
        raise UserError(f"[{section}] names nothing to choose from: fednormec settings {section} lists its settings.")
    known("partition" if section == "data" else section, name, part.names)
    return {section: part._replace(settings={}, names={name: part.names[name]})}


def _overview(sections: dict[str, Part], width: int) -> Iterator[str]:
    """A line for each section, and how to see more."""
    longest = max(map(len, sections))
    for name, part in sections.items():
        yield from _wrapped(f"{name:<{longest}}  ", part.about, width)
    yield from ("", *_wrapped("", "More: fednormec settings SECTION. To change one: --set SECTION.KEY=VALUE", width))


def _whole(section: str, part: Part, width: int) -> Iterator[str]:
    """A section: what it is for, its own settings, then those of each name."""
    yield from _wrapped(f"[{section}]  ", part.about, width)
    yield from _keys(part.settings, width)
    for name, one in part.names.items():
        yield ""
        yield name
        yield from _wrapped("    ", one.about, width)
        yield from _keys(one.settings, width)


def _keys(found: "dict[str, Setting]", width: int) -> Iterator[str]:
    """Settings, each with its type and default, and below that its meaning."""
    from fednormec.config.schema import as_toml

    longest = max(map(len, found), default=0)
    for key, one in found.items():
        default = "optional" if one.default is None else f"default {as_toml(one.default)}"
        taken = f"{one.type}; {'required' if one.required else default}"
        yield from _wrapped(f"    {key:<{longest}}  ", taken, width)
        yield from _wrapped(" " * (longest + 6), one.meaning, width)


def _wrapped(begins: str, text: str, width: int) -> list[str]:
    """Lines of at most `width`, the first with `begins` before it, the others as far in."""
    return textwrap.wrap(
        text, width, initial_indent=begins, subsequent_indent=" " * len(begins), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _facts(part: Part) -> dict[str, Any]:
    keys = {key: one._asdict() for key, one in part.settings.items()}
    return {"about": part.about, "settings": keys, "names": {name: _facts(one) for name, one in part.names.items()}}
