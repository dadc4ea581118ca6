"""Machine that computes: freed memory that it keeps, and arithmetic on one of its threads."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@cache
def keep_freed_memory() -> None:
    """Tells glibc to reuse the large blocks that every tile, or batch, frees; no effect elsewhere.

    It would hand them back to the system and get them again page by page, each time.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # <malloc.h>
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(mmap_threshold, 2**30):  # refused by old versions, which the rest would only slow down
            mallopt(trim_threshold, 2**31 - 1)
            mallopt(arena_max, 1)  # a thread's own arena would give its memory back all the same


@contextmanager
def one_arithmetic_thread() -> Iterator[None]:
    """Sets torch to one arithmetic thread until the context ends.

    While workers are busy, a caller's own parallel arithmetic would only wait for their cores, spinning.
    """
    import torch  # whoever reads data need not wait for it

    own = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(own)
