"""Ids of whatever kind as numbers."""

import numpy as np


def numbered(ids: np.ndarray) -> np.ndarray:
    """Numbers ids in the order in which they come: which ids they are decides nothing.

    >>> numbered(np.array(["bob", "ann", "bob"])).tolist()
    [0, 1, 0]
    """
    _, first, own = np.unique(ids, return_index=True, return_inverse=True)
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    return np.asarray(place[own])
