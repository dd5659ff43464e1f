"""What a command leaves behind, counted by reading all of it: whoever finds half of something says so."""

from __future__ import annotations

import json
from pathlib import Path

from ntkfl.federation.run_folder import RunFolder


def rounds(root: Path) -> int:
    """Rounds of all runs under `root`, which have to follow one another; the checkpoint is of one of the last two."""
    total = 0
    for path in sorted(root.rglob("history.jsonl")) if root.is_dir() else []:
        folder = RunFolder(path.parent)
        done = folder.load_checkpoint()[0]
        numbers = [record["round"] for record in folder.records()]
        if numbers != list(range(1, len(numbers) + 1)):
            raise ValueError(f"rounds {numbers[:5]}… in {path}")
        # Unless the run went on meanwhile: a line comes before the checkpoint that counts it.
        if folder.load_checkpoint()[0] == done and not len(numbers) - 1 <= done <= len(numbers):
            raise ValueError(f"a checkpoint of round {done} beside {len(numbers)} rounds in {path}")
        total += len(numbers)
    return total


def documents(root: Path, name: str = "*.json") -> int:
    """JSON files under `root`, each whole."""
    found = sorted(root.rglob(name)) if root.is_dir() else []
    for path in found:
        json.loads(path.read_text())
    return len(found)


def size(root: Path, name: str) -> int:
    """Bytes of the files of that name."""
    return sum(path.stat().st_size for path in root.rglob(name)) if root.is_dir() else 0
