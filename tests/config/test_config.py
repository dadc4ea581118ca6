"""Configs: what is asked is what is built, it reads back as it was, and no edit brings anything but a sentence."""

import inspect
import tomllib
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import PLAIN

import fednormec as fn
import fednormec.config.datasets
from fednormec.algorithms.faults import Faults
from fednormec.algorithms.methods import METHODS
from fednormec.algorithms.optimizers import OPTIMIZERS
from fednormec.config.assemble import LOCALS, PARTICIPATIONS, Experiment, assemble
from fednormec.config.datasets import PARTITIONS, Held, _dealt, _pooled
from fednormec.config.schema import Call, check, dump, read
from fednormec.config.settings import DEFAULT_NAMES, SECTIONS, DataSettings, GivenConstants, RunSettings, ServerSettings
from fednormec.core.randomness import generator
from fednormec.data import (
    Examples,
    FederatedData,
    NpzData,
    federate,
    from_arrays,
    iid,
    split,
)
from fednormec.errors import UserError
from fednormec.federation.agreement import FederationSettings
from fednormec.privacy.mechanism import Plan
from fednormec.problems.models import MODELS, TOKEN_MODELS
from fednormec.runs.start import start

X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])
quick = settings(deadline=None, max_examples=200, database=None)
many = settings(deadline=None, max_examples=400, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def _few_digits() -> Iterator[None]:
    """Sixty digits, read once: these tests are about configs."""
    digits = cache(lambda: fn.data.digits().take(np.arange(60)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fednormec.config.datasets, "digits", digits)
        yield


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "given.toml"
        path.write_bytes(text.encode())
        return path

    return write


def nothing(number: int, plan: Plan) -> None:
    pass


def quickstart(*overrides: str) -> Experiment:
    return assemble(read(PLAIN, overrides))


def same_again(experiment: Experiment, folder: Path) -> bool:
    """Whether the resolved config, written and read, resolves to itself."""
    path = folder / "resolved.toml"
    path.write_text(dump(experiment.config), encoding="utf-8")
    return assemble(read(path)).config == experiment.config


# dump and read


SCALARS = st.one_of(
    st.text(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.sampled_from(["", "\"\\'\n"]),
)


@pytest.mark.long
@quick
@given(st.dictionaries(st.sampled_from(list("abcdef")), st.one_of(SCALARS, st.lists(SCALARS), st.none())))
def test_every_value_reads_back_as_it_was(settings: dict[str, Any]) -> None:
    back = tomllib.loads(dump({"run": settings}))["run"]
    kept = {key: value for key, value in settings.items() if value is not None}
    assert back == kept
    assert {key: type(value) for key, value in back.items()} == {key: type(value) for key, value in kept.items()}


def test_nan_and_control_characters_read_back() -> None:
    text = "".join(map(chr, range(0x250))) + "\u2028\ufeff😀"
    back = tomllib.loads(dump({"run": {"nan": float("nan"), "text": text}}))["run"]
    assert np.isnan(back["nan"])
    assert back["text"] == text


def test_a_setting_without_a_value_is_left_out() -> None:
    assert dump({"run": {"rounds": 3, "workers": None}}) == "[run]\nrounds = 3\n"


@pytest.mark.parametrize("name", METHODS)
def test_a_resolved_config_resolves_to_itself(tmp_path: Path, name: str) -> None:
    experiment = quickstart(f"method.name={name}", "participation.name=full", "run.evaluate_every=7")
    assert set(experiment.config) <= set(SECTIONS)
    assert same_again(experiment, tmp_path)


def test_the_resolved_config_spells_out_every_default() -> None:
    config = quickstart("local.name=sgd", "local.step=1", "privacy.noise_std=2").config
    assert config["local"] == {"name": "sgd", "step": 1.0, "steps": 5, "batch_size": 32, "order": "fresh"}
    assert config["privacy"] == asdict(fn.Privacy(noise_std=2.0))
    evaluation = {"statistics": "batch", "loss_examples": None, "per_client": False}
    task = {"loss": "cross_entropy", "metrics": None}
    assert config["problem"] == {"name": "neural", **task, "vectorize": "auto", "tile": None, **evaluation}
    assert config["data"]["test_fraction"] == 0.2


def test_an_empty_config_is_a_run() -> None:
    experiment = assemble({"local": {"step": 0.5}})
    assert {section: experiment.config[section]["name"] for section in DEFAULT_NAMES} == DEFAULT_NAMES
    assert experiment.run == RunSettings()


def test_a_byte_order_mark_and_windows_line_ends_are_no_trouble(written: Callable[[str], Path]) -> None:
    assert read(written("\ufeff[run]\r\nrounds = 3\r\n")) == {"run": {"rounds": 3}}


# --set


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.rounds=7", 7),
        ("run.rounds = 7 ", 7),
        ("run.rounds=-1_000", -1000),
        ("run.device=cpu", "cpu"),
        ('run.device="cpu"', "cpu"),
        ("run.device = cpu ", "cpu"),
        ("run.device=", ""),
        ("run.device=a=b", "a=b"),
        ("run.device=7.npz", "7.npz"),
        ("run.device=[1, 2]", [1, 2]),
        ("run.device=true", True),
        ("run.device=1e3", 1000.0),
    ],
)
def test_an_override_is_toml_or_else_a_text(override: str, value: object) -> None:
    key = override.partition("=")[0].strip().removeprefix("run.")
    found = read(PLAIN, [override])["run"][key]
    assert found == value
    assert type(found) is type(value)


def test_the_same_constructor_keeps_its_arguments(written: Callable[[str], Path]) -> None:
    asked = read(PLAIN)
    for override in ("method.name=fed_normec", 'method.name="fed_normec"', "model.name = mlp", "data.source=digits"):
        assert read(PLAIN, [override]) == asked
    unnamed = written("[method]\nbeta = 0.7\n")  # fed_normec, by default
    assert read(unnamed, ["method.name=fed_normec"])["method"]["beta"] == 0.7


def test_the_order_of_overrides_does_not_matter_to_a_choice() -> None:
    for first, second in [
        ("method.name=clip21", "method.tau=0.5"),
        ("data.partition=shards", "data.clients=3"),
        ("data.source=mine.npz", "data.clients=3"),
        ("data.source=mine.npz", "data.partition=iid"),
        ("participation.name=fixed_size", "participation.m=3"),
    ]:
        assert read(PLAIN, [first, second]) == read(PLAIN, [second, first])
    assert read(PLAIN, ["method.tau=0.5", "method.name=clip21"])["method"] == {
        "name": "clip21", "tau": 0.5, "server_step": 1.0,
    }  # fmt: skip


def test_the_last_of_two_overrides_holds() -> None:
    assert read(PLAIN, ["run.rounds=1", "run.rounds=2"])["run"]["rounds"] == 2
    assert read(PLAIN, ["model.name=linear", "model.name=resnet20"])["model"] == {"name": "resnet20"}


@pytest.mark.parametrize("override", ["rounds", "rounds=3", "run.=3", "=3", ".=", "", "run.rounds"])
def test_an_override_without_section_key_or_value_is_refused(override: str) -> None:
    with pytest.raises(UserError, match="--set takes section.key=value"):
        read(PLAIN, [override])


def test_an_override_that_is_no_text_is_refused() -> None:
    for override in ("data.source=\udcff.npz", 'data.source="\udcff"'):
        with pytest.raises(UserError, match="UTF-8"):
            read(PLAIN, [override])


# numbers and nesting beyond all reason


@pytest.mark.parametrize(
    "value",
    ["1" + "0" * 400, "9" * 5000, "0x" + "f" * 5000, "[" * 5000, "{a=" * 5000, str(2**63), f"[{2**64}]"],
    ids=lambda value: f"{value[:8]} and {len(value)} characters",
)
@pytest.mark.parametrize("key", ["local.step", "data.test_fraction", "run.seed", "model.hidden"])
def test_what_no_machine_holds_is_refused(written: Callable[[str], Path], key: str, value: str) -> None:
    with pytest.raises(UserError):
        quickstart(f"{key}={value}")
    section, _, name = key.partition(".")
    with pytest.raises(UserError, match="is not valid TOML"):
        read(written(f"[{section}]\n{name} = {value}\n"))


def test_a_table_nested_by_dots_is_refused(written: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match="nested too deeply"):
        read(written("[run]\nrounds" + ".a" * 3000 + " = 1\n"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.hidden=[1000000000000000]"],
        [f"model.hidden=[{2**63 - 1}]"],
        ["problem.name=quadratic", "problem.dim=1000000000000000"],
        ["problem.name=quadratic", "problem.clients=1000000000000000"],
        ["problem.name=quadratic", f"problem.parts={2**63 - 1}"],
    ],
)
def test_sizes_beyond_the_memory_are_refused(overrides: list[str]) -> None:
    with pytest.raises(UserError, match=r"cannot be made in the sizes asked for|GB, and this machine has \d"):
        quickstart(*overrides)


@pytest.mark.parametrize("device", ["meta", "hpu", "privateuseone", "mps", "nonsense", "", "cpu:-1", "a\nb"])
def test_a_device_that_cannot_compute_is_refused_in_a_few_words(device: str) -> None:
    with pytest.raises(UserError, match="cannot be used here") as caught:
        quickstart(f"run.device={device}")
    assert len(str(caught.value)) < 400


# whatever a user writes


def hints(build: Callable[..., Any], given: int = 0) -> dict[str, Any]:
    """The type of each setting that `build` takes; the first `given` are the program's."""
    return {key: get_type_hints(build)[key] for key in list(inspect.signature(build).parameters)[given:]}


QUADRATIC = {"clients": int, "dim": int, "parts": int, "heterogeneity": float, "condition": float}
NEURAL = {
    "loss": Literal["cross_entropy", "binary_cross_entropy", "mse", "huber", "loss.py:loss"],
    "metrics": Literal['["accuracy"]', '["auc", "top5"]', '["rmse", "mae"]', '["metric.py:own"]', "[]"],
    "vectorize": Literal["auto", "layers", "vmap", "loop"], "tile": int | None,
    "statistics": Literal["batch", "training"], "loss_examples": int | None,
}  # fmt: skip
TRAINED = {"trainable": list[str], "lora_rank": int, "lora_layers": list[str], "lora_alpha": float}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "problem": {"neural": NEURAL, "logistic": {"regularizer": float, "positive": list[int]}, "quadratic": QUADRATIC},
    "data": {
        name: {"test_fraction": float, "targets": Literal["classes", "values"]} | hints(build, 3)
        for name, build in PARTITIONS.items()
    },
    "features": {"own.py:extract": {"size": int}},
    "model": {name: TRAINED | hints(build, 2) for name, build in (MODELS | TOKEN_MODELS).items()},
    "local": {name: hints(build) for name, build in LOCALS.items()},
    "method": {name: hints(method.build, int(method.takes_local)) for name, method in METHODS.items()},
    "server": {name: hints(ServerSettings) | hints(row.build) for name, row in OPTIMIZERS.items()},
    "participation": {name: hints(build) for name, build in PARTICIPATIONS.items()},
    "privacy": {"": hints(fn.Privacy)},
    "constants": {"": hints(GivenConstants)},
    "faults": {"": hints(Faults)},
    "federation": {"": hints(FederationSettings)},
    "python": {"": {"method": str}},
    "run": {"": hints(RunSettings)},
    "code": {"": {"my.py": str}},
}
NEEDED = ("step", "m", "noise_std", "kind")
SMALL = st.integers(-1, 9)  # a size of 10^9 is valid and would fill the memory: for larger ones see above
HUGE = [10**15, 2**63 - 1, 2**64, -(2**63), 10**400]
TEXTS = [
    "meta",
    "digits",
    "1979-05-27",
    "{ a = 1 }",
    "nan",
    "-inf",
    "1e308",
    "true",
    "0x10",
    "''",
    "'",
    "a" * 300,
    "[" * 3000,
]
ANYTHING = st.one_of(
    SMALL.map(str),
    st.sampled_from(HUGE).map(str),
    st.sampled_from(HUGE).map(lambda size: f"[{size}]"),
    st.floats().map(repr),
    st.sampled_from(TEXTS),
    st.text(max_size=8),
    st.lists(st.one_of(SMALL, st.floats(), st.text(max_size=3)), max_size=3).map(str),
)


