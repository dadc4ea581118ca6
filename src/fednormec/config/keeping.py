"""What stays of a section when an override chooses another constructor: all that the new one takes, too."""

from typing import Any, NamedTuple

from fednormec.algorithms.methods import USED_BY_BOUND
from fednormec.config.constructors import CONSTRUCTORS
from fednormec.config.datasets import OF_CLIENTS
from fednormec.config.forms import TABLE, form_of
from fednormec.config.own import is_own
from fednormec.config.settings import BESIDE, DATA_SETTINGS, DEFAULT_NAMES, DataSettings
from fednormec.config.signatures import Parameter, fits, in_words, parameters
from fednormec.data.contents import Contents, contents
from fednormec.data.names import BUILT_IN, built_in_name
from fednormec.data.pictures import names_clients

Settings = dict[str, Any]


class Taken(NamedTuple):
    """Settings that a section takes as it is.

    Attributes:
        keys: their names; None if nothing is known about the constructor.
        reasons: why a setting is not taken, where the constructor's name does not say it.
    """

    keys: set[str] | None
    reasons: dict[str, str]


class Lost(NamedTuple):
    """Settings that cannot be kept, in the order of the config, and why, as far as there is something to say."""

    keys: list[str]
    why: str


def lost(section: str, old: Settings, given: Settings) -> Lost:
    """Returns the settings that the constructor which is chosen now does not take.

    Of a constructor that is in no table nothing is known, and nothing is lost. A setting that the old one did not take
    either is a mistake: it stays, to be refused by its name.

    Args:
        section: the section.
        old: its settings so far.
        given: settings that were given now, another choice among them; all of these stay.
    """
    if section == "data":
        before, now = _names_of_data(old, _brings(old)), _taken_of_data(old, given)
    else:
        before, now = _names(section, old), _taken(section, old, given)
    if now.keys is None:
        return Lost([], "")
    keys = [key for key in old if key not in now.keys and key not in given and (before is None or key in before)]
    return Lost(keys, " and ".join(dict.fromkeys(now.reasons[key] for key in keys if now.reasons.get(key))))


def _names(section: str, settings: Settings) -> set[str] | None:
    """Returns the names of all settings that the constructor takes; None if it is in no table."""
    found = _parameters(section, settings)
    return None if found is None else {"name", *found}


def _parameters(section: str, settings: Settings) -> dict[str, Parameter] | None:
    table, name = CONSTRUCTORS.get(section, {}), settings.get("name", DEFAULT_NAMES.get(section))
    if not (isinstance(name, str) and name in table):
        return None
    return table[name].parameters | (parameters(BESIDE[section]) if section in BESIDE else {})


def _taken(section: str, old: Settings, given: Settings) -> Taken:
    """Returns what a section other than [data] takes.

    A value may be none of the new constructor's: both `ig` and `sgd` have an order, each from a list of its own.
    """
    new = {**old, **given}
    found, before = _parameters(section, new), _parameters(section, old) or {}
    if found is None:
        return Taken(None, {})
    unfit = {
        key: f"its {key} is {in_words(parameter.hint)}"
        for key, parameter in found.items()
        if key in old and not fits(old[key], parameter.hint) and (key not in before or fits(old[key], before[key].hint))
    }
    if section == "method" and "bound" in found:
        default = found["bound"].default
        bound = default if "bound" in unfit and "bound" not in given else new.get("bound", default)
        unfit |= dict.fromkeys(_unused(bound) & set(found), "" if "bound" in given else f"its bound is {bound}")
    return Taken({"name", *found} - set(unfit), unfit)


def _unused(bound: Any) -> set[str]:
    """Returns the settings that this bound has no use for."""
    if not isinstance(bound, str) or bound not in USED_BY_BOUND:
        return set()
    return {key for keys in USED_BY_BOUND.values() for key in keys} - set(USED_BY_BOUND[bound])


def _taken_of_data(old: Settings, given: Settings) -> Taken:
    """Returns what [data] takes from the source that it has now.

    The partition goes with the old source if the new one names its clients, where the old one did not, or names none,
    where the partition is by their names: by default the data then have the clients that they name, if any.
    """
    new = {**old, **given}
    before, now = _brings(old), _brings(new)
    if now is None:
        return Taken(_names_of_data(new, now), {})
    if now.folder:
        return Taken(set(OF_CLIENTS), dict.fromkeys(old, "each file in it is a client"))
    unfit: dict[str, str] = {}
    another = built_in_name(_source(old)) != built_in_name(_source(new))
    if another and "partition" not in given and _unlike(old.get("partition"), before, now):
        why = "it names its own clients" if now.clients else "it names no clients"
        del new["partition"]
        unfit = dict.fromkeys(set(old) - set(DATA_SETTINGS) | {"partition"}, why)
    if _partition(new, now) == "by_ids":
        unfit |= {"examples": "it names its own clients"}
        if now.test and new.get("pool"):
            unfit |= {"pool": "no client owns its test set"}
    if another and now.test and new.get("test_fraction") and ("pool" in unfit or not new.get("pool")):
        unfit |= {"test_fraction": "it brings its own test set"}
    names = _names_of_data(new, now)
    return Taken(None if names is None else names - set(unfit), unfit)


def _unlike(partition: Any, before: Contents | None, now: Contents) -> bool:
    """Returns whether a partition that was chosen for another source does not go with this one."""
    if partition is None or now.clients == (partition == "by_ids"):
        return False
    return partition == "by_ids" or before is None or not before.clients


def _names_of_data(settings: Settings, brings: Contents | None) -> set[str] | None:
    """Returns the names of all settings that [data] takes; None if its partition is not known."""
    if brings is not None and brings.folder:
        return set(OF_CLIENTS)
    table, partition = CONSTRUCTORS["data"], _partition(settings, brings)
    known = isinstance(partition, str) and partition in table
    return {*DATA_SETTINGS, *table[partition].parameters} if known else None


def _partition(settings: Settings, brings: Contents | None) -> Any:
    """Returns the partition; None if it hangs on a source of which nothing is known."""
    default = None if brings is None else "by_ids" if brings.clients else "iid"
    return default if settings.get("partition") is None else settings["partition"]


def _brings(settings: Settings) -> Contents | None:
    """Returns what the source brings; None if nobody can tell.

    A table names its clients if a setting says in which column. A function of the user's own is taken to name them, so
    that what it returns is dealt out only by settings that were meant for it.
    """
    source = _source(settings)
    if not isinstance(source, str) or built_in_name(source) in BUILT_IN:
        return contents(source)
    if is_own(source):
        return Contents(clients=True)
    form = form_of(source) if "\0" not in source else None
    if form is None:
        return contents(source)
    named = settings.get("client") is not None if form is TABLE else names_clients(source)
    return Contents(clients=named, test=settings.get("test") is not None)


def _source(settings: Settings) -> Any:
    return settings.get("source", DataSettings.source)
