"""Ctrl-C: one line that says how to go on, and exit code 130. Roles of a federation, which supervisors end by SIGTERM,
answer that in the same way, with code 143. Nothing is lost: whatever this package writes is whole or not there.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

_noticed = [signal.SIGINT]  # the signal that came last


@contextmanager
def stoppable(hint: Callable[[], str] = lambda: "stopped", *, terminable: bool = False) -> Iterator[None]:
    """Where the block is interrupted, `hint` is the one line that is said: what is kept, and how to go on. A hint that
    says it elsewhere, in a role's log, gives none. `terminable`: SIGTERM interrupts the block too.
    """
    _noticed[:] = [signal.SIGINT]
    before = None
    if terminable and threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt:
        if line := hint():
            typer.echo(line, err=True)
        raise typer.Exit(128 + _noticed[-1]) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def stopped_by() -> str:
    """The name of the signal that interrupted the block."""
    return _noticed[-1].name


def _terminate(*_: object) -> None:
    _noticed[:] = [signal.SIGTERM]
    raise KeyboardInterrupt


@contextmanager
def until_interrupted() -> Iterator[None]:
    """For what runs until it is stopped: Ctrl-C or `kill` is its ordinary end."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ended_by_signals(said: Callable[[], None]) -> Iterator[threading.Event]:
    """Set on Ctrl-C or `kill`, in place of dying with a child left behind; the second time the block is interrupted."""
    ended = threading.Event()

    def end(*_: object) -> None:
        if ended.is_set():
            raise KeyboardInterrupt
        ended.set()
        said()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