def fitting(hint: Any) -> st.SearchStrategy[str]:
    """Values of the type that is asked for."""
    if get_origin(hint) in (Union, types.UnionType):
        return fitting(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    simple = {
        float: st.floats(0, 1).map(repr),
        int: st.integers(1, 9).map(str),
        bool: st.sampled_from(["true", "false"]),
        str: st.sampled_from(["cpu", "group"]),
    }
    return simple[hint] if hint in simple else st.lists(st.integers(1, 9), min_size=1, max_size=3).map(str)


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    """Settings of some sections: most of a type that fits, some of any, now and then one that does not exist."""
    chosen = []
    for section in draw(st.sets(st.sampled_from(SECTIONS), min_size=1, max_size=3)):
        name = draw(st.sampled_from([*SETTINGS[section]]))
        if name:
            chosen.append(f"{section}.{'partition' if section == 'data' else 'name'}={name}")
        asked = {key: hint for key, hint in SETTINGS[section][name].items() if key in NEEDED or draw(st.booleans())}
        for key, hint in asked.items():
            odd = draw(st.integers(0, 9)) == 0
            chosen.append(f"{section}.{key}={draw(ANYTHING if odd else fitting(hint))}")
        if draw(st.integers(0, 19)) == 0:
            chosen.append(f"{section}.{draw(st.text(max_size=5))}={draw(ANYTHING)}")
    return draw(st.permutations(chosen))


@pytest.mark.long
@many
@given(overrides())
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, before the sentence: heterogeneity = 1e308
def test_any_setting_works_or_is_refused_in_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, chosen: list[str]
) -> None:
    try:
        experiment = quickstart(*chosen)
        start(experiment, fn.Threads(), nothing)
    except UserError as error:
        assert str(error)
    else:
        assert same_again(experiment, tmp_path_factory.getbasetemp())


