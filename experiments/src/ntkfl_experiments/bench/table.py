"""Rows for people and for programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from ntkfl.atomic import write_atomically
from ntkfl_experiments.bench.machine import Machine, versions
from ntkfl_experiments.bench.rows import BenchRow


def table(title: str, rows: Sequence[BenchRow], machine: Machine) -> Table:
    """Fits 80 columns; a blank line parts comparisons. Without shares of the peak there is no column for them."""
    shares = [fraction_of_peak(row, machine) for row in rows]
    headings = ["time", "to ours", *(["of peak"] if any(share is not None for share in shares) else [])]
    shown = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("", min_width=20, max_width=30)
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("", overflow="fold", ratio=1)
    for i, (row, share) in enumerate(zip(rows, shares, strict=True)):
        if i and row.ratio == 1.0:
            shown.add_row()
        cells = [
            duration(row.seconds),
            "ours" if row.ratio == 1.0 else "" if row.ratio is None else times(row.ratio),
            "" if share is None else f"{100 * share:.0f}%",
        ]
        shown.add_row(row.what, *cells[: len(headings)], "; ".join(_remarks(row)))
    return shown


def document(
    command: Sequence[str], quick: bool, machine: Machine, suites: Mapping[str, Sequence[BenchRow]]
) -> dict[str, Any]:
    """All of it, for `json`."""
    rows = [
        {"suite": name, **asdict(row), "fraction_of_peak": fraction_of_peak(row, machine)}
        for name, some in suites.items()
        for row in some
    ]
    return {
        "command": shlex.join(command),
        "quick": quick,
        "machine": asdict(machine),
        "versions": versions(),
        "rows": rows,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, text.encode())


def fraction_of_peak(row: BenchRow, machine: Machine) -> float | None:
    return None if row.flop is None else row.flop / row.seconds / (machine.gflops * 1e9)


def duration(seconds: float) -> str:
    """Three digits: 1.23 s, 45.6 ms, 789 µs; 4.2 min."""
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-6)} µs"


def times(ratio: float) -> str:
    return f"{_three(ratio)}×"


def _three(value: float) -> str:
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}"


def _remarks(row: BenchRow) -> list[str]:
    remarks = []
    if row.goal is not None:
        remarks.append(f"goal {row.goal:g}×")
    if row.difference is not None:
        remarks.append(f"differs by {row.difference:.1e}")
    return [*remarks, row.note] if row.note else remarks
