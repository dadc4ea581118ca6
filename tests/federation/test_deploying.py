"""Units for systemd and the Dockerfile that `federation init --with` writes. They are linted: no engine runs them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command import Command

from fednormec.errors import UserError
from fednormec.federation.deploying import write_services
from fednormec.federation.provision import make

INSTRUCTIONS = ("FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD")


def written(tmp_path: Path, name: str = "fed") -> list[Path]:
    folder = make(tmp_path / name, ["north", "south"], [5], 3, "localhost:9443", None)
    return write_services(folder, ["systemd", "docker"])


def test_each_party_has_files_of_its_own(tmp_path: Path) -> None:
    units, images = written(tmp_path)[::2], written(tmp_path, "again")[1::2]
    assert [str(path.relative_to(tmp_path / "fed")) for path in units] == [
        "systemd/fednormec-serve.service",
        "clients/north/systemd/fednormec-join.service",
        "clients/south/systemd/fednormec-join.service",
    ]
    assert len({path.read_text() for path in images}) == 1
    assert "--name south" in units[2].read_text() and "{" not in units[2].read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["fed", "50 % of it"])
def test_systemd_takes_the_units(tmp_path: Path, name: str) -> None:
    """But for the client's program, which is on another machine."""
    server, north, _ = written(tmp_path, name)[::2]
    linted = subprocess.run(["systemd-analyze", "verify", server, north], capture_output=True, text=True, timeout=60)
    ours = [line for line in linted.stderr.splitlines() if "fednormec-" in line]
    assert [line.split(": ", 1)[1] for line in ours] == [
        "Command /srv/fednormec/bin/fednormec is not executable: No such file or directory"
    ]
    spoilt = tmp_path / "spoilt.service"  # so that the check can fail
    spoilt.write_text(server.read_text().replace("Restart=on-failure", "Restart=sometimes"))
    linted = subprocess.run(["systemd-analyze", "verify", spoilt], capture_output=True, text=True, timeout=60)
    assert "sometimes" in linted.stderr


def test_the_dockerfile_is_well_formed_and_holds_no_secret(tmp_path: Path) -> None:
    text = written(tmp_path)[1].read_text()
    lines = re.sub(
        r"\\\n", " ", "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    ).splitlines()
    assert {line.split()[0] for line in lines} == set(INSTRUCTIONS)
    assert json.loads(lines[-2].removeprefix("ENTRYPOINT ")) == ["fednormec", "federation"]
    assert lines.index("USER fednormec") > max(i for i, line in enumerate(lines) if line.startswith("RUN"))
    assert not re.search(r"\.key|\.npz|federation\.toml", "\n".join(lines))  # nothing secret is built in


def test_what_cannot_be_written_is_said_before_anything_is(tmp_path: Path, fednormec_: Command) -> None:
    said = fednormec_("federation", "init", tmp_path / "fed", "--clients", "2", "--with", "systemd,dokker")
    assert said.code == 2 and said.err == "fednormec: unknown kind of service 'dokker'; did you mean 'docker'?\n"
    assert not (tmp_path / "fed").exists()
    with pytest.raises(UserError, match="choose a folder without quotes"):
        written(tmp_path, 'a"b')
