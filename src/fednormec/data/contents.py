"""Contents of a source as far as they can be told at once: from its name, and from the list of arrays in a file."""

import os
import zipfile
from typing import Any, NamedTuple

from fednormec.data.names import BUILT_IN, FEDERATIONS, built_in_name

WITH_A_TEST_SET = ("cifar10", "fashion_mnist", "shakespeare")  # of the built-in ones


class Contents(NamedTuple):
    """What a source brings besides examples.

    Attributes:
        folder: whether it is a folder, in which each file is a client.
        clients: whether it names a client for each example.
        test: whether it has a test set.
    """

    folder: bool = False
    clients: bool = False
    test: bool = False


def contents(source: Any) -> Contents | None:
    """Returns what a source brings; None if that cannot be told without reading it. Raises nothing.

    Args:
        source: the name of a built-in set, a file or a folder, or anything else that a config may say.
    """
    name = built_in_name(source)
    if name in BUILT_IN:
        return Contents(clients=name in FEDERATIONS, test=name in WITH_A_TEST_SET)
    if not isinstance(source, str):
        return None
    if os.path.isdir(source):
        return Contents(folder=True)
    try:
        if not os.path.isfile(source):
            return None
        with zipfile.ZipFile(source) as arrays:
            found = arrays.namelist()
    except (OSError, ValueError, zipfile.BadZipFile):
        return None
    return Contents(clients="client.npy" in found, test="x_test.npy" in found)
