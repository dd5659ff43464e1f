"""Progress as people see it: written over in a terminal or notebook, a line now and then in a log.

`ProgressBar` is for work in pieces, `RoundTable` for the rounds of a command: a row per round, and a summary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Record = dict[str, Any]  # a line of history.jsonl or timings.jsonl
LOG_S = 10.0  # between two lines of a log that only say how far it is


class Pace:
    """The time left, supposing that pieces take alike; `before` of them were done when this one began to count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, before: float = 0, ago: float = 0) -> None:
        self._clock, self._before = clock, before
        self._began = clock() - ago

    @staticmethod
    def of_rounds(record: Record, timing: Record, clock: Callable[[], float] = time.monotonic) -> Pace:
        """From the first round shown on, which is a later one where a run was resumed."""
        return Pace(clock, before=record["round"] - 1, ago=timing["seconds"])

    def left(self, done: float, total: float) -> float | None:
        """Seconds, or None before the first piece is done."""
        if done <= self._before:
            return None
        return (self._clock() - self._began) / (done - self._before) * (total - done)


class ProgressBar:
    """`begin` says what is under way, and so that what was before it is done; `end` that something is done. All of it
    goes to standard error. The time left supposes that pieces take alike; one may be worth several.
    """

    def __init__(
        self, total: float, what: str = "", *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.total, self.done, self._clock = total, 0.0, clock
        self._under_way = 0.0
        self._pace, self._said = Pace(clock), clock()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("[cyan]{task.fields[far]}"),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, far="")

    def __enter__(self) -> Self:
        self._pace = Pace(self._clock)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def plan(self, total: float) -> None:
        """How many pieces there are, once that is known."""
        self.total = total
        self._bar.update(self._task, total=total)

    def left(self) -> float | None:
        """Seconds, or None before the first piece has ended."""
        return self._pace.left(self.done, self.total)

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
        self._bar.update(self._task, completed=self.done, far=self.how_far())

    def _print(self, line: str) -> None:
        self._said = self._clock()
        self.console.print(f"{line}  ({self.how_far()})", soft_wrap=True)

    def how_far(self) -> str:
        left = self.left()
        share = f"{100 * self.done / self.total:.0f} %" if self.total else "100 %"
        return share if left is None else f"{share}, {span(left)} left"


class RoundTable:
    """Rounds as they end, a row each on standard output, and a summary; a bar below them in a terminal. Silent where
    `quiet`. `remarks` gives lines to print below a round's row.
    """

    def __init__(
        self,
        title: str,
        rounds: int,
        remarks: Callable[[Record, Record], Sequence[str]] = lambda record, timing: (),
        *,
        quiet: bool = False,
    ) -> None:
        self.console = Console(quiet=quiet, highlight=False)
        self.live = self.console.is_terminal and not quiet
        self.rounds, self._remarks = rounds, remarks
        self._pace: Pace | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[bold]{task.fields[reached]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self._task = self._bar.add_task(title, total=rounds, reached="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, line: str) -> None:
        self.console.print(line, style="dim", soft_wrap=True)

    def show(self, record: Record, timing: Record) -> None:
        if self._pace is None:
            self.console.print(HEADER + ("" if self.live else "   left"), style="dim", soft_wrap=True)
            self._pace = Pace.of_rounds(record, timing)
        left = self._pace.left(record["round"], self.rounds) or 0
        self.console.print(row(record, timing) + ("" if self.live else f"  {clock(left):>5}"), soft_wrap=True)
        for line in self._remarks(record, timing):
            self.console.print(f"       {line}", style="dim")
        self._bar.update(self._task, completed=record["round"], reached=reached(record, ""))

    def summary(self, history: Sequence[Record], timings: Sequence[Record], out: Path | None) -> None:
        if not history:
            return
        last = history[-1]
        seconds = sum(t["seconds"] for t in timings)
        uplink = sum(r["uplink_bytes"] for r in history) / 2**20
        downlink = sum(r["downlink_bytes"] for r in history) / 2**20
        measured = [r for r in history if r["test_accuracy"] is not None]
        if last["test_accuracy"] is not None:
            best = max(measured, key=lambda r: r["test_accuracy"])
            self.console.print(
                f"accuracy {percent(last['test_accuracy'], 2)} after {plural(last['round'], 'round')} "
                f"(best {percent(best['test_accuracy'], 2)}, round {best['round']})"
            )
        elif last["test_loss"] is not None:
            self.console.print(f"test loss {last['test_loss']:.5g} after {plural(last['round'], 'round')}")
        if "epsilon" in last:
            spent = f"ε = {last['epsilon']:.3g} at δ = {last['delta']:.0e} for a {last['unit']}"
            self.console.print(f"privacy spent: {spent} (docs/private-sums.md says what it rests on)")
        self.console.print(f"{uplink:.1f} MiB up, {downlink:.1f} MiB down, {seconds:.1f} s")
        if out is not None:
            self.console.print(f"run folder: {out}", soft_wrap=True)


HEADER = "round  accuracy  test loss  train loss   steps  MiB up  MiB down  seconds"


def row(record: Record, timing: Record) -> str:
    """A round below `HEADER`."""
    accuracy = "—" if record["test_accuracy"] is None else percent(record["test_accuracy"], 2)
    loss = "—" if record["test_loss"] is None else f"{record['test_loss']:.4f}"
    met = "—" if record["train_loss"] is None else f"{record['train_loss']:.4f}"
    steps = "—" if record["steps"] is None else f"{record['steps']:.0f}"
    return (
        f"{record['round']:5d}  {accuracy:>8}  {loss:>9}  {met:>10}  {steps:>6}"
        f"  {record['uplink_bytes'] / 2**20:6.1f}  {record['downlink_bytes'] / 2**20:8.1f}  {timing['seconds']:7.1f}"
    )


def reached(record: Record, test: str = "test ") -> str:
    """The accuracy, or for real-valued targets the loss."""
    accuracy, loss = record["test_accuracy"], record["test_loss"]
    if accuracy is not None:
        return f"{test}accuracy {percent(accuracy)}"
    return "" if loss is None else f"{test}loss {loss:.4g}"


def percent(share: float, digits: int = 1) -> str:
    """How every accuracy is printed: 77.5 %."""
    return f"{100 * share:.{digits}f} %"


def plural(count: int, noun: str) -> str:
    """1 client, 2 clients."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def span(seconds: float) -> str:
    """5 s, 2:05 min, 1:02 h: as exact as a guess can be."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes}:{whole % 60:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


def clock(seconds: float) -> str:
    """0:05, 12:05, 1h02: for a column of five characters."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}" if whole < 3600 else f"{whole // 3600}h{whole // 60 % 60:02d}"