PIECES = st.one_of(
    st.binary(min_size=1, max_size=3), st.sampled_from([b"=", b"[", b"]", b'"', b"\n", b".", b"-", b"0"])
)
EDITS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["insert", "replace", "delete"]), st.integers(0, 700), PIECES),
        st.tuples(st.sampled_from(["drop", "double", "move"]), st.integers(0, 40), st.just(b"")),
    ),
    min_size=1,
    max_size=4,
)


def edited(content: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    """Bytes put in, written over or taken out; lines dropped, doubled or moved to the end."""
    for kind, place, piece in edits:
        head, tail, lines = content[:place], content[place:], content.split(b"\n")
        above, line, below = lines[:place], lines[place : place + 1], lines[place + 1 :]
        content = {
            "insert": head + piece + tail,
            "replace": head + piece + tail[len(piece) :],
            "delete": head + tail[len(piece) :],
            "drop": b"\n".join(above + below),
            "double": b"\n".join(above + line + line + below),
            "move": b"\n".join(above + below + line),
        }[kind]
    return content


def modest(config: dict[str, dict[str, Any]]) -> bool:
    """Whether no layer is wide enough to fill the memory."""
    hidden = config.get("model", {}).get("hidden", [])
    return not isinstance(hidden, list) or all(not isinstance(n, int) or n < 10**5 for n in hidden)


@pytest.mark.long
@many
@given(EDITS)
def test_any_edit_of_the_quickstart_works_or_is_refused_in_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, int, bytes]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "edited.toml").write_bytes(edited(PLAIN.read_bytes(), edits))
    try:
        config = read(folder / "edited.toml")
        if not modest(config):
            return
        experiment = assemble(config)
        start(experiment, fn.Threads(), nothing)
    except UserError as error:
        assert str(error)
    else:
        assert same_again(experiment, folder)


