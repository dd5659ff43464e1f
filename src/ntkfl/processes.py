"""Processes beside this one: they do not hear the Ctrl-C that is meant for it, and do not outlive it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import torch


class Pool:
    """`count` processes, begun as work comes; they share the cores evenly."""

    def __init__(self, count: int) -> None:
        # Small matrix products gain little from a second thread, so whole runs side by side use the cores better.
        threads = max(1, (os.cpu_count() or 1) // count)
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(threads,))

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue `work(*arguments)`. A process that this begins inherits that Ctrl-C, which a terminal sends to all of
        them, is blocked. Here it is held back for a moment, not lost: another thread may be given it, and would end
        this one in the middle of beginning a process.
        """
        before, heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}), list[int]()
        main = threading.current_thread() is threading.main_thread()  # no other thread may have handlers
        handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number)) if main else None
        try:
            return self._pool.submit(work, *arguments)
        finally:
            if main:
                signal.signal(signal.SIGINT, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if heard:
                signal.raise_signal(signal.SIGINT)

    def close(self, at_once: bool = False) -> None:
        """Wait for what was submitted, or end it in the middle: for work that may be killed at any time."""
        if at_once:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
        self._pool.shutdown(wait=not at_once, cancel_futures=True)


def _begin(threads: int) -> None:
    torch.set_num_threads(threads)
    if sys.platform == "linux":  # end when the parent dies, however it dies
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
