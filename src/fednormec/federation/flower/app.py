"""Files of a Flower App for a federation, and what may be set for a run of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fednormec.config.schema import Config, as_toml, dump
from fednormec.errors import UserError, known
from fednormec.federation.agreement import for_server, read_federation
from fednormec.files import replace_text

PACKAGE = "fednormec_app"
PRIVACY = "privacy."
DEFAULTS: dict[str, Any] = {"out": "", "wait-for": 0, "not-private": False, "forget-memories": False}
SIDES = {
    "server": '"""Server\'s side: it trains as `fednormec federation serve` does."""\n\n'
    "from fednormec.federation.flower.server_app import server_app\n\napp = server_app()\n",
    "client": '"""Client\'s side: it carries bytes to the gateway of the client\'s owner, and back."""\n\n'
    "from fednormec.federation.flower.client_app import client_app\n\napp = client_app()\n",
}
ABOUT = """# A Flower App for the federation whose folder is named below. Nothing is installed when it runs: all who run
# it have fednormec[flower] before.
"""
RUN = """
# folder: the federation's folder on the machine where the server's side runs. out: the run's folder, by default run in
# it. wait-for: number of clients to wait for at the start, 0 for all. privacy.*: what all agreed on, for you to see;
# a run with any other value is refused.
"""


class Asked(NamedTuple):
    """What was set for a run of the app.

    Attributes:
        folder: the federation's folder.
        out: the run's folder; None for run, in the federation's.
        wait_for: number of clients to wait for; None for all.
        not_private: whether to train though clients are not protected.
        forget_memories: whether all memories start over when the run resumes.
    """

    folder: Path
    out: Path | None
    wait_for: int | None
    not_private: bool
    forget_memories: bool


def write_app(folder: Path, out: Path | None = None) -> Path:
    """Writes the Flower App of a federation, over an older one if there is one; returns its folder.

    Args:
        folder: the federation's folder.
        out: the app's folder; by default app, in the federation's.
    """
    terms = for_server(read_federation(folder), folder).terms
    app = out or folder / "app"
    about = {
        "name": "fednormec-app", "version": "1.0.0", "description": "A private federation", "license": "Apache-2.0",
        "dependencies": [],
    }  # fmt: skip
    parts: Config = {
        "project": about,
        "tool.flwr.app": {"publisher": "fednormec"},
        "tool.flwr.app.components": {f"{side}app": f"{PACKAGE}.{side}:app" for side in SIDES},
    }
    agreed = {key: value for key, value in terms.items() if key.startswith(PRIVACY) and _plain(value)}
    given = {"folder": str(folder.resolve())} | DEFAULTS | agreed
    lines = [f"{key} = {as_toml(value)}" for key, value in given.items()]
    text = ABOUT + dump(parts) + RUN + "\n".join(["[tool.flwr.app.config]", *lines]) + "\n"
    try:
        (app / PACKAGE).mkdir(parents=True, exist_ok=True)
        replace_text(app / "pyproject.toml", text)
        replace_text(app / PACKAGE / "__init__.py", '"""Flower App of a federation."""\n')
        for side, code in SIDES.items():
            replace_text(app / PACKAGE / f"{side}.py", code)
    except OSError as error:
        raise UserError(f"{app} cannot be made: {error.strerror or error}.") from error
    return app


def asked_for(run_config: Mapping[str, Any]) -> Asked:
    """Returns what was set for a run; raises UserError for what cannot be set, such as anything of [privacy].

    Args:
        run_config: the settings of the run, as Flower gives them.
    """
    folder = folder_in(run_config)
    terms = for_server(read_federation(folder), folder).terms
    for key, value in run_config.items():
        if key.startswith(PRIVACY):
            if terms.get(key) != value:
                here = "is not set" if terms.get(key) is None else f"is {terms[key]!r}"
                raise UserError(f"{key} {here} in federation.toml, and {value!r} in this run: what all agreed on is "
                                "not changed by the run's config. Leave it out; to change it, change federation.toml, "
                                "write the app anew, and give every client the new file.")  # fmt: skip
        else:
            known("setting of a run of this app", key, ["folder", *DEFAULTS])
    given = DEFAULTS | dict(run_config)
    for key, default in DEFAULTS.items():
        if type(given[key]) is not type(default):
            raise UserError(f"{key} in the run's config must be as {as_toml(default)}, not {given[key]!r}.")
    return Asked(
        folder, Path(given["out"]) if given["out"] else None, given["wait-for"] or None, given["not-private"],
        given["forget-memories"],
    )  # fmt: skip


def folder_in(run_config: Mapping[str, Any]) -> Path:
    """Returns the federation's folder that a run's config names; raises UserError if it names none."""
    folder = run_config.get("folder")
    if not isinstance(folder, str) or not Path(folder).is_dir():
        raise UserError(f"folder in the run's config must be the federation's folder on this machine, not {folder!r}: "
                        "fednormec federation app writes it, flwr run -c 'folder=\"…\"' names another.")  # fmt: skip
    return Path(folder)


def _plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)
