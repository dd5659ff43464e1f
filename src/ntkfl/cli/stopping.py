"""Ctrl-C: one line, exit code 130, within a second, wherever the computation is at that moment. Roles of a federation,
which supervisors end by SIGTERM, answer that in the same way, with code 143.

Python tells a program of an interrupt between two of its own steps, and one step may be a matrix product of a minute.
What it raises then may also get lost: libraries written in C clear errors that they take for others. So a second thread
hears of it too, and ends the process where the first does not. Nothing is lost by that: whatever this package writes
is whole or not there, since it may be killed at any time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

STOPPED = (130, 143)  # exit codes: 128 and the signal's number
_GRACE_S = 0.4  # for the computation to take notice
_TIDY_S = 3.0  # from there to the line that is said: workers are ended, temporary folders removed
_answered = threading.Event()
_hints: list[Callable[[], str]] = []
_abrupt: list[bool] = []
_noticed = [0.0, float(signal.SIGINT)]  # when the last signal was, and which


@contextmanager
def stoppable(
    hint: Callable[[], str] = lambda: "stopped", *, abrupt: bool = False, terminable: bool = False
) -> Iterator[None]:
    """Where the block is interrupted, `hint` is the one line that is said: what is kept, and how to go on. A hint that
    says it elsewhere, in a role's log, gives none.

    `abrupt` is for a block that belongs to a library which would first finish: the process ends where it is.
    `terminable`: SIGTERM interrupts the block too.
    """
    _hints.append(hint)
    _abrupt.append(abrupt)
    before = _hear(signal.SIGTERM) if terminable and threading.current_thread() is threading.main_thread() else None
    try:
        yield
    except KeyboardInterrupt:
        answered()
        if line := hint():
            typer.echo(line, err=True)
        raise typer.Exit(_code()) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        _hints.pop()
        _abrupt.pop()


def stopped_by() -> str:
    """The name of the signal that interrupted the block."""
    return signal.Signals(int(_noticed[1])).name


def answered() -> None:
    """The interrupt has come to where it belongs: nothing more needs to be done about it."""
    _answered.set()


def hear_interrupts() -> None:
    """Of this process, from now on; not where its parent has them ignored, as `nohup` and background jobs do."""
    if sys.platform != "win32" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _hear(signal.SIGINT)


def _hear(number: signal.Signals) -> Any:
    """Interrupt at this signal from now on; what handled it before."""
    before = signal.signal(number, _interrupt)
    _watch_signals()
    return before


def _interrupt(number: int, frame: FrameType | None) -> None:
    _noticed[:] = time.monotonic(), float(number)
    if _abrupt and _abrupt[-1]:
        _end()
    raise KeyboardInterrupt


@cache
def _watch_signals() -> None:
    """End the process where an interrupt does not come through."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while signals := os.read(reader, 64):
            number = next((n for n in (signal.SIGINT, signal.SIGTERM) if n in signals), None)
            if number is None:
                continue
            came = time.monotonic()
            while _noticed[0] < came - _GRACE_S and time.monotonic() < came + _GRACE_S:
                time.sleep(0.02)
            in_time = _noticed[0] >= came - _GRACE_S and _answered.wait(_TIDY_S)
            if not in_time and signal.getsignal(number) is _interrupt:
                _noticed[1] = float(number)
                _end()

    threading.Thread(target=watch, daemon=True, name="interrupts").start()


def _code() -> int:
    return 128 + int(_noticed[1])


@contextmanager
def left_to_asyncio() -> Iterator[None]:
    """In this block an interrupt is an event loop's to handle, which ends its tasks in order."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def until_interrupted() -> Iterator[None]:
    """For what runs until it is stopped: Ctrl-C or `kill` is its ordinary end, in the middle of whatever it does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        answered()
        leave(0)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ended_by_signals(said: Callable[[], None]) -> Iterator[threading.Event]:
    """Set on Ctrl-C or `kill`, in place of dying with a child left behind; the second time all end at once."""
    ended = threading.Event()

    def end(*_: object) -> None:
        if ended.is_set():
            leave(0)
        ended.set()
        said()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(code: int) -> NoReturn:
    """Without what an interpreter does at its end, which takes torch's a second: all that matters has been said."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has left
            stream.flush()
    _end_children()
    os._exit(code)


def _end() -> NoReturn:
    """Here and now, with all that this process has started, and all that those have."""
    _end_children()
    line = _hints[-1]() if _hints else "stopped"
    show_cursor = "\x1b[?25h\r\n" if sys.stderr.isatty() else ""  # a progress display had hidden it
    os.write(2, f"{show_cursor}{line}\n".encode() if line else b"")
    os._exit(_code())


def _end_children() -> None:
    for child in _descendants(os.getpid()):
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Children first, theirs after them; on systems with /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found
