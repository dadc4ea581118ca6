"""Clients' data: where it comes from (`sources`; `images`, once fetched), in which formats, and who holds which
example (`partition`).
May use: errors, files.
"""

from fednormec.data.fetching import fetch
from fednormec.data.images import cifar10, fashion_mnist
from fednormec.data.partition import by_ids, dirichlet, iid, shards
from fednormec.data.sources import (
    Examples,
    FederatedData,
    Kind,
    NpzData,
    digits,
    federate,
    from_arrays,
    hold_out,
    read_folder,
    read_npz,
    split,
)

__all__ = [
    "Examples",
    "FederatedData",
    "Kind",
    "NpzData",
    "by_ids",
    "cifar10",
    "digits",
    "dirichlet",
    "fashion_mnist",
    "federate",
    "fetch",
    "from_arrays",
    "hold_out",
    "iid",
    "read_folder",
    "read_npz",
    "shards",
    "split",
]
