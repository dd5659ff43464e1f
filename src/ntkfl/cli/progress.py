"""A round's numbers as people watch them: a live line in a terminal, plain lines in a log, the time left in both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ntkfl.cli.steps import clock
from ntkfl.federation.run_folder import Record
from ntkfl.federation.server import remarks


class RoundDisplay:
    """Shows rounds as they end, and a summary; silent where `quiet`."""

    def __init__(self, title: str, rounds: int, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False)
        self.live = self.console.is_terminal and not quiet
        self.rounds, self.begun = rounds, False
        self.first: tuple[int, float] = 0, time.monotonic()  # a round, and when it had ended
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[bold]{task.fields[accuracy]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self.bar = self.progress.add_task(title, total=rounds, accuracy="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.progress.stop()

    def note(self, line: str) -> None:
        self.console.print(line, style="dim")

    def show(self, record: Record, timing: Record) -> None:
        number = record["round"]
        if not self.begun:
            self.console.print(HEADER + ("" if self.live else "   left"), style="dim", soft_wrap=True)
            self.begun = True
            self.first = number - 1, time.monotonic() - timing["seconds"]
        pace = (time.monotonic() - self.first[1]) / (number - self.first[0])
        left = "" if self.live else f"  {clock(pace * (self.rounds - number)):>5}"
        self.console.print(round_line(record, timing) + left, soft_wrap=True)
        for line in remarks(record):
            self.console.print(f"       {line}", style="dim")
        accuracy = record["test_accuracy"]
        loss = record["test_loss"]
        text = f"{accuracy:.1%}" if accuracy is not None else "" if loss is None else f"loss {loss:.4f}"
        self.progress.update(self.bar, completed=number, accuracy=text)

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
                f"accuracy {last['test_accuracy']:.2%} after {last['round']} rounds "
                f"(best {best['test_accuracy']:.2%}, round {best['round']})"
            )
        elif last["test_loss"] is not None:
            self.console.print(f"test loss {last['test_loss']:.5g} after {last['round']} rounds")
        self.console.print(f"{uplink:.1f} MiB up, {downlink:.1f} MiB down, {seconds:.1f} s")
        if out is not None:
            self.console.print(f"run folder: {out}", soft_wrap=True)


HEADER = "round  accuracy  test loss  train loss   steps  MiB up  MiB down  seconds"


def round_line(record: Record, timing: Record) -> str:
    accuracy = "—" if record["test_accuracy"] is None else f"{record['test_accuracy']:.4f}"
    loss = "—" if record["test_loss"] is None else f"{record['test_loss']:.4f}"
    met = "—" if record["train_loss"] is None else f"{record['train_loss']:.4f}"
    steps = "—" if record["steps"] is None else f"{record['steps']:.0f}"
    return (
        f"{record['round']:5d}  {accuracy:>8}  {loss:>9}  {met:>10}  {steps:>6}"
        f"  {record['uplink_bytes'] / 2**20:6.1f}  {record['downlink_bytes'] / 2**20:8.1f}  {timing['seconds']:7.1f}"
    )
