"""The system's allocator of memory, told to keep what it has."""

import ctypes
import platform
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
