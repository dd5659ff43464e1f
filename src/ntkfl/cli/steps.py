"""Work in pieces as people watch it: a bar with the time left in a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from ntkfl.progress import LOG_S, span


class Steps:
    """`begin` says what is under way, and so that what was before it is done; `end` that something is done. All of it
    goes to standard error. The time left supposes that pieces take alike; one may be worth several.
    """

    def __init__(
        self, total: float, what: str = "", *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.total, self.done, self._clock = total, 0.0, clock
        self._under_way = 0.0
        self._began = self._said = clock()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            _Left(self),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._began = self._clock()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bar.stop()

    def plan(self, total: float) -> None:
        """How many pieces there are, once that is known."""
        self.total = total
        self._bar.update(self._task, total=total)

    def left(self) -> float | None:
        """Seconds, or None before the first piece has ended."""
        spent = self._clock() - self._began
        return spent / self.done * (self.total - self.done) if self.done else None

    def begin(self, what: str, pieces: float = 1) -> None:
        """What is under way now, and its worth; a log gets a line of it."""
        self._count(self._under_way)
        self._under_way = pieces
        self._bar.update(self._task, description=what)
        if not self.console.is_terminal:
            self._print(what)

    def end(self, line: str = "", pieces: float = 1) -> None:
        """What was begun last is done, or else `pieces`. `line` is for people; without it a log seldom hears."""
        self._count(self._under_way or pieces)
        self._under_way = 0.0
        if self.console.is_terminal:
            if line:
                self.console.print(line, soft_wrap=True)
        elif line or self._clock() - self._said > LOG_S:
            self._print(line or self._bar.tasks[0].description)

    def _count(self, pieces: float) -> None:
        self.done = min(self.total, self.done + pieces)
        self._bar.update(self._task, completed=self.done)

    def _print(self, line: str) -> None:
        self._said = self._clock()
        self.console.print(f"{line}  ({self.how_far()})", soft_wrap=True)

    def how_far(self) -> str:
        left = self.left()
        share = f"{100 * self.done / self.total:.0f} %" if self.total else "100 %"
        return share if left is None else f"{share}, {span(left)} left"


class _Left(ProgressColumn):
    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps

    def render(self, task: Task) -> Text:
        return Text(self._steps.how_far(), style="cyan")


def clock(seconds: float) -> str:
    """0:05, 12:05, 1h02: for a column of five characters."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}" if whole < 3600 else f"{whole // 3600}h{whole // 60 % 60:02d}"
