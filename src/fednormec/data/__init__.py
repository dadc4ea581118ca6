"""Clients' data: where it comes from (`sources`) and who holds which example (`partition`)."""

from fednormec.data.partition import by_ids, dirichlet, iid, shards
from fednormec.data.sources import (
    Examples,
    FederatedData,
    NpzData,
    digits,
    federate,
    from_arrays,
    read_folder,
    read_npz,
    split,
)

__all__ = [
    "Examples",
    "FederatedData",
    "NpzData",
    "by_ids",
    "digits",
    "dirichlet",
    "federate",
    "from_arrays",
    "iid",
    "read_folder",
    "read_npz",
    "shards",
    "split",
]
