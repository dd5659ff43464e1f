"""Progress as people see it: a bar in a terminal, a line now and then in a log; and how numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

Record = dict[str, Any]  # a line of history.jsonl or timings.jsonl
LOG_S = 10.0  # between two lines of a log that only say how far it is
HEADER = "round  accuracy  test loss  train loss   steps  MiB up  MiB down  seconds   left"


class ProgressBar:
    """`begin` says what is under way, and so that what was before it is done; `end` that something is done. The time
    left supposes that pieces take alike. All on standard error.
    """

    def __init__(self, total: float, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.live = self.console.is_terminal and not self.console.is_jupyter and not quiet
        self.total, self.done, self.what = total, 0.0, ""
        self.skipped = 0.0  # pieces that were done before this began, as of a run that is resumed
        self._under_way = 0
        columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("[cyan]{task.fields[how_far]}"))
        self._bar = Progress(*columns, console=self.console, transient=True, disable=not self.live)
        self._task = self._bar.add_task("", total=total, how_far="")

    def __enter__(self) -> Self:
        self._began = self._said = monotonic()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, what: str) -> None:
        """What is under way now; a log gets a line of it."""
        self._count(self._under_way, what)
        self._under_way = 1
        if not self.live:
            self._print(what)

    def end(self, what: str = "", pieces: float = 1) -> None:
        """What was begun last is done, or so many pieces; a log seldom hears of it."""
        self._count(pieces, what or self.what)
        self._under_way = 0
        if not self.live and monotonic() - self._said > LOG_S:
            self._print(self.what)

    def _count(self, pieces: float, what: str) -> None:
        self.done, self.what = min(self.total, self.done + pieces), what
        self._bar.update(self._task, total=self.total, completed=self.done, description=what, how_far=self.how_far())

    def _print(self, line: str) -> None:
        self._said = monotonic()
        self.console.print(f"{line}  ({self.how_far()})", soft_wrap=True)

    def how_far(self) -> str:
        """ "30 %, 56 s left"; the time from the second piece on."""
        share = f"{100 * self.done / self.total:.0f} %" if self.total else "100 %"
        if self.done <= self.skipped:
            return share
        each = (monotonic() - self._began) / (self.done - self.skipped)
        return f"{share}, {span(each * (self.total - self.done))} left"


class RoundTable:
    """A callback of runs: rounds as they end, a row each on standard output, and a summary. `remarks` gives lines to
    print below a row.
    """

    def __init__(self, rounds: int, remarks: Callable[[Record], Sequence[str]], *, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False)
        self._rounds, self._remarks, self._seconds = rounds, remarks, list[float]()

    def on_start(self, line: str) -> None:
        """A line that is no row, dimmed."""
        self.console.print(line, style="dim", soft_wrap=True)

    def on_round(self, record: Record, timing: Record) -> None:
        """A row, with the time left if the other rounds take as long as those so far."""
        if not self._seconds:
            self.on_start(HEADER)
        self._seconds.append(timing["seconds"])
        left = round(sum(self._seconds) / len(self._seconds) * (self._rounds - record["round"]))
        short = f"{left // 60}:{left % 60:02d}" if left < 3600 else f"{left // 3600}h{left // 60 % 60:02d}"

        def number(name: str, form: str) -> str:
            return "—" if record[name] is None else format(record[name], form)

        accuracy = "—" if record["test_accuracy"] is None else percent(record["test_accuracy"])
        self.console.print(
            f"{record['round']:5d}  {accuracy:>8}  {number('test_loss', '.4f'):>9}  {number('train_loss', '.4f'):>10}"
            f"  {number('steps', '.0f'):>6}  {record['uplink_bytes'] / 2**20:6.1f}"
            f"  {record['downlink_bytes'] / 2**20:8.1f}  {timing['seconds']:7.1f}  {short:>5}",
            soft_wrap=True,
        )
        for line in self._remarks(record):
            self.on_start(f"       {line}")

    def summary(self, history: Sequence[Record], timings: Sequence[Record], out: Path | None) -> None:
        """The last accuracy (or loss) and the best, the privacy spent, bytes and time in all, and where it is kept."""
        if not history:
            return
        last = history[-1]
        after = f"after {plural(last['round'], 'round')}"
        if last["test_accuracy"] is not None:
            best = max((r for r in history if r["test_accuracy"] is not None), key=lambda r: r["test_accuracy"])
            peak = f"(best {percent(best['test_accuracy'])}, round {best['round']})"
            self.console.print(f"accuracy {percent(last['test_accuracy'])} {after} {peak}")
        elif last["test_loss"] is not None:
            self.console.print(f"test loss {last['test_loss']:.5g} {after}")
        if "epsilon" in last:
            spent = f"ε = {last['epsilon']:.3g} (simulated) at δ = {last['delta']:.0e} for a {last['unit']}"
            self.console.print(f"privacy spent: {spent} (docs/privacy.md says what it rests on)")
        up, down = (sum(r[f"{way}link_bytes"] for r in history) / 2**20 for way in ("up", "down"))
        self.console.print(f"{up:.1f} MiB up, {down:.1f} MiB down, {sum(t['seconds'] for t in timings):.1f} s")
        if out is not None:
            self.console.print(f"run folder: {out}", soft_wrap=True)


def percent(share: float, digits: int = 1) -> str:
    """How every accuracy is printed: 77.5 %. A test set of 10,000 samples tells no more than that."""
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
