"""Settings survive a change of name: what both constructors take is never lost, and what is dropped is said."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from command import Command, sets
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import PLAIN
from sweep_cells import quadratic, written

import fednormec.audit.asked
import fednormec.config.settings
import fednormec.theory.answer
from fednormec.algorithms.methods import METHODS
from fednormec.config.assemble import LOCALS, PARTICIPATIONS, problems
from fednormec.config.constructors import CONSTRUCTORS
from fednormec.config.datasets import PARTITIONS
from fednormec.config.own import Loading
from fednormec.config.schema import Changed, Config, changed, changed_saying, check, read, read_saying
from fednormec.config.settings import DATA_SETTINGS, QUICKSTART, RunSettings
from fednormec.config.signatures import fits, in_words
from fednormec.data.contents import Contents, contents
from fednormec.data.names import BUILT_IN, FEDERATIONS
from fednormec.errors import UserError
from fednormec.problems.models import MODELS
from fednormec.sweeps.grid import dropped, grid

pytestmark = pytest.mark.usefixtures("undrawn")
some = settings(deadline=None, max_examples=200, database=None)
X, Y = np.zeros((60, 5), np.float32), np.arange(60) % 3


# the issue, to the letter


@pytest.mark.long
def test_another_partition_keeps_the_500_clients(fednormec_: Command) -> None:
    assert read(QUICKSTART)["data"]["clients"] == 500
    said = fednormec_("config", *sets("data.partition=dirichlet"))
    assert (said.code, said.err) == (0, "")
    assert 'partition = "dirichlet"\n' in said.out and "\nclients = 500\n" in said.out


def test_another_local_operator_keeps_the_step(fednormec_: Command) -> None:
    said = fednormec_("config", *sets("local.name=sgd"))
    assert (said.code, said.err) == (0, "")
    assert '[local]\nname = "sgd"\nstep = 0.5\nsteps = 5\nbatch_size = 32\n' in said.out


def test_what_cannot_be_kept_is_said(fednormec_: Command) -> None:
    said = fednormec_("config", *sets("local.name=ig", "method.name=clip21"))
    assert said.code == 0
    assert said.err.splitlines() == [
        "note: --set local.name=ig drops local.steps, which ig does not take.",
        "note: --set method.name=clip21 drops method.alpha, method.beta and method.server_normalization, which clip21 "
        "does not take.",
    ]


# every constructor of every section


class Named(NamedTuple):
    """A constructor as its signature has it."""

    hints: dict[str, Any]
    defaults: dict[str, Any]


def named(build: Callable[..., Any], supplied: int) -> Named:
    found = list(inspect.signature(build).parameters.values())[supplied:]
    return Named({p.name: get_type_hints(build)[p.name] for p in found}, {p.name: p.default for p in found})


def no_data() -> Any:
    raise AssertionError("looked at, and not called")


PROBLEMS = problems({}, {}, RunSettings(), no_data, Loading())
TABLES: dict[str, dict[str, Named]] = {
    "problem": {name: named(build, 0) for name, build in PROBLEMS.items()},
    "data": {name: named(build, 3) for name, build in PARTITIONS.items()},
    "model": {name: named(build, 2) for name, build in MODELS.items()},
    "local": {name: named(build, 0) for name, build in LOCALS.items()},
    "method": {name: named(method.build, int(method.takes_local)) for name, method in METHODS.items()},
    "participation": {name: named(build, 0) for name, build in PARTICIPATIONS.items()},
}
BOUNDS = {"clip": {"alpha", "k"}, "normalize": {"k"}, "top_k": {"tau", "alpha"}}  # and what each has no use for
PAIRS = [(section, old, new) for section, table in TABLES.items() for old in table for new in table if old != new]


def values(hint: Any) -> st.SearchStrategy[Any]:
    kind = get_args(hint)[0] if type(None) in get_args(hint) else hint
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    simple = {int: st.integers(1, 9), float: st.floats(0.1, 9), bool: st.booleans(), str: st.just("group")}
    inner = str if str in get_args(kind) else int  # of a sequence
    return simple[kind] if kind in simple else st.lists(simple[inner], min_size=1, max_size=3)


def without_use(section: str, table: Named, chosen: dict[str, Any]) -> set[str]:
    """The settings of a bound that is another than the one chosen."""
    if section != "method" or "bound" not in table.hints:
        return set()
    return BOUNDS[chosen.get("bound", table.defaults["bound"])]


@st.composite
def sections(draw: st.DrawFn, section: str, name: str) -> dict[str, Any]:
    """Settings that this constructor takes, all or some."""
    table = TABLES[section][name]
    chosen = {key: draw(values(hint)) for key, hint in table.hints.items() if draw(st.booleans())}
    useless = without_use(section, table, chosen)
    own = {key: value for key, value in chosen.items() if key not in useless}
    if section == "data":
        own |= {key: draw(st.integers(1, 9)) for key in ("test_examples", "classes") if draw(st.booleans())}
        return {"partition": name, **own}
    return {"name": name, **own}


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A section, its settings, and another choice with some of its settings."""
    section, old, new = draw(st.sampled_from(PAIRS))
    return section, draw(sections(section, old)), draw(sections(section, new))


