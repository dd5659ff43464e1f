"""Finding runs in folders, and telling how each is getting on."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ntkfl.compare.run import PLAN, read_plan
from ntkfl.compare.trials import error_of
from ntkfl.errors import RunFolderError
from ntkfl.federation.run_folder import Record, RunFolder, called
from ntkfl.progress import percent, plural

_DEEPEST = 4  # folders below the one given in which runs are looked for


@dataclass(frozen=True)
class FoundRun:
    """A run to show: what it is called, the curve it belongs to (seeds of one label share one), and its folder."""

    name: str
    group: str
    seed: int | None
    folder: RunFolder
    rounds: int | None = None  # a comparison may show fewer than the folder holds
    stop_at: float | None = None
    caption: str = ""  # of a comparison: what all its runs have in common
    targets: tuple[float, ...] = ()  # of a comparison: the accuracies it aims at

    @property
    def id(self) -> str:
        """Short, stable while the folder stays where it is, and safe in an address."""
        return hashlib.sha256(f"{self.group}\n{self.folder.path.resolve()}".encode()).hexdigest()[:12]


def find(paths: Sequence[Path]) -> list[FoundRun]:
    """The runs in `paths`: run folders, comparisons, or folders of either."""
    runs = (run for path in paths for run in _below(path, path.name if len(paths) > 1 else "", _DEEPEST))
    return list({run.id: run for run in runs}.values())


def require(paths: Sequence[Path]) -> list[FoundRun]:
    """As `find`, and an error where one of the paths holds no run."""
    for path in paths:
        if not path.is_dir():
            raise RunFolderError(f"{path} is a file, not a run folder" if path.exists() else f"no such folder: {path}")
        if not find([path]):
            raise RunFolderError(f"{path} holds no run: expected what `ntkfl train --out` or `ntkfl compare` writes")
    return find(paths)


def _below(path: Path, name: str, depth: int) -> Iterator[FoundRun]:
    """The runs in a folder and below it; those of a comparison by its plan, named by method and seed."""
    if (path / PLAN).is_file():
        plan = read_plan(path)
        several = len({cell.seed for cell in plan.cells}) > 1
        for cell in plan.cells:
            group = f"{name}: {cell.label}" if name else cell.label
            own = f"{group}, seed {cell.seed}" if several else group
            folder, limits = RunFolder(path / cell.folder), (cell.rounds, cell.stop_at)
            yield FoundRun(own, group, cell.seed, folder, *limits, plan.caption, plan.targets)
    elif RunFolder(path).holds_run:
        own = name or path.resolve().name
        yield FoundRun(own, own, None, RunFolder(path))
    elif depth:
        for child in _folders(path):
            yield from _below(child, f"{name}/{child.name}" if name else child.name, depth - 1)


def _folders(path: Path) -> list[Path]:
    """Folders inside, run-9 before run-10; links are not followed, so that nothing outside is shown."""
    try:
        with os.scandir(path) as entries:
            inside = [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    except OSError:
        return []
    return [path / name for name in sorted(inside, key=_words_and_numbers)]


def _words_and_numbers(name: str) -> list[str | int]:
    """In turn, beginning with a word: "run-10" as "run-", 10, ""."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]+)", name))]


def condition(run: FoundRun, config: Mapping[str, Any], records: Sequence[Record]) -> tuple[str, str]:
    """How a run is getting on: running (known by the lock that its process holds), finished, stopped, failed or
    waiting; and a line for people.
    """
    if why := run.folder.diverged:
        return "failed", f"failed: {why}"
    error = error_of(run.folder.path)
    if not config:
        return ("failed", f"failed: {error}") if error else ("waiting", "not begun")
    wanted = int(run.rounds or config.get("rounds") or 0)
    stop, gone = run.stop_at or config.get("stop_at"), records[-1].get("forgotten") if records else None
    forgot = f"; {plural(len(gone), 'client')} forgotten since ({called(config, gone)})" if gone else ""
    if stop is not None and records and (records[-1].get("test_accuracy") or 0) >= stop:
        return "finished", f"finished: reached {percent(stop, 0)} in round {len(records)}{forgot}"
    if wanted and len(records) >= wanted:
        return "finished", f"finished: {plural(len(records), 'round')}{forgot}"
    so_far = f"{len(records)} of {plural(wanted, 'round')}" if wanted else plural(len(records), "round")
    if run.folder.in_use:
        return "running", f"running: {so_far}"
    if error:
        return "failed", f"failed after {so_far}: {error}"
    return "stopped", f"stopped after {so_far}"
