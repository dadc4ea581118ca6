"""Clients' data: where they come from (`sources`, `tables`, `pictures`; `images` and `federations`, once fetched), how
a table becomes numbers (`columns`, `encoding`), and who holds which example (`partition`).
May use: errors, files, core.
"""

from fednormec.data.columns import Columns
from fednormec.data.encoding import from_frame, read_table
from fednormec.data.federations import read_federation
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
from fednormec.data.torch_datasets import from_dataset, from_datasets

__all__ = [
    "Columns",
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
    "from_dataset",
    "from_datasets",
    "from_frame",
    "hold_out",
    "iid",
    "read_federation",
    "read_folder",
    "read_npz",
    "read_table",
    "shards",
    "split",
]