# what a signature takes


def test_types_are_checked_and_nothing_but_whole_numbers_is_converted() -> None:
    def build(a: float, b: int | None = None, c: list[int] | None = None, d: bool = False) -> None: ...

    assert check("here", {"a": 3, "b": 4, "c": [1, 2], "d": True}, build) == {"a": 3.0, "b": 4, "c": (1, 2), "d": True}
    for bad in (
        {"a": True},
        {"a": "1"},
        {"a": 1, "b": 1.0},
        {"a": 1, "b": True},
        {"a": 1, "c": [1.0]},
        {"a": 1, "d": 1},
    ):
        with pytest.raises(UserError, match=r"^here: \w must be"):
            check("here", bad, build)
    with pytest.raises(UserError, match="here needs the setting 'a'"):
        check("here", {}, build)


# which examples are used


COUNT, TESTS = 40, 10
NUMBERED = np.arange(COUNT + TESTS, dtype=np.float64)[:, None]
HELD = NpzData(Examples(NUMBERED[:COUNT], np.arange(COUNT) % 4), Examples(NUMBERED[COUNT:], np.arange(TESTS) % 4), None)


def numbers(examples: Examples | None) -> list[int]:
    return [] if examples is None else [int(number) for number in examples.x[:, 0]]


def dealt(*, seed: int = 0, pool: bool = False, **settings: Any) -> FederatedData:
    held = _pooled(Held(*HELD), "iid") if pool else Held(*HELD)
    return _dealt(held, Call(PARTITIONS["iid"], {"clients": 5}), DataSettings(**settings), seed)


