"""How many cores one computation takes, and threads for checksums, which do not need the interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

_In = TypeVar("_In")
_Out = TypeVar("_Out")
_THREADS = min(8, os.cpu_count() or 1)


@contextmanager
def one_thread() -> Iterator[None]:
    """For small matrices and many steps: a second thread costs more than it gives, on a busy machine tenfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_threads(function: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    """What `function` gives for each of the items, in their order, by as many threads as there are cores, up to 8.

    For functions that are a few long calls which let go of the interpreter: checksums. Between these threads take
    turns, and to hand the turn over takes longer than a small one: each thread gets its share of the items at once.
    They must not call this.
    """
    given = list(items)
    shares = [given[i::_THREADS] for i in range(min(_THREADS, len(given)))]
    done = list(_pool().map(lambda share: [function(item) for item in share], shares))
    return [done[i % _THREADS][i // _THREADS] for i in range(len(given))]


@cache
def _pool() -> ThreadPoolExecutor:
    """One for all: to start and end threads takes longer than most of what they do."""
    return ThreadPoolExecutor(_THREADS, "ntkfl")


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
