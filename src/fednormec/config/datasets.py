"""Reads the examples of [data], sets a test set aside and deals the rest out to clients."""

import difflib
import inspect
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fednormec.config.forms import KEYS, Asked, Form, form_of
from fednormec.config.own import SECONDS_TO_LOAD, Loading, is_own
from fednormec.config.schema import Call, Config, Section, check
from fednormec.config.settings import (
    DATA_SETTINGS,
    DEALING,
    DataSettings,
)
from fednormec.core.ids import numbered
from fednormec.core.randomness import generator
from fednormec.data import (
    FederatedData,
    Kind,
    by_ids,
    digits,
    dirichlet,
    federate,
    hold_out,
    iid,
    read_folder,
    read_npz,
    shards,
    split,
)
from fednormec.data.federations import FEDERATIONS, Federation, open_federation
from fednormec.data.images import IMAGE_SETS, open_images
from fednormec.data.names import BUILT_IN, built_in_name
from fednormec.data.sources import Takeable, given_data
from fednormec.errors import UserError, known

Parts = list[np.ndarray]
OTHERS = (".txt", ".dat", ".data", ".xls", ".xlsx", ".json", ".jsonl", ".feather", ".arrow", ".pkl", ".pickle", ".pt")
OF_CLIENTS = ("source", "classes", "inputs", "targets")  # settings that remain where clients have data of their own


class Loaded(NamedTuple):
    """Data of all clients; the digest of what code of the user's loaded, None for any other source."""

    data: FederatedData
    digest: str | None = None


def federated_data(config: Config, resolved: Config, seed: int, load: Loading) -> Loaded:
    """Returns the data that [data] describes, and adds that section to `resolved` with every default spelled out.

    Args:
        config: the sections of the config.
        resolved: what was resolved before.
        seed: seed of the partition.
        load: loads code of the user's.
    """
    given = config.get("data", {})
    asked = DataSettings(**check("[data]", {k: v for k, v in given.items() if k in DATA_SETTINGS}, DataSettings))
    source = built_in_name(asked.source)
    if source in FEDERATIONS:
        kind, classes = _kind_of(FEDERATIONS[source], given), asked.classes or FEDERATIONS[source].classes
        asked = replace(asked, inputs=kind.inputs, classes=classes)
    else:
        kind = Kind(asked.inputs, asked.targets or targets_of(config))
    asked = replace(asked, source=source, targets=kind.targets)
    others = {k: v for k, v in given.items() if k not in DATA_SETTINGS}
    if is_own(source) and not os.path.exists(source):
        return _from_code(config, resolved, asked, others, kind, seed, load)
    form = None if source in BUILT_IN else form_of(source)
    if form is not None:
        return _in_form(form, config, resolved, asked, others, kind, seed)
    _require_no_form(given, source)
    if source not in BUILT_IN and os.path.isdir(source):
        _require_nothing_to_deal(given, "from a folder, one file per client,", f"in the folder {source} each file is "
                                 "a client")  # fmt: skip
        resolved["data"] = {key: getattr(asked, key) for key in OF_CLIENTS}
        return Loaded(read_folder(source, asked.classes, kind))
    held = read_source(source, kind, raw="features" in config)
    return Loaded(_dealt_out(config, resolved, held, asked, others, seed))


def _dealt_out(
    config: Config, resolved: Config, held: "Held", asked: DataSettings, others: Section, seed: int
) -> FederatedData:
    """Deals a source out to clients; `others` are the settings of the partition."""
    partition = ("iid" if held.client_ids is None else "by_ids") if asked.partition is None else asked.partition
    known("partition", partition, PARTITIONS)
    if held.client_ids is not None and partition == "by_ids" and "clients" in others:
        raise UserError(f"[data] clients is for examples that are dealt out, but {asked.source} names a client for "
                        "each: leave it out.")  # fmt: skip
    if held.client_ids is not None:
        _require_own_data(partition, asked, private="privacy" in config)
    if asked.pool:
        held = _pooled(held, partition)
    if partition in ("dirichlet", "shards") and asked.targets == "values":
        raise UserError(f"partition = '{partition}' deals classes out, but the targets are values: take iid or by_ids.")
    fraction = _test_fraction(held, asked)
    deal = Call(PARTITIONS[partition], check(f"[data] {partition}", others, PARTITIONS[partition], 3, DATA_SETTINGS))
    asked = replace(asked, partition=partition, test_fraction=fraction)
    resolved["data"] = {**asdict(asked), **deal.arguments}
    return _dealt(held, deal, asked, seed)