def trained_on(data: FederatedData) -> list[int]:
    return [number for client in data.clients for number in numbers(client)]


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_without_these_settings_the_data_are_dealt_out_as_ever(fraction: float) -> None:
    """Literally: split, take, deal, federate; every array bit for bit and in its order."""
    held = HELD if fraction == 0 else HELD._replace(test=None)
    data = _dealt(Held(*held), Call(PARTITIONS["iid"], {"clients": 5}), DataSettings(test_fraction=fraction), 3)
    kept, aside = split(COUNT, fraction, generator(3, "split"))
    train, test = held.train.take(kept), held.train.take(aside) if fraction else held.test
    expected = federate(train, test, iid(len(train), 5, generator(3, "partition")))
    assert trained_on(data) == trained_on(expected)
    assert [client.y.tolist() for client in data.clients] == [client.y.tolist() for client in expected.clients]
    assert numbers(data.test) == numbers(expected.test) != []


@pytest.mark.long
@quick
@given(st.integers(5, 40), st.integers(1, 10), st.integers(0, 2**32))
def test_so_many_examples_are_drawn_of_each_set(examples: int, test_examples: int, seed: int) -> None:
    data = dealt(examples=examples, test_examples=test_examples, seed=seed)
    train, test = trained_on(data), numbers(data.test)
    assert len(train) == len(set(train)) == examples and max(train) < COUNT
    assert len(test) == len(set(test)) == test_examples and min(test) >= COUNT
    again = dealt(examples=examples, test_examples=test_examples, seed=seed)
    assert (trained_on(again), numbers(again.test)) == (train, test)


@pytest.mark.long
@quick
@given(st.floats(0.05, 0.9), st.integers(0, 2**32))
def test_a_pool_is_split_anew(fraction: float, seed: int) -> None:
    data = dealt(pool=True, test_fraction=fraction, seed=seed)
    assert sorted(trained_on(data) + numbers(data.test)) == list(range(COUNT + TESTS))
    assert len(numbers(data.test)) == round(fraction * (COUNT + TESTS))
    labels = {int(x): int(y) for part in HELD[:2] for x, y in zip(part.x[:, 0], part.y, strict=True)}
    assert all(labels[int(x)] == y for client in data.clients for x, y in zip(client.x[:, 0], client.y, strict=True))


def test_every_example_is_drawn_equally_often() -> None:
    draws, hits = 600, np.zeros(COUNT + TESTS)
    for seed in range(draws):
        data = dealt(examples=10, test_examples=3, seed=seed)
        hits[trained_on(data) + numbers(data.test)] += 1
    for part, p in ((hits[:COUNT], 10 / COUNT), (hits[COUNT:], 3 / TESTS)):
        assert np.abs(part / draws - p).max() < 4 * np.sqrt(p * (1 - p) / draws)


