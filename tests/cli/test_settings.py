"""`fednormec settings`: every key that a config can have, with default, type and meaning, as the code has them."""

import io
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from command import Command, sentence, sets
from strict_json import strictly

from fednormec.cli.main import main
from fednormec.config.constructors import CONSTRUCTORS
from fednormec.config.listing import about, meanings, settings_of
from fednormec.config.schema import as_toml
from fednormec.config.settings import DEFAULT_NAMES, SECTIONS
from fednormec.problems.models import TOKEN_MODELS

TYPES = (
    r'a whole number|a number|a text|true or false|a list of (whole numbers|numbers|texts)|one of ".+"|a table|a list|'
    r'"\w+"|a list of "\w+"(, "\w+")*'
)


@pytest.fixture
def listed(fednormec_: Command) -> dict[str, Any]:
    """All that is listed, as scripts see it."""
    said = fednormec_("settings", "--json")
    assert (said.code, said.err) == (0, "")
    found: dict[str, Any] = strictly(said.out)
    return found


def keys(listed: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every setting with where it stands."""
    for section, part in listed.items():
        yield from ((f"{section}.{key}", one) for key, one in part["settings"].items())
        for name, own in part["names"].items():
            yield from ((f"{section}.{key} of {name}", one) for key, one in own["settings"].items())


# what is listed


def test_every_setting_has_a_meaning_and_a_type_in_words(listed: dict[str, Any]) -> None:
    found = dict(keys(listed))
    assert len(found) > 130
    assert [where for where, one in found.items() if not one["meaning"].strip()] == []
    arms = {where: re.split("(?<!true) or |, each value |, each ", one["type"]) for where, one in found.items()}
    odd = [where for where, types in arms.items() if not all(re.fullmatch(TYPES, one) for one in types)]
    assert odd == []
    assert [where for where, one in found.items() if "None" in one["meaning"]] == []  # TOML has no such value


def test_every_section_and_name_says_what_it_is(listed: dict[str, Any]) -> None:
    assert list(listed) == [*SECTIONS, "sweep"]
    assert {section: list(part["names"]) for section, part in listed.items() if part["names"]} == {
        section: [*table, *(("table", "images") if section == "data" else ())]
        for section, table in CONSTRUCTORS.items()
    }
    for part in listed.values():
        assert part["about"] and all(one["about"] for one in part["names"].values())
    assert [name for name, part in listed.items() if not part["settings"]] == ["code", "python", "sweep"]


def test_a_key_without_a_meaning_is_found() -> None:
    def build(a: int, b: float = 0.5, c: Literal["x", "y"] = "x", d: int | None = None) -> None:
        """Builds.

        Args:
            a: a number
                on two lines.
            c: which.
            d: so many; None: all.

        Returns:
            b: no entry.
        """

    found = settings_of(build)
    assert about(build) == "Builds."
    assert {key: one.meaning for key, one in found.items()} == {
        "a": "a number on two lines.", "b": "", "c": "which.", "d": "so many; if left out: all.",
    }  # fmt: skip
    assert {key: (one.type, one.default, one.required) for key, one in found.items()} == {
        "a": ("a whole number", None, True),
        "b": ("a number", 0.5, False),
        "c": ('one of "x", "y"', "x", False),
        "d": ("a whole number", None, False),
    }
    assert list(settings_of(build, given=2)) == ["c", "d"]
    assert meanings("No entries.\n\n    Args: none of them") == {}


@pytest.mark.parametrize("section", [*DEFAULT_NAMES, "data"])
def test_what_is_listed_is_what_a_config_takes(fednormec_: Command, listed: dict[str, Any], section: str) -> None:
    """Every key of every name, set to its default, passes for a setting of it; and no other key does."""
    choice = "partition" if section == "data" else "name"
    needed = {"step": 0.5, "p": 0.5, "m": 2}
    for name, own in listed[section]["names"].items():
        if name in ("by_ids", "table", "images", *TOKEN_MODELS):  # they need data of their own
            continue
        values = {key: needed.get(key) if one["required"] else one["default"] for key, one in own["settings"].items()}
        given = [f"{section}.{key}={as_toml(value)}" for key, value in values.items() if value is not None]
        more = ["data.clients=4"] if section != "data" else []
        if section != "problem":
            more += ["problem.name=neural"] if section in ("data", "model") else ["problem.name=quadratic"]
        full = ["participation.name=full"] if name == "alpha_normec" else []
        asked = sets(f"{section}.{choice}={name}", *given, *more, *full)
        said = fednormec_("config", "--not-private", *asked)
        assert said.code == 0, said.err
        for key, value in values.items():
            assert value is None or f"\n{key} = {as_toml(value)}\n" in said.out
        said = fednormec_("config", "--not-private", *asked, *sets(f"{section}.no_such_key=3"))
        assert f"unknown setting in [{section}] {name} 'no_such_key'" in sentence(said.err)


def test_defaults_are_those_of_a_run(fednormec_: Command, listed: dict[str, Any]) -> None:
    """What `fednormec config` spells out where nothing was set."""
    run = tomllib.loads(fednormec_("config", *sets("run.rounds=100", "privacy.epsilon=4.0")).out)
    for section in ("run", "privacy"):
        for key, one in listed[section]["settings"].items():
            if key not in ("epsilon", "trust"):
                assert run[section].get(key) == one["default"], key


# asking


def test_the_sections_are_listed(fednormec_: Command) -> None:
    said = fednormec_("settings")
    assert (said.code, said.err) == (0, "")
    assert [line.split()[0] for line in said.out.splitlines()[: len(SECTIONS) + 1]] == [*SECTIONS, "sweep"]


def test_a_section_groups_by_name_and_a_name_stands_alone(fednormec_: Command) -> None:
    said = fednormec_("settings", "local")
    heads = [line for line in said.out.splitlines() if line and not line.startswith(" ")]
    assert heads == ["[local]  how a client computes its update", "gd", "ig", "sgd", "dp_sgd"]
    one = fednormec_("settings", "local", "ig").out
    assert "reshuffle" in one and "\nig\n" in one and "\nsgd\n" not in one and "    name" not in one
    method = fednormec_("settings", "method", "fed_normec").out
    assert "beta                  a number; default 0.1\n" in method
    assert "server_normalization  true or false; default true\n" in method
    assert "    step   a number; required\n" in said.out
    assert "workers             a whole number; optional\n" in fednormec_("settings", "run").out


def test_json_has_the_part_that_is_asked_for(fednormec_: Command, listed: dict[str, Any]) -> None:
    assert strictly(fednormec_("settings", "run", "--json").out) == {"run": listed["run"]}
    part = strictly(fednormec_("settings", "data", "dirichlet", "--json").out)["data"]
    assert part["settings"] == {} and part["names"] == {"dirichlet": listed["data"]["names"]["dirichlet"]}
    expected = {"type": "a whole number", "default": 20, "required": False, "meaning": "number of clients."}
    assert part["names"]["dirichlet"]["settings"]["clients"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runn"], "unknown section 'runn'; did you mean 'run'?"),
        (["optimizer"], "unknown section 'optimizer'; there are: problem, data, features, model"),
        (["method", "fed_normek"], "unknown method 'fed_normek'; did you mean 'fed_normec'?"),
        (["data", "dirichlett"], "unknown partition 'dirichlett'; did you mean 'dirichlet'?"),
        (["local", "adam"], "unknown local 'adam'; there are: gd, ig, sgd, dp_sgd."),
        (["run", "rounds"], "[run] names nothing to choose from: fednormec settings run lists its settings."),
        (["r\x1bun"], r"unknown section 'r\x1bun'"),
    ],
)
def test_a_mistake_is_a_sentence(fednormec_: Command, arguments: list[str], message: str) -> None:
    said = fednormec_("settings", *arguments)
    assert (said.code, said.out) == (2, "")
    assert sentence(said.err).startswith(message)


# looking at it


@pytest.mark.parametrize("width", [50, 80, 120, 300])
@pytest.mark.parametrize("section", [None, *SECTIONS, "sweep"])
def test_lines_fit_the_terminal_and_nothing_is_lost(
    fednormec_: Command, listed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, width: int, section: str | None
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    said = fednormec_("settings", *([] if section is None else [section]))
    assert (said.code, said.err) == (0, "")
    assert all(line.isprintable() and line == line.rstrip() for line in said.out.splitlines())
    assert max(map(len, said.out.splitlines())) <= min(width, 120)
    words = " ".join(said.out.split())
    for where, one in keys(listed):
        if where.startswith(f"{section}."):
            assert " ".join(one["meaning"].split()) in words


def test_80_columns_are_enough_for_a_line_per_section(fednormec_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(fednormec_("settings").out.splitlines()) == len(SECTIONS) + 3


def test_it_is_plain_text_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal: 80 columns, no colours, and letters that the stream does not have are spelled."""
    monkeypatch.delenv("COLUMNS", raising=False)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["fednormec", "settings", "privacy"])
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError("no terminal")))
    with pytest.raises(SystemExit) as end:
        main()
    text = written.getvalue()
    assert end.value.code == 0 and b"\x1b" not in text and rb"\u03b4" in text