def _in_form(
    form: Form, config: Config, resolved: Config, asked: DataSettings, others: Section, kind: Kind, seed: int
) -> Loaded:
    """Returns the data of a table or a folder of images, whose constants are then spelled out."""
    for key in others:
        known("setting in [data]", key, [*DATA_SETTINGS, *form.keys, *DEALING])
    settings = form.settings(asked.source, {key: value for key, value in others.items() if key in form.keys})
    read = form.read(Asked(asked.source, asked.test, kind, asked.classes, "privacy" in config), settings)
    rest = {key: value for key, value in others.items() if key not in form.keys}
    asked = replace(asked, classes=read.classes)
    data = _dealt_out(config, resolved, Held(read.train, read.test, read.client_ids), asked, rest, seed)
    resolved["data"] |= read.settings
    return Loaded(data, data.digest)


def _require_no_form(given: Section, source: str) -> None:
    for key in given:
        if key in KEYS or key == "test":
            raise UserError(f"[data] {key} is for tables and folders of images, and {source} is neither: leave it out.")


def _from_code(
    config: Config, resolved: Config, asked: DataSettings, others: Section, kind: Kind, seed: int, load: Loading
) -> Loaded:
    """Returns the data that a function of the user's loads: clients of their own, or examples to be dealt out."""
    code = load(asked.source, "data.source")
    takes = [key for key in inspect.signature(code.function).parameters if key in others]
    arguments = check(f"[data] {asked.source}", {key: others[key] for key in takes}, code.function)
    found = given_data(code.once(SECONDS_TO_LOAD, **arguments), asked.source, kind, asked.classes)
    if isinstance(found, FederatedData):
        left = {key: value for key, value in config["data"].items() if key not in arguments}
        _require_nothing_to_deal(left, f"from {asked.source}", f"{asked.source} gives each client its own")
        resolved["data"] = {key: getattr(asked, key) for key in OF_CLIENTS} | arguments
        return Loaded(found, found.digest)
    rest = {key: value for key, value in others.items() if key not in takes}
    data = _dealt_out(config, resolved, Held(*found), asked, rest, seed)
    resolved["data"] |= arguments
    return Loaded(data, data.digest)


def targets_of(config: Config) -> Literal["classes", "values"]:
    """Returns what the loss compares with, as far as it is one of ours."""
    loss = config.get("problem", {}).get("loss", "cross_entropy")
    return "values" if loss in ("binary_cross_entropy", "mse", "huber") else "classes"


def _require_nothing_to_deal(given: Section, where: str, why: str) -> None:
    for key in given:
        if key in DATA_SETTINGS and key not in OF_CLIENTS:
            raise UserError(f"[data] {key} is for data that are dealt out, but {why}: leave {key} out.")
    others = {k: v for k, v in given.items() if k not in OF_CLIENTS}
    check(f"[data] {where}", others, lambda: None, beside=OF_CLIENTS)


class Held(NamedTuple):
    """Content of a source before it is dealt out; images become floats when they are taken."""

    train: Takeable
    test: Takeable | None
    client_ids: np.ndarray | None


