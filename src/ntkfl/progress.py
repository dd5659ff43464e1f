"""Rounds as one line on standard error, for whoever calls `ntkfl.train` and waits; the command line has its own."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

LOG_S = 10.0  # between two lines of a log that only say how far it is


class RoundLine:
    """A line that is written over in a terminal and a notebook; where nothing can be written over, one now and then.

    `shown` of None: only where it can be written over, so that no log is told what nobody asked for.
    """

    def __init__(self, rounds: int, shown: bool | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.rounds, self._clock = rounds, clock
        # A notebook's stream is no terminal, but obeys a carriage return like one.
        self._over = sys.stderr is not None and (
            sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")
        )
        self._shown = sys.stderr is not None and (self._over if shown is None else shown)
        self._began = self._said = clock()
        self._first: tuple[int, float] | None = None  # the round before the first one played, and when that began
        self._line = ""

    def __enter__(self) -> Self:
        self._began = self._said = self._clock()
        if self._over:
            self._write(f"training, {self.rounds} rounds")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._write(self._line, end="\n")  # how far it came, without the time left

    def show(self, record: dict[str, Any], timing: dict[str, Any]) -> None:
        now, number = self._clock(), record["round"]
        if self._first is None:
            self._first = number - 1, now - timing["seconds"]
        accuracy, loss = record["test_accuracy"], record["test_loss"]
        reached = f", test loss {loss:.4g}" if accuracy is None else f", test accuracy {accuracy:.1%}"
        left = (now - self._first[1]) / (number - self._first[0]) * (self.rounds - number)
        self._line = f"round {number} of {self.rounds}{reached}, {span(now - self._began)}"
        if self._over or (now - self._said > LOG_S and number < self.rounds):
            self._said = now
            self._write(f"{self._line}, {span(left)} left")

    def _write(self, line: str, end: str = "") -> None:
        if self._shown and self._over:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + line[:width].ljust(min(width, 78)), end=end, file=sys.stderr, flush=True)
        elif self._shown and line:
            print(line, file=sys.stderr, flush=True)


def span(seconds: float) -> str:
    """5 s, 2:05 min, 1:02 h: as exact as a guess can be."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes}:{whole % 60:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
