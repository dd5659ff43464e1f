"""Memory of a long-lived process that takes large bodies in many threads."""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's malloc.h
_LARGE = 128 << 10  # bytes from which a block is the system's own, and goes back to it when it is freed
_ARENAS = 2


def give_back_what_is_freed() -> None:
    """Large blocks go back to the system at once, and threads share few heaps.

    glibc raises its threshold with every large block that is freed, and gives each thread a heap of its own: bodies of
    a megabyte then lie between small objects of many heaps, and what was freed stays. Elsewhere this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl, for one, has none
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_ARENA_MAX, _ARENAS)