def _kind_of(federation: Federation, given: Section) -> Kind:
    kind = federation.kind
    if given.get("inputs", kind.inputs) != kind.inputs or given.get("targets", kind.targets) != kind.targets:
        raise UserError(f"{federation.name} has {kind.inputs} as inputs and {kind.targets} as targets: leave "
                        "data.inputs and data.targets out.")  # fmt: skip
    return kind


def read_source(source: str, kind: Kind, raw: bool) -> Held:
    """Returns what a built-in set or a .npz file holds; of built-in images pixels from 0 to 1 where `raw`."""
    if source in FEDERATIONS:
        return Held(*open_federation(FEDERATIONS[source]))
    if source in BUILT_IN and kind != Kind():
        raise UserError(f"{source} has numbers as inputs and classes as targets: leave data.inputs and data.targets "
                        "out, and take cross_entropy as problem.loss.")  # fmt: skip
    if source == "digits":
        return Held(digits(), None, None)
    if source in IMAGE_SETS:
        images = [one.pixels() if raw else one for one in open_images(IMAGE_SETS[source])]
        return Held(images[0], images[1], None)
    if not Path(source).suffix and not os.path.exists(source):
        near = difflib.get_close_matches(source.replace("-", "_"), BUILT_IN, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "check the path."
        raise UserError(f"there is no data set, file or folder '{source}'; {hint}")
    if source.lower().endswith(OTHERS):
        raise UserError(f"{source} is in no form that is read here: save it as a table, .csv or .parquet, or as .npz "
                        "with x and y.")  # fmt: skip
    return Held(*read_npz(source, kind))


def _require_own_data(partition: str, asked: DataSettings, private: bool) -> None:
    """Raises UserError if one client's data would decide what another trains on, where the data name their clients.

    Without privacy, a partition into other clients is allowed.
    """
    if partition == "by_ids":
        if asked.examples is not None:
            raise UserError(
                "[data] examples draws from all clients' examples together, so that one client's would decide what the "
                "others train on: leave it out where the data name their clients."
            )
    elif private:
        raise UserError(
            f"{asked.source} names a client for each example, but partition = '{partition}' deals the examples out to "
            "clients that are made up: ε would be for these and not for those who own the data. Take partition = "
            "'by_ids', or, if the examples have no owners, a file without the key 'client', or a table without "
            "data.client."
        )


def _pooled(held: Held, partition: str) -> Held:
    if held.test is None:
        return held
    if partition == "by_ids":
        raise UserError("pool = true puts the test set among the clients' data, but no client owns it: leave pool out, "
                        "or choose another partition than by_ids.")  # fmt: skip
    if held.train.person is not None:
        raise UserError("pool = true puts the test set among the clients' data, where persons are named, but nobody "
                        "says whose it is: leave pool out.")  # fmt: skip
    return Held(held.train.joined(held.test), None, None)


def _test_fraction(held: Held, asked: DataSettings) -> float:
    if held.test is not None and asked.test_fraction:
        raise UserError(f"{asked.source} brings its own test set: leave test_fraction out, or set pool = true to put "
                        "both sets together first.")  # fmt: skip
    default = 0.0 if held.test is not None else 0.1 if asked.pool else 0.2
    return default if asked.test_fraction is None else asked.test_fraction


def _dealt(held: Held, deal: Call, asked: DataSettings, seed: int) -> FederatedData:
    """Sets a test set aside and deals the rest out to the clients; all examples of a person go the same way.

    Clients that the data name keep their names and their own examples. A test set that did not come with the data is
    then held out of each client's own examples.
    """
    fraction, persons = asked.test_fraction or 0.0, held.train.person
    if deal.build is _deal_by_ids:
        own, ids = deal(held.train.y, held.client_ids, generator(seed, "partition")), held.client_ids
        pairs = [
            hold_out(part, fraction, generator(seed, "split", i), None if persons is None else persons[part])
            for i, part in enumerate(own)
        ]
        parts, aside = [kept for kept, _ in pairs], np.concatenate([out for _, out in pairs])
        names = None if ids is None else [str(name) for name in np.unique(ids)]
        owners = np.repeat(np.arange(len(pairs)), [len(out) for _, out in pairs])
    else:
        kept, aside = split(len(held.train), fraction, generator(seed, "split"), persons)
        kept = _drawn("examples", kept, asked.examples, seed)
        whose = None if persons is None else persons[kept]
        parts = [kept[part] for part in _dealt_whole(deal, held.train.y[kept], whose, generator(seed, "partition"))]
        names, owners = None, aside[:0]
    index = _test_index(len(aside) if held.test is None else len(held.test), asked, seed)
    whole = held.train if held.test is None else held.test
    test = whole.take(aside[index] if held.test is None else index) if len(index) else None
    held_out = len(owners) > 0
    return federate(
        held.train, test, parts, names, asked.classes, held_out, owners[index] if held_out else None
    )  # fmt: skip


def _dealt_whole(deal: Call, labels: np.ndarray, persons: np.ndarray | None, rng: np.random.Generator) -> Parts:
    """Deals persons out, each with all examples and the label of the first; of nobody's examples, each by itself."""
    if persons is None:
        dealt: Parts = deal(labels, None, rng)
        return dealt
    number = numbered(persons)
    _, first = np.unique(number, return_index=True)
    return [np.flatnonzero(np.isin(number, part)) for part in deal(labels[first], None, rng)]


def _test_index(there: int, asked: DataSettings, seed: int) -> np.ndarray:
    """Returns which of the examples that there are to test with are taken."""
    if asked.test_examples is not None and not there:
        raise UserError("test_examples needs a test set: set test_fraction above 0 or leave test_examples out.")
    return _drawn("test_examples", np.arange(there), asked.test_examples, seed)


def _drawn(what: str, index: np.ndarray, count: int | None, seed: int) -> np.ndarray:
    """Returns `count` of the indices, drawn at random; all of them, in their order, if `count` is None."""
    if count is None:
        return index
    if not 1 <= count <= len(index):
        raise UserError(f"[data] {what} must be from 1 to {len(index)}, as many as there are, not {count}.")
    return index[generator(seed, what).permutation(len(index))[:count]]


def _deal_iid(labels: np.ndarray, ids: np.ndarray | None, rng: np.random.Generator, clients: int = 20) -> Parts:
    """Deals the shuffled examples out in equal parts: every client sees the same distribution.

    Args:
        clients: number of clients.
    """
    return iid(len(labels), clients, rng)


def _deal_dirichlet(
    labels: np.ndarray, ids: np.ndarray | None, rng: np.random.Generator, clients: int = 20, concentration: float = 0.5
) -> Parts:
    """Deals out unlike data: each class is spread over the clients in shares that follow a Dirichlet law.

    Args:
        clients: number of clients.
        concentration: a small one gives each class to a few clients, a large one approaches iid.
    """
    return dirichlet(labels, clients, concentration, rng)


def _deal_shards(
    labels: np.ndarray, ids: np.ndarray | None, rng: np.random.Generator, clients: int = 20, shards_per_client: int = 2
) -> Parts:
    """Deals out unlike data: sorted by label and cut into shards, of which each client gets a few.

    Args:
        clients: number of clients.
        shards_per_client: number of shards of each client, about as many as it has labels.
    """
    return shards(labels, clients, shards_per_client, rng)


def _deal_by_ids(labels: np.ndarray, ids: np.ndarray | None, rng: np.random.Generator) -> Parts:
    """Gives each client the examples that the data name it for (the key client of a .npz file)."""
    if ids is None:
        raise UserError("partition = 'by_ids' needs data that name a client for each example (the key 'client' of a "
                        "file, data.client of a table).")  # fmt: skip
    return by_ids(ids)


PARTITIONS: dict[str, Callable[..., Parts]] = {
    "iid": _deal_iid,
    "dirichlet": _deal_dirichlet,
    "shards": _deal_shards,
    "by_ids": _deal_by_ids,
}