def test_the_test_set_does_not_depend_on_how_many_examples_train() -> None:
    for pool in (False, True):
        tests = [
            numbers(dealt(pool=pool, test_fraction=0.2 * pool, examples=count, test_examples=4).test)
            for count in (None, 9, 30)
        ]
        assert tests[0] == tests[1] == tests[2]


@pytest.mark.parametrize(
    ("pool", "own_test", "fraction"), [(True, True, 0.1), (True, False, 0.1), (False, True, 0.0), (False, False, 0.2)]
)
def test_what_is_set_aside_is_spelled_out(tmp_path: Path, pool: bool, own_test: bool, fraction: float) -> None:
    test = {"x_test": HELD.test.x, "y_test": HELD.test.y} if own_test and HELD.test is not None else {}
    np.savez(tmp_path / "all.npz", x=HELD.train.x, y=HELD.train.y, **test)
    pooled = ["data.pool=true"] if pool else []
    experiment = quickstart(f"data.source={tmp_path / 'all.npz'}", "data.clients=3", "data.examples=20", *pooled)
    resolved = experiment.config["data"]
    assert (resolved["pool"], resolved["test_fraction"], resolved["examples"]) == (pool, fraction, 20)
    assert same_again(experiment, tmp_path)


def test_the_digits_can_be_pooled_drawn_and_tested_in_part(tmp_path: Path) -> None:
    experiment = quickstart("data.pool=true", "data.clients=4", "data.examples=30", "data.test_examples=5")
    expected = {"source": "digits", "partition": "dirichlet", "pool": True, "test_fraction": 0.1, "examples": 30}
    others = {"test_examples": 5, "classes": None, "clients": 4, "concentration": 0.5}
    others |= {"inputs": "numbers", "targets": "classes", "test": None}
    assert experiment.config["data"] == expected | others
    assert same_again(experiment, tmp_path)


# clients by name, and Python objects


def test_clients_keep_the_names_that_the_data_gave_them() -> None:
    held = Held(Examples(X, Y), None, np.array(["bob", "ann", "bob", "eve", "ann", "bob"]))
    data = _dealt(held, Call(PARTITIONS["by_ids"], {}), DataSettings(), seed=0)
    assert data.names == ("ann", "bob", "eve")
    assert [sorted(client.x[:, 0].tolist()) for client in data.clients] == [[2.0, 8.0], [0.0, 4.0, 10.0], [6.0]]
    others = _dealt(held, Call(PARTITIONS["iid"], {"clients": 2}), DataSettings(), seed=0)
    assert others.names == ("0", "1")


@pytest.mark.parametrize("names", [["10", "20", "30"], ["ann", "bob", "eve"], [b"x", b"y", b"z"], [-1.5, 0.5, 7.0]])
def test_what_the_clients_are_called_does_not_matter(tmp_path: Path, names: list[object]) -> None:
    ends = []
    for ids in (np.arange(3), np.array(names)):
        np.savez(tmp_path / "all.npz", x=X, y=Y, client=ids[[0, 1, 2, 0, 1, 2]])
        *_, last = start(
            quickstart(f"data.source={tmp_path / 'all.npz'}", "run.rounds=2", "data.test_fraction=0"),
            fn.Threads(),
            nothing,
        )
        ends.append(last.x)
    assert torch.equal(ends[0], ends[1])


def test_examples_pass_as_pairs() -> None:
    examples = Examples(X, Y)
    data = from_arrays([examples, (X, Y)], test=examples)
    assert data.clients[0] is data.test is examples
    assert np.array_equal(data.clients[1].x, data.clients[0].x)


def test_a_client_without_data_is_refused() -> None:
    for build in (from_arrays, lambda clients: fn.NeuralProblem(fn.models.linear((2,), 3), clients)):
        with pytest.raises(UserError, match="client 1.* no data"):
            build([(X, Y), (X[:0], Y[:0])])


def test_labels_beyond_the_outputs_are_refused() -> None:
    with pytest.raises(UserError, match="labels go up to 2: it needs 3"):
        fn.NeuralProblem(fn.models.linear((2,), 2), [(X, Y)])
