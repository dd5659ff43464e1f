"""Rows for people and for programs, and the machine they were measured on."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ntkfl.atomic import write_atomically
from ntkfl.devices import processor_name
from ntkfl.version import __version__
from ntkfl_experiments.bench.timing import BenchRow


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on, and with which versions."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "ntkfl": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def table(title: str, rows: Sequence[BenchRow]) -> Table:
    """Fits 80 columns; a blank line parts comparisons."""
    shown = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("", min_width=20, max_width=30)
    shown.add_column("time", justify="right", no_wrap=True)
    shown.add_column("to ours", justify="right", no_wrap=True)
    shown.add_column("", overflow="fold", ratio=1)
    for i, row in enumerate(rows):
        if i and row.ratio == 1.0:
            shown.add_row()
        to_ours = "ours" if row.ratio == 1.0 else "" if row.ratio is None else f"{row.ratio:,.3g}×"
        apart = [] if row.difference is None else [f"differs by {row.difference:.1e}"]
        shown.add_row(row.what, duration(row.seconds), to_ours, "; ".join(filter(None, [*apart, row.note])))
    return shown


def duration(seconds: float) -> str:
    """Three digits: 1.23 s, 45.6 ms, 789 µs; 4.2 min."""
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    milli = 1e3 * seconds
    return f"{seconds:.3g} s" if seconds >= 1 else f"{milli:.3g} ms" if milli >= 1 else f"{1e3 * milli:.3g} µs"


def write_json(
    path: Path, command: Sequence[str], quick: bool, device: torch.device, suites: Mapping[str, Sequence[BenchRow]]
) -> None:
    """The command, the machine and every row, with the suite it is of."""
    rows = [{"suite": name, **asdict(row)} for name, own in suites.items() for row in own]
    content = {"command": shlex.join(command), "quick": quick, "machine": machine(device), "rows": rows}
    write_atomically(path, (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
