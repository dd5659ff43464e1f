"""Processes beside this one: they do not hear the Ctrl-C that is meant for it, and do not outlive it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def block_sigint() -> Iterator[None]:
    """Children begun in this block never hear Ctrl-C, which a terminal sends to all of them.

    Here it is held back for the moment it takes to begin them, not lost.
    """
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """For `preexec_fn`, on Linux: be told to end when the parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Pool:
    """`count` processes, begun as work comes; they share the cores evenly."""

    def __init__(self, count: int) -> None:
        # Small matrix products gain little from a second thread, so whole runs side by side use the cores better.
        threads = max(1, (os.cpu_count() or 1) // count)
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(threads,))

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        with block_sigint():
            return self._pool.submit(work, *arguments)

    def close(self, at_once: bool = False) -> None:
        """Wait for what was submitted, or end it in the middle: for work that may be killed at any time."""
        if at_once:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
        self._pool.shutdown(wait=not at_once, cancel_futures=True)


def _begin(threads: int) -> None:
    torch.set_num_threads(threads)
    end_with_parent()
