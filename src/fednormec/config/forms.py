"""Forms of data with settings of their own in [data]: tables, and folders of images."""

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fednormec.config.schema import Section, check
from fednormec.data.columns import ESTIMATES, Columns
from fednormec.data.encoding import encoded, encoded_inputs, number_of_classes, require_constants, require_no_constants
from fednormec.data.estimating import settled
from fednormec.data.pictures import Pictures, is_picture_folder, read_pictures
from fednormec.data.sources import Examples, Kind, Takeable, read_npz
from fednormec.data.tables import CSV, Table, is_table, open_table, test_split
from fednormec.errors import UserError


class Read(NamedTuple):
    """Content of a source in one of the forms.

    Attributes:
        train: examples to train on.
        test: public test set; None: there is none.
        client_ids: client of each example of `train`; None: the source names none.
        classes: number of classes; None: the labels tell.
        settings: settings of the form with everything spelled out.
    """

    train: Takeable
    test: Takeable | None
    client_ids: np.ndarray | None
    classes: int | None
    settings: Section


class Asked(NamedTuple):
    """Source in one of the forms, and what else [data] says of it.

    Attributes:
        source: where the examples are.
        test: where the public test set is; None: beside the source, or nowhere.
        kind: kind of what examples are made of.
        classes: number of classes; None: nobody says.
        private: whether nothing may be estimated from clients' data.
    """

    source: str
    test: str | None
    kind: Kind
    classes: int | None
    private: bool


class Form(NamedTuple):
    """Form of data.

    Attributes:
        what: what it is, for a person.
        build: dataclass of its settings.
        read: reads a source by them.
        agreed: settings without which several parties could not read their data alike.
    """

    what: str
    build: Callable[..., Any]
    read: Callable[[Asked, Any], Read]
    agreed: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of its settings."""
        return tuple(field.name for field in fields(self.build))  # type: ignore[arg-type]

    def settings(self, source: str, given: Section) -> Any:
        """Returns its settings, checked."""
        return self.build(**check(f"[data] for {source}", given, self.build))


def form_of(source: str | Path) -> Form | None:
    """Returns the form that a source is in; None: an .npz file, a folder of them, or a name."""
    if is_table(source):
        return TABLE
    return PICTURES if is_picture_folder(source) else None


def read_agreed(source: str, given: Section, kind: Kind, classes: int | None, owned: bool = True) -> Examples:
    """Reads one party's own examples by settings that all parties agreed on.

    Args:
        source: a .npz file with x and y, a table or a folder of images.
        given: what [data] says of tables or images.
        kind: kind of what examples are made of.
        classes: number of classes.
        owned: whether they must name their persons, if that was agreed on; False: they are public, and nobody's.
    """
    form = form_of(source)
    if form is None:
        found = read_npz(source, kind).train
        require_persons(found, given if owned else {}, source)
        return found
    for key in form.agreed:
        if key not in given:
            raise UserError(f"{source} is a {form.what}, and [data] in federation.toml does not say its {key}: all "
                            "clients must agree on it, so that their numbers mean the same.")  # fmt: skip
    left_out = ("client",) if owned else WHOSE
    settings = form.settings(source, {key: given[key] for key in form.keys if key in given and key not in left_out})
    for key in settings.estimated if isinstance(settings, Columns) else ():
        raise UserError(f"[data] {key} = '{given[key]}' would be estimated by each client from its own data, and mean "
                        f"something else to each: agree on public constants, such as {ESTIMATES[key][1]}.")  # fmt: skip
    read = form.read(Asked(source, None, kind, classes, private=True), settings)
    found = read.train.take(np.arange(len(read.train)))
    require_persons(found, given if owned else {}, source)
    return found


def require_persons(own: Examples, given: Section, source: str) -> None:
    """Raises UserError if all agreed on who a record is, and one party's own examples do not say whose they are.

    Args:
        own: its examples.
        given: what [data] says of tables or images.
        source: where they are.
    """
    if given.get("person") is not None and own.person is None:
        raise UserError(f"{source} does not say whose each example is, and [data] in federation.toml names the persons "
                        f"(person = '{given['person']}'): give each example the id of its person (the array person of "
                        "a .npz file).")  # fmt: skip


def read_alike(source: str, form: Form, given: Section, kind: Kind, classes: int | None) -> Read:
    """Reads a table or a folder of images as a run's own data were read.

    Args:
        source: where the examples are.
        form: the form that they are in.
        given: settings of the form, with the constants that the run took spelled out.
        kind: kind of what examples are made of.
        classes: number of classes.
    """
    return form.read(Asked(source, None, kind, classes, private=True), form.settings(source, given))


def read_inputs_alike(source: str, given: Section, kind: Kind) -> np.ndarray | None:
    """Reads the features of a table as `read_alike` does, where it has no label; None: it has one, or is no table."""
    if form_of(source) is not TABLE:
        return None
    columns: Columns = TABLE.settings(source, given)
    table = _opened(source, columns)
    if columns.features is None or set(columns.targets) <= set(table.names):
        return None
    require_constants(columns)
    return encoded_inputs(table, columns, kind)


def _read_table(asked: Asked, columns: Columns) -> Read:
    require_no_constants(columns, asked.kind)
    if asked.private:
        require_constants(columns)
    table = _opened(asked.source, columns)
    columns = settled(table, columns)
    classes = number_of_classes(columns, asked.kind, asked.classes)
    train, _, ids = encoded(table, columns, asked.kind, classes)
    path = asked.test or test_split(asked.source)
    alone = replace(columns, client=None, person=None)
    test = None if path is None else encoded(_opened(path, columns), alone, asked.kind, classes).train
    return Read(train, test, ids, classes, asdict(columns))


def _opened(source: str, columns: Columns) -> Table:
    return open_table(source, columns.delimiter if source.lower().endswith(CSV) else None)


def _read_pictures(asked: Asked, form: Pictures) -> Read:
    if asked.kind != Kind():
        raise UserError("a folder of images has numbers as inputs and classes as targets: leave data.inputs and "
                        "data.targets out, and take cross_entropy as problem.loss.")  # fmt: skip
    train, test, ids, form = read_pictures(asked.source, form)
    if asked.test is not None:
        test = read_pictures(asked.test, form).train
    return Read(train, test, ids, asked.classes or len(form.labels or ()), asdict(form))


TABLE = Form("table", Columns, _read_table, ("label", "features"))
PICTURES = Form("folder of images", Pictures, _read_pictures, ("labels", "size", "channels"))
WHOSE = ("client", "person")  # settings of a table that say whose a row is, and not what it means
KEYS = tuple(dict.fromkeys([*TABLE.keys, *PICTURES.keys]))
