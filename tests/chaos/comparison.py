"""A comparison that is killed with all its workers left behind, and called again."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

CONFIG = """
name = "storm"
rounds = 25
clients_per_round = 3
seeds = [0, 1]
targets = [0.5]
show_rounds = [1, 25]
[data]
dataset = "digits"
clients = 12
[model]
hidden = [16]
[[methods]]
label = "NTK-FL"
method = { name = "ntk-fl", steps = [10.0, 100.0] }
[[methods]]
label = "SCAFFOLD"
method = { name = "scaffold", local_steps = 3 }
"""


def command(folder: Path, out: Path) -> list[str]:
    (folder / "storm.toml").write_text(CONFIG)
    return [sys.executable, "-m", "ntkfl", "compare", str(folder / "storm.toml"), "--workers", "2", "--out", str(out)]


def compare_through_kills(folder: Path, kills: int, rng: Random, say: Callable[[str], None] = lambda _: None) -> str:
    """What differs from the undisturbed comparison; empty where nothing does."""
    calm, storm = folder / "calm", folder / "storm"
    subprocess.run(command(folder, calm), check=True, capture_output=True, timeout=300)
    for number in range(kills):
        before = _rounds(storm)
        child = subprocess.Popen(command(folder, storm), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        until = time.monotonic() + 120
        while child.poll() is None and _rounds(storm) < before + rng.randrange(1, 8) and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.1))
        if child.poll() is not None:
            assert child.stderr is not None
            if child.returncode != 0:
                return f"after {number} kills it ended with {child.returncode}: {child.stderr.read().decode()}"
            break  # it was done before it could be killed
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        say(f"compare: killed {number + 1} of {kills} times, {_rounds(storm)} rounds of all runs done")
    last = subprocess.run(command(folder, storm), capture_output=True, text=True, timeout=300)
    if last.returncode != 0:
        return f"the last call ended with {last.returncode}: {last.stderr}"
    return _difference(calm, storm)


def _rounds(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("cells/*/history.jsonl"))


def _difference(calm: Path, storm: Path) -> str:
    names = ("history.jsonl", "model.safetensors", "checkpoint/state.safetensors")
    for cell in sorted((calm / "cells").iterdir()):
        for name in names:
            if (cell / name).read_bytes() != (storm / "cells" / cell.name / name).read_bytes():
                return f"{cell.name}/{name} differs"
    tables = [_table(folder / "results.csv") for folder in (calm, storm)]
    return "" if tables[0] == tables[1] else "results.csv differs"


def _table(path: Path) -> list[list[str]]:
    """Without the last column, which is seconds."""
    with path.open(newline="") as file:
        return [row[:-1] for row in csv.reader(file)]
