"""Code of the user's own by name: it trains in every command, its files are pinned, mistakes in it are sentences."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command

import fednormec.config.own
from fednormec.config.assemble import assemble
from fednormec.config.own import is_own, own, within
from fednormec.config.schema import Config, dump, read
from fednormec.data import Examples, Kind
from fednormec.errors import UserError
from fednormec.federation.agreement import for_client, for_server, read_federation
from fednormec.federation.provision import make

NET = """
from __future__ import annotations

from dataclasses import dataclass

import torch
from layers import block
from torch import nn


@dataclass
class Sizes:
    width: int


class Net(nn.Module):
    def __init__(self, sizes: Sizes, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body, self.head = block(inputs, sizes.width), nn.Linear(sizes.width, outputs)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.flatten(1))))


def build(input_shape, outputs, width: int = 8):
    return Net(Sizes(width), torch.Size(input_shape).numel(), outputs)


def smooth(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def share_of_zeros(outputs, targets):
    return (outputs.argmax(1) == 0).double()
"""
LAYERS = """
from torch import nn


def block(before, after):
    return nn.Linear(before, after)
"""
LOAD = """
import numpy as np


def clients(count: int = 3, rows=20):
    rng = np.random.default_rng(0)
    w = rng.standard_normal(4)

    def pair(rows):
        x = rng.standard_normal((rows, 4))
        return x, x @ w

    return {**{f"site {i}": pair(rows) for i in range(count)}, "test": pair(50)}


def together():
    x = np.random.default_rng(0).standard_normal((40, 4))
    return x, (x[:, 0] > 0).astype(int)


def with_ids():
    x, y = together()
    return x, y, np.arange(40) // 10
"""
BASE: Config = {
    "data": {"clients": 4, "examples": 80},
    "model": {"name": "net.py:build", "width": 5},
    "problem": {"loss": "net.py:smooth", "metrics": ["accuracy", "net.py:share_of_zeros"]},
    "local": {"name": "gd", "step": 0.5},
    "method": {"name": "fed_avg"},
    "run": {"rounds": 3, "evaluate_every": 1},
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"net.py": NET, "layers.py": LAYERS, "load.py": LOAD}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def config(**sections: dict[str, object]) -> Config:
    return {**BASE, **sections}


def written(name: str, asked: Config) -> str:
    Path(name).write_text(dump(asked))
    return name


# what is loaded


def test_names_of_own_code_are_told_from_ours() -> None:
    assert all(map(is_own, ("net.py:build", "a/b.py:f", "package.module:build", "C:/x.py:f")))
    assert not any(map(is_own, ("mlp", "digits", "my.npz", "a:", ":b", "a:b c", "", 3, None)))


def test_a_file_may_import_what_lies_beside_it_and_all_of_it_is_pinned() -> None:
    found = own("net.py:build", "model.name")
    assert set(found.files) == {"net.py", "layers.py"} and found.__name__ == "build"
    Path("layers.py").write_text(LAYERS + "\n# changed\n")
    again = own("net.py:build", "model.name")
    assert again.files["net.py"] == found.files["net.py"] and again.files["layers.py"] != found.files["layers.py"]


def test_two_folders_may_have_files_of_one_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.py").write_text(f"VALUE = '{name}'")
        (tmp_path / name / "net.py").write_text("from part import VALUE\ndef said(): return VALUE")
    assert [own(f"{name}/net.py:said", "x")() for name in ("one", "two")] == ["one", "two"]
    assert set(own("one/net.py:said", "x").files) == {"one/net.py", "one/part.py"}


def test_a_package_is_pinned_with_what_it_imports_of_itself(tmp_path: Path) -> None:
    home = tmp_path / "mine_own" / "deep"
    home.mkdir(parents=True)
    for path in (home.parent / "__init__.py", home / "__init__.py"):
        path.write_text("")
    (home.parent / "tools.py").write_text("def two(): return 2")
    (home / "net.py").write_text("from ..tools import two\nimport math\ndef build(): return two() + math.floor(0.5)")
    found = own("mine_own.deep.net:build", "x")
    assert found() == 2
    names = ("__init__.py", "deep/__init__.py", "deep/net.py", "tools.py")
    assert set(found.files) == {f"mine_own/{name}" for name in names}


def test_of_an_installed_package_only_the_module_itself_is_pinned() -> None:
    assert list(own("hypothesis.strategies:integers", "x").files) == ["hypothesis/strategies/__init__.py"]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("net.py:biuld", "there is no function 'biuld' in net.py; it has build, smooth, share_of_zeros"),
        ("nat.py:build", "model.name: there is no file nat.py"),
        ("nowhere.at_all:build", "nowhere.at_all cannot be imported: it raised ModuleNotFoundError"),
        ("bad.py:build", "bad.py cannot be loaded: it raised SyntaxError"),
        ("exits.py:build", "exits.py cannot be loaded: it raised SystemExit: 3"),
        ("raises.py:build", "raises.py cannot be loaded: it raised ValueError: two lines"),
        ("net", "must be file.py:function or package.module:function, not 'net'"),
        ("math:floor", "math has no Python file"),
    ],
)
def test_what_cannot_be_loaded_is_a_sentence(reference: str, message: str) -> None:
    Path("bad.py").write_text("def build(:")
    Path("exits.py").write_text("raise SystemExit(3)")
    Path("raises.py").write_text("raise ValueError('two\\nlines')")
    with pytest.raises(UserError, match=message):
        own(reference, "model.name")


def test_what_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fednormec.config.own, "SECONDS", 0.2)
    monkeypatch.setattr(fednormec.config.own, "SECONDS_IN_SILENCE", 0.05)
    Path("hangs.py").write_text("import time\ntime.sleep(60)")
    started = time.monotonic()
    with pytest.raises(UserError, match=r"hangs.py, which model.name names, has not come to an end in 0.2 seconds"):
        own("hangs.py:build", "model.name")
    assert time.monotonic() - started < 20
    assert capsys.readouterr().err == "note: waiting for hangs.py, which model.name names ...\n"
    with within("nothing", 5):
        pass
    assert capsys.readouterr().err == ""


# in a run


def test_own_model_loss_and_metric_train(fednormec_: Command) -> None:
    said = fednormec_("run", written("my.toml", BASE), "--out", "runs/a", "--quiet")
    assert said.code == 0 and "test share of zeros " in said.out
    record = json.loads(Path("runs/a/metrics.jsonl").read_text().splitlines()[-1])
    assert {"test_accuracy", "test_share_of_zeros", "test_loss"} <= set(record)
    found = read("runs/a/config.toml")
    assert set(found["code"]) == {"net.py", "layers.py"} and found["model"] == {"name": "net.py:build", "width": 5}
    assert "test share of zeros" in Path("runs/a/report.html").read_text()
    same = assemble(found)
    assert same.config == assemble(BASE).config and same.problem.dim == 64 * 5 + 5 + 5 * 10 + 10


def test_the_seed_decides_where_an_own_model_begins() -> None:
    def first(seed: int) -> torch.Tensor:
        return assemble(config(run={"seed": seed})).problem.init(np.random.default_rng(0))

    before = torch.get_rng_state()
    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))
    assert torch.equal(before, torch.get_rng_state())


def test_a_run_goes_on_only_with_the_code_it_began_with(fednormec_: Command) -> None:
    asked = written("my.toml", config(run={"rounds": 3, "keep_checkpoint": True, "checkpoint_rounds": 1}))
    fednormec_("run", asked, "--out", "runs/a", "--quiet")
    for name in ("summary.json", "model.safetensors"):
        Path("runs/a", name).unlink()
    files = {path: path.read_bytes() for path in Path("runs/a").iterdir() if path.is_file()}
    Path("layers.py").write_text(LAYERS.replace("nn.Linear(before, after)", "nn.Linear(before, after, bias=True)"))
    said = fednormec_("run", "--resume", "runs/a", "--quiet")
    assert said.code == 2 and "layers.py is not the file that the settings were made with" in said.err
    assert files == {path: path.read_bytes() for path in Path("runs/a").iterdir() if path.is_file()}
    Path("layers.py").write_text(LAYERS)
    assert fednormec_("run", "--resume", "runs/a", "--quiet").code == 0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ({"net.py": "0" * 64}, "net.py is not the file"),
        ({"net.py": "short"}, "must be a SHA-256 digest"),
        ({"other.py": "0" * 64}, "names other.py, but the settings do not use it"),
    ],
)
def test_digests_that_are_not_those_of_the_files_are_refused(code: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        assemble(config(code=code))


def test_a_file_more_than_was_agreed_on_is_refused() -> None:
    agreed = assemble(BASE).config["code"]
    with pytest.raises(UserError, match="layers.py is used, but \\[code\\] has no digest of it"):
        assemble(config(code={"net.py": agreed["net.py"]}))


MISTAKES = """
import torch
from torch import nn

def number(input_shape, outputs): return 3
def raises(input_shape, outputs): raise KeyError("what")
def one(input_shape): return nn.Linear(64, 10)
def packed(*sizes): return nn.Linear(64, 10)
def typed(input_shape, outputs, width: int = 3): return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
def narrow(input_shape, outputs): return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
def flat(outputs, targets): return outputs
def text(outputs, targets): return "low"
def broken(outputs, targets): return outputs[targets.missing]
"""


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"name": "bad.py:number"}}, "bad.py:number must return a torch.nn.Module, not int"),
        ({"model": {"name": "bad.py:raises"}}, "bad.py:raises raised KeyError: 'what'"),
        ({"model": {"name": "bad.py:one"}}, r"\[model\] bad.py:one must take 2 arguments before its own settings"),
        ({"model": {"name": "bad.py:packed"}}, "and not as \\*args"),
        ({"model": {"name": "bad.py:typed", "widht": 3}}, "unknown setting .* 'widht'; did you mean 'width'"),
        ({"model": {"name": "bad.py:typed", "width": "x"}}, "width must be a whole number, not 'x'"),
        ({"model": {"name": "bad.py:narrow"}, "problem": {}}, "the labels go up to 9: it needs 10"),
        ({"problem": {"loss": "bad.py:flat"}}, "one number per example or their mean, not of shape"),
        ({"problem": {"loss": "bad.py:text"}}, "the loss must return a tensor, one number per example, not str"),
        ({"problem": {"loss": "bad.py:broken"}}, "bad.py:broken raised AttributeError"),
        ({"problem": {"metrics": ["bad.py:flat"]}}, "the metric flat must be one number"),
        ({"problem": {"metrics": ["bad.py:broken"]}}, "bad.py:broken raised AttributeError"),
        ({"problem": {"loss": "mse"}}, "digits has numbers as inputs and classes as targets"),
        ({"problem": {"loss": "mean_squared"}}, "unknown loss 'mean_squared'"),
    ],
)
def test_mistakes_in_own_code_are_a_sentence(sections: dict[str, dict[str, object]], message: str) -> None:
    Path("bad.py").write_text(MISTAKES)
    with pytest.raises(UserError, match=message):
        assemble(config(**sections))


# data


def test_own_clients_have_their_names_and_the_test_set() -> None:
    found = assemble(config(
        data={"source": "load.py:clients", "count": 4}, model={"name": "linear"}, problem={"loss": "mse"}
    ))  # fmt: skip
    assert found.problem.num_clients == 4 and found.problem.dim == 5 and len(found.data or "") == 64
    assert set(found.problem.evaluate(found.problem.init(np.random.default_rng(0))).public) == {
        "test_loss", "test_rmse", "test_mae",
    }  # fmt: skip
    assert found.config["data"] == {
        "source": "load.py:clients", "classes": None, "inputs": "numbers", "targets": "values", "count": 4, "rows": 20,
    }  # fmt: skip
    again = assemble(read(written("again.toml", found.config)))
    assert again.config == found.config and again.data == found.data


def test_own_examples_are_dealt_out_like_those_of_a_file() -> None:
    linear = {"model": {"name": "linear"}, "problem": {}}
    dealt = assemble(config(data={"source": "load.py:together", "clients": 5, "partition": "dirichlet"}, **linear))
    named = assemble(config(data={"source": "load.py:with_ids"}, **linear))
    assert dealt.problem.num_clients == 5 and named.problem.num_clients == 4
    assert named.config["data"]["partition"] == "by_ids"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "must return .* not NoneType"),
        ("{}", "expected at least one client, got none"),
        ("[]", "expected at least one client, got none"),
        ("{'a': (np.ones((2, 3)),)}", "client a: expected a pair"),
        ("(np.ones((2, 3)), np.ones(3))", "got 2 in x and 3 in y"),
        ("(np.ones((2, 3)), [0.5, 1])", "whole numbers from 0"),
        ("(np.ones((2, 3)), [0, 1], [1])", "one id in client for each of the 2 examples"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_data_of_the_wrong_form_are_refused(returned: str, message: str) -> None:
    Path("data.py").write_text(f"import numpy as np\ndef load(): return {returned}")
    with pytest.raises(UserError, match=message):
        assemble(config(data={"source": "data.py:load"}, model={"name": "linear"}, problem={}))


def test_own_data_that_changed_end_a_run(fednormec_: Command) -> None:
    asked = config(
        data={"source": "load.py:clients"}, model={"name": "linear"}, problem={"loss": "mse"},
        run={"rounds": 2, "keep_checkpoint": True},
    )  # fmt: skip
    Path("rows.txt").write_text("20")
    text = LOAD.replace("rng = np.random.default_rng(0)", "rng = np.random.default_rng(int(np.loadtxt('rows.txt')))")
    Path("load.py").write_text(text)
    assert fednormec_("run", written("my.toml", asked), "--out", "runs/a", "--quiet").code == 0
    Path("runs/a/summary.json").unlink()
    Path("rows.txt").write_text("21")
    said = fednormec_("run", "--resume", "runs/a", "--quiet")
    assert said.code == 2 and "the data in load.py:clients are not those that the run began with" in said.err


def test_settings_that_deal_out_are_refused_where_clients_have_their_own() -> None:
    for key, value in {"partition": "iid", "clients": 3, "test_fraction": 0.1}.items():
        with pytest.raises(UserError, match=key):
            assemble(config(data={"source": "load.py:clients", key: value}, problem={"loss": "mse"}))


# elsewhere


def test_a_sweep_over_settings_of_an_own_model(here: None, fednormec_: Command) -> None:
    asked = written("my.toml", BASE)
    said = fednormec_("sweep", asked, "--over", "model.width=[2,4]", "--out", "sweeps/a", "--quiet")
    assert said.code == 0 and "model.width" in said.out


@pytest.fixture
def federation(tmp_path: Path) -> Callable[..., Path]:
    def made(**sections: dict[str, object]) -> Path:
        asked: Config = {
            "model": {"name": "net.py:build"}, "problem": {"loss": "net.py:smooth"}, "method": {"name": "fed_avg"},
            "local": {"step": 0.1},
            "run": {"rounds": 2}, **sections,
        }  # fmt: skip
        (tmp_path / "asked.toml").write_text(dump(asked))
        return make(tmp_path / "fed", ["a", "b"], [3], None, "localhost:9443", tmp_path / "asked.toml")

    return made


def test_a_federation_hands_the_code_over_and_agrees_on_it(federation: Callable[..., Path], tmp_path: Path) -> None:
    folder = federation()
    for name in ("net.py", "layers.py"):  # from here on only the copies count
        (tmp_path / name).unlink()
    agreed = for_server(read_federation(folder), folder).agreed
    data = Examples(np.ones((4, 3)), np.arange(4))
    client = folder / "clients" / "a"
    assert for_client(read_federation(client), "a", data, client).agreed == agreed
    (client / "layers.py").write_text(LAYERS + "\n")
    with pytest.raises(UserError, match="layers.py is not the file that the settings were made with"):
        for_client(read_federation(client), "a", data, client)
    found = read_federation(client)
    del found["code"]  # whoever takes the digest out as well has another agreement, which the server refuses
    assert for_client(found, "a", data, client).agreed != agreed


def test_a_federation_of_values_and_tokens(federation: Callable[..., Path], tmp_path: Path) -> None:
    folder = federation(model={"name": "linear"}, problem={"loss": "mse"})
    found = read_federation(folder)
    assert "classes" not in found["federation"] and for_server(found, folder).experiment.problem.dim == 4
    values = Examples(np.ones((4, 3)), np.linspace(0, 1, 4), Kind(targets="values"))
    assert for_client(found, "a", values, folder).experiment.problem.dim == 4
    with pytest.raises(UserError, match=r"agreed on targets of shape \(\), these data have \(2,\)"):
        for_client(found, "a", Examples(np.ones((4, 3)), np.ones((4, 2)), Kind(targets="values")), folder)
