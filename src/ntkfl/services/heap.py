"""Memory of a long-lived process that takes large bodies in many threads: what is freed goes back to the system.

By itself glibc raises the size from which a block is the system's own with every large block that is freed, gives each
thread a heap, and returns of a heap only its end: after bodies of a megabyte in forty threads, most of what was freed
stays. Where the C library is another one, these functions do nothing.
"""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's malloc.h
_LARGE = 128 << 10  # bytes from which a block goes back when it is freed
_ARENAS = 2
_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def limit_heaps() -> None:
    """Large blocks go back at once, and threads share few heaps: to be called before there are any."""
    mallopt = getattr(_LIBRARY, "mallopt", None)  # musl, for one, has none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_ARENA_MAX, _ARENAS)


def trim_heap() -> None:
    """Free pages inside the heaps go back too: milliseconds, so at the end of something large."""
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)