def choice(section: str) -> str:
    return "partition" if section == "data" else "name"


def set_(section: str, old: dict[str, Any], new: dict[str, Any]) -> Changed:
    return changed_saying({section: old}, {f"{section}.{key}": value for key, value in new.items()}, "--set")


def both_take(section: str, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The settings so far that the new constructor takes, too, by its signature; the values are of its types."""
    table = TABLES[section][new[choice(section)]]
    beside = dict.fromkeys(DATA_SETTINGS, Any) if section == "data" else {}
    found = {
        key: value
        for key, value in old.items()
        if key != choice(section) and (key in beside or (key in table.hints and of_type(value, table.hints[key])))
    }
    useless = without_use(section, table, found | new)
    if section == "data" and new["partition"] == "by_ids":
        useless = {"examples"}
    return {key: value for key, value in found.items() if key not in useless}


def of_type(value: Any, hint: Any) -> bool:
    """Constructors that share the name of a setting share its type, but for lists of words."""
    return get_origin(hint) is not Literal or value in get_args(hint)


def said_of(section: str, sentences: list[str]) -> set[str]:
    return {key for one in sentences for key in re.findall(rf"\b{section}\.(\w+)(?!=)\b", one.partition(" drops ")[2])}


@pytest.mark.long
@some
@given(changes())
def test_nothing_that_both_take_is_lost_and_the_rest_is_said(
    change: tuple[str, dict[str, Any], dict[str, Any]],
) -> None:
    section, old, new = change
    config, sentences = set_(section, old, new)
    kept = both_take(section, old, new)
    assert config[section] == {**kept, **new}
    gone = {key for key in old if key not in config[section]}
    assert said_of(section, sentences) == gone
    assert len(sentences) == (1 if gone else 0)
    for one in sentences:
        assert one.startswith(f"--set {section}.{choice(section)}={new[choice(section)]} ")
        assert "does not take" in one and one.endswith(".") and "\n" not in one


@pytest.mark.long
@some
@given(changes())
def test_what_is_kept_has_a_place_in_the_new_constructor(change: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    section, old, new = change
    found = {key: value for key, value in set_(section, old, new).config[section].items() if key != choice(section)}
    constructor = CONSTRUCTORS[section][new[choice(section)]]
    needed = {key: 1 for key, one in constructor.parameters.items() if one.required} | found
    check("here", needed, constructor.build, constructor.given, DATA_SETTINGS if section == "data" else ())


@pytest.mark.long
@some
@given(changes())
def test_there_and_back_leaves_what_both_take(change: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    section, old, new = change
    key = choice(section)
    there = set_(section, old, {key: new[key]}).config[section]
    back = set_(section, there, {key: old[key]}).config[section]
    both = both_take(section, old, {key: new[key]})
    assert back == {**both_take(section, both, {key: old[key]}), key: old[key]}
    if not (section == "method" and {"tau", "alpha", "k", "bound"} & set(old)):
        assert back == {**both, key: old[key]}


@pytest.mark.long
@some
@given(changes(), st.randoms())
def test_the_order_in_which_settings_are_given_does_not_matter(change: Any, random: Any) -> None:
    section, old, new = change
    shuffled = list(new)
    random.shuffle(shuffled)
    assert set_(section, old, new) == set_(section, old, {key: new[key] for key in shuffled})


@pytest.mark.long
@some
@given(changes(), st.sampled_from(["no_such_name", "my_models.py:build", "package.module:build", "", 3, ["gd"], True]))
def test_of_a_name_that_is_in_no_table_everything_is_kept(change: Any, name: Any) -> None:
    section, old, new = change
    key = choice(section)
    config, sentences = set_(section, old, {key: name})
    assert (config[section], sentences) == ({**old, key: name}, [])
    again, dropped_now = set_(section, {**old, key: name}, {key: new[key]})  # and back into a table
    assert again[section] == {**both_take(section, old, {key: new[key]}), key: new[key]}
    assert said_of(section, dropped_now) == set(old) - set(again[section])


def test_own_settings_of_an_own_name_go_with_it() -> None:
    config, sentences = set_("model", {"name": "mine.py:build", "width": 3, "hidden": [5]}, {"name": "mlp"})
    assert config["model"] == {"name": "mlp", "hidden": [5]}
    assert sentences == ["--set model.name=mlp drops model.width, which mlp does not take."]


def test_a_mistyped_setting_is_not_dropped_but_refused() -> None:
    config, sentences = set_("local", {"name": "gd", "step": 1.0, "setps": 3}, {"name": "sgd"})
    assert (config["local"], sentences) == ({"name": "sgd", "step": 1.0, "setps": 3}, [])
    with pytest.raises(UserError, match="unknown setting in here 'setps'; did you mean 'steps'?"):
        check("here", {"step": 1.0, "setps": 3}, LOCALS["sgd"])


def test_a_word_of_another_list_is_not_kept() -> None:
    old = {"name": "ig", "step": 1.0, "order": "reshuffle"}
    config, sentences = set_("local", old, {"name": "sgd"})
    assert config["local"] == {"name": "sgd", "step": 1.0}
    assert sentences == [
        '--set local.name=sgd drops local.order, which sgd does not take: its order is one of "fresh", "passes".'
    ]
    assert set_("local", old, {"order": "passes", "name": "sgd"}) == (
        {"local": {"name": "sgd", "step": 1.0, "order": "passes"}}, [],
    )  # fmt: skip


def test_another_bound_keeps_what_it_uses() -> None:
    old = {"name": "ef14", "bound": "normalize", "tau": 2.0, "alpha": 0.5, "server_step": 0.3}
    config, sentences = set_("method", old, {"bound": "clip"})
    assert config["method"] == {"name": "ef14", "bound": "clip", "tau": 2.0, "server_step": 0.3}
    assert sentences == ["--set method.bound=clip drops method.alpha, which clip does not take."]
    for name, method in METHODS.items():
        quickstart = changed(read(QUICKSTART), {"method.name": name})["method"]
        own = {key: value for key, value in quickstart.items() if key != "name"}
        supplied = (LOCALS["gd"](1.0),) if method.takes_local else ()
        method.build(*supplied, **own)  # a kept setting that has no meaning would be refused


def test_the_same_choice_again_drops_nothing() -> None:
    for section, table in TABLES.items():
        for name in table:
            old = {choice(section): name, "nonsense": 3}
            assert set_(section, old, {choice(section): name}) == ({section: old}, [])


def test_the_last_of_two_names_decides() -> None:
    config, sentences = read_saying(PLAIN, ["model.name=linear", "model.name=mlp"])
    assert (config["model"], sentences) == ({"name": "mlp", "hidden": [64]}, [])


def test_noise_of_ones_own_replaces_the_budget_without_a_word() -> None:
    config, sentences = read_saying(QUICKSTART, ["privacy.noise_std=2"])
    assert "epsilon" not in config["privacy"] and sentences == []
    assert read(QUICKSTART, ["privacy.epsilon=1", "privacy.noise_std=2"])["privacy"]["epsilon"] == 1


def test_the_config_itself_stays_as_it_was() -> None:
    config = read(QUICKSTART)
    changed(config, {"method.name": "clip21", "data.partition": "shards"})
    assert config == read(QUICKSTART)


# another source


def files(folder: Path) -> None:
    np.savez(folder / "plain.npz", x=X, y=Y)
    np.savez(folder / "owned.npz", x=X, y=Y, client=Y)
    np.savez_compressed(folder / "tested.npz", x=X, y=Y, x_test=X, y_test=Y)
    np.savez(folder / "both.npz", x=X, y=Y, client=Y, x_test=X, y_test=Y)
    (folder / "damaged.npz").write_bytes(b"PK\x03\x04 and no more")
    (folder / "clients").mkdir()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("digits", Contents()),
        ("cifar10", Contents(test=True)),
        ("fashion-mnist", Contents(test=True)),
        ("plain.npz", Contents()),
        ("owned.npz", Contents(clients=True)),
        ("tested.npz", Contents(test=True)),
        ("both.npz", Contents(clients=True, test=True)),
        ("clients", Contents(folder=True)),
        ("damaged.npz", None),
        ("nowhere.npz", None),
        ("load.py:examples", None),
        ("a\0b", None),
        ("a" * 5000, None),
        (3, None),
        (["digits"], None),
    ],
)
def test_what_a_source_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, expected: Any) -> None:
    files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert contents(source) == expected
    assert contents("digits") == Contents() and set(BUILT_IN) == {"digits", "cifar10", "fashion_mnist", *FEDERATIONS}


DEALT = {"partition": "dirichlet", "clients": 7, "concentration": 0.3}
ASIDE = {"test_fraction": 0.3}


@pytest.mark.parametrize(
    ("source", "old", "kept", "why"),
    [
        ("cifar10", {"source": "digits", **DEALT, "examples": 50}, {**DEALT, "examples": 50}, None),
        ("plain.npz", {"source": "digits", **DEALT, **ASIDE}, {**DEALT, **ASIDE}, None),
        ("plain.npz", DEALT, DEALT, None),
        ("nowhere.npz", {"source": "digits", **DEALT}, DEALT, None),
        ("load.py:examples", {"source": "digits", **DEALT, **ASIDE}, ASIDE, "it names its own clients"),
        ("mine.csv", {"source": "digits", **DEALT, **ASIDE}, {**DEALT, **ASIDE}, None),
        ("mine.csv", {"source": "digits", **DEALT, "client": "who"}, {"client": "who"}, "it names its own clients"),
        ("digits", {"source": "plain.npz", **DEALT}, DEALT, None),
        ("digits", {"source": "nowhere.npz", "clients": 7, "examples": 9}, {"clients": 7, "examples": 9}, None),
        ("cifar10", {"source": "digits", **ASIDE}, {}, "it brings its own test set"),
        ("cifar10", {"source": "digits", "test_fraction": 0.0}, {"test_fraction": 0.0}, None),
        ("tested.npz", {"source": "digits", **ASIDE, "classes": 4}, {"classes": 4}, "it brings its own"),
        ("cifar10", {"pool": True, **ASIDE}, {"pool": True, **ASIDE}, None),
        ("owned.npz", {"source": "digits", **DEALT, **ASIDE}, ASIDE, "it names its own"),
        ("owned.npz", {"source": "digits", "examples": 9, "classes": 4}, {"classes": 4}, "it names its own clients"),
        ("owned.npz", {"source": "both.npz", **DEALT}, DEALT, None),
        ("both.npz", {"source": "digits", **DEALT, **ASIDE}, {}, "clients and it brings its own test set"),
        ("both.npz", {"source": "digits", "pool": True}, {}, "no client owns its test set"),
        ("digits", {"source": "owned.npz", "partition": "by_ids"}, {}, "it names no clients"),
        ("clients", {"source": "digits", **DEALT, "classes": 4}, {"classes": 4}, "each file in it is a client"),
        ("digits", {"source": "clients", "classes": 4}, {"classes": 4}, None),
        ("fashion-mnist", {"source": "fashion_mnist", **DEALT, **ASIDE}, {**DEALT, **ASIDE}, None),
    ],
)  # fmt: skip
def test_another_source_keeps_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, old: Any, kept: Any, why: str | None
) -> None:
    files(tmp_path)
    monkeypatch.chdir(tmp_path)
    config, sentences = set_("data", old, {"source": source})
    assert config["data"] == {"source": source, **kept}
    assert said_of("data", sentences) == set(old) - set(config["data"])
    assert len(sentences) == (why is not None)
    if why is not None:
        assert sentences[0].startswith(f"--set data.source={source} drops ") and why in sentences[0]


def test_what_is_given_with_another_source_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path)
    monkeypatch.chdir(tmp_path)
    old = {"source": "digits", **DEALT}
    whole = set_("data", old, {"source": "owned.npz", "partition": "iid"})
    assert whole.config["data"] == {"source": "owned.npz", "partition": "iid", "clients": 7}
    assert whole.dropped == [
        "--set data.source=owned.npz --set data.partition=iid drops data.concentration, which owned.npz with iid does "
        "not take."
    ]
    assert set_("data", old, {"clients": 3, "source": "owned.npz"}).config["data"]["clients"] == 3  # to be refused
    assert set_("data", old, {"source": "cifar10", "test_fraction": 0.3}).config["data"]["test_fraction"] == 0.3


def test_own_data_that_name_their_clients_need_no_other_setting(fednormec_: Command, tmp_path: Path) -> None:
    files(tmp_path)
    said = fednormec_("config", *sets("data.source=owned.npz"))
    assert said.code == 0 and 'partition = "by_ids"' in said.out
    drops = "--set data.source=owned.npz drops data.partition and data.clients, which owned.npz does not take"
    assert said.err == f"note: {drops}: it names its own clients.\n"


# where it is said


def notes(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("note: ")]


def test_a_run_says_it_once_after_all_was_checked(
    fednormec_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fednormec.config.settings, "QUICKSTART", PLAIN)
    over = sets("run.rounds=1", "model.name=linear")
    said = fednormec_("run", *over, "--out", "one")
    assert notes(said.err) == ["note: --set model.name=linear drops model.hidden, which linear does not take."]
    assert said.err.splitlines()[0] == notes(said.err)[0]
    assert notes(fednormec_("run", *over, "--quiet", "--out", "two").err) == []
    for mistake in (sets("run.rounds=0"), ["--out", "one"], sets("data.source=nowhere.npz")):
        said = fednormec_("run", *over, *mistake)
        assert said.code == 2 and len(said.err.splitlines()) == 1 and notes(said.err) == []


def test_theory_and_audit_say_it_when_they_have_an_answer(fednormec_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """With answers that take no time."""
    drops = "drops local.steps, which ig does not take."
    seen: list[Config] = []

    def found(config: Config, *_: Any) -> SimpleNamespace:
        seen.append(config)
        return SimpleNamespace(text=lambda: "an answer", violated=False)

    with monkeypatch.context() as patch:
        patch.setattr(fednormec.theory.answer, "answer", found)
        patch.setattr(fednormec.audit.asked, "audited", found)
        for command in ("theory", "audit"):
            said = fednormec_(command, *sets("local.name=ig"))
            assert (said.code, said.out) == (0, "an answer\n")
            assert notes(said.err) == [f"note: --set local.name=ig {drops}"]
        assert notes(fednormec_("audit", "--quiet", *sets("local.name=ig")).err) == []
    assert [config["local"] for config in seen] == [{"name": "ig", "step": 0.5}] * 3
    for command in ("theory", "audit"):
        said = fednormec_(command, *sets("local.name=ig", "method.betta=1"))
        assert said.code == 2 and len(said.err.splitlines()) == 1


METHOD = {"name": "fed_normec", "alpha": 0.5, "beta": 0.1, "server_step": 0.7}
AXES = {"method.name": ["fed_normec", "clip21", "ef14"], "run.seed": [0, 1, 2], "local.name": ["gd", "sgd"]}


def test_the_cells_of_a_sweep_keep_what_their_constructors_take() -> None:
    config: Config = quadratic(method=METHOD)
    config["local"] |= {"steps": 4}
    expected = {
        "fed_normec": METHOD,
        "clip21": {"name": "clip21", "server_step": 0.7},
        "ef14": {"name": "ef14", "server_step": 0.7},
    }
    cells = grid(config, AXES)
    assert len(cells) == 18
    for cell in cells:
        assert cell.config["method"] == expected[cell.settings["method.name"]]
        assert cell.config["local"] == {"name": cell.settings["local.name"], "step": 0.1, "steps": 4}
        assert cell.config == changed(config, cell.settings)


@pytest.mark.long
def test_a_sweep_says_once_what_its_cells_drop(fednormec_: Command, here: None, tmp_path: Path) -> None:
    config = quadratic(rounds=1, method=METHOD)
    expected = [
        "[sweep] method.name=clip21 drops method.alpha and method.beta, which clip21 does not take.",
        "[sweep] method.name=ef14 drops method.alpha and method.beta, which ef14 does not take: its bound is clip.",
    ]
    assert dropped(config, AXES) == expected
    given = written(tmp_path / "my.toml", config, 'method.name = ["fed_normec", "clip21", "ef14"]\nrun.seed = [0, 1]')
    base = sets("problem.name=quadratic", "participation.name=full")
    for more in (["--list"], ["--out", "first"]):
        said = fednormec_("sweep", given, *base, *more)
        assert said.code == 0, said.err
        assert notes(said.err) == [f"note: {one}" for one in expected]
    assert notes(fednormec_("sweep", given, "--quiet", "--list").err) == []
    said = fednormec_("sweep", given, "--metric", "train_los", "--out", "second")
    assert said.code == 2 and len(said.err.splitlines()) == 1


def test_a_sweep_says_what_set_drops(fednormec_: Command, tmp_path: Path) -> None:
    given = written(tmp_path / "my.toml", quadratic(method=METHOD), "run.seed = [0, 1]")
    said = fednormec_("sweep", given, "--list", *sets("method.name=fed_avg"))
    assert notes(said.err) == [
        "note: --set method.name=fed_avg drops method.alpha and method.beta, which fed_avg does not take."
    ]


# types


@pytest.mark.parametrize(
    ("hint", "words", "good", "bad"),
    [
        (int, "a whole number", [3], [3.0, "3", True, [3]]),
        (float, "a number", [3, 0.5], ["3", False]),
        (bool, "true or false", [True], [1, "true"]),
        (str, "a text", ["a"], [1, ["a"]]),
        (int | None, "a whole number", [3], [0.5]),
        (Literal["a", "b"], 'one of "a", "b"', ["a"], ["c", 1]),
        (list[int], "a list of whole numbers", [[], [1]], [1, [0.5]]),
        (tuple[float, ...] | None, "a list of numbers", [[1, 0.5]], [1.0]),
        (list[str], "a list of texts", [["a"]], [[1]]),
    ],
)
def test_a_type_in_words_is_what_is_taken(hint: Any, words: str, good: list[Any], bad: list[Any]) -> None:
    assert in_words(hint) == words
    assert all(fits(value, hint) for value in good)
    assert not any(fits(value, hint) for value in bad)
