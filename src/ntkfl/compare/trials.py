"""Runs kept by content: a cell that is finished is never computed again, one that was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

from ntkfl.atomic import write_atomically
from ntkfl.compare.failures import error_of, note_of, write_error
from ntkfl.data import Federated
from ntkfl.data.sources import is_own, own_digest
from ntkfl.devices import find_device
from ntkfl.errors import Diverged, NTKFLError, NumericalError
from ntkfl.federation.config import RunConfig, load_data, spelled_out
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.simulation import execute
from ntkfl.processes import Pool
from ntkfl.user_code import source_digest


@dataclass(frozen=True)
class Cell:
    """One run of a comparison; its folder's name is the digest of all that determines it, but for its length."""

    label: str
    config: RunConfig
    root: Path

    @property
    def key(self) -> str:
        values = spelled_out(self.config)
        values = {k: v for k, v in values.items() if k not in ("rounds", "stop_at")}
        values |= _own_files(self.config)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root / self.key)

    def history(self) -> list[Record]:
        """Records so far, no more than this cell asks for."""
        return self.folder.history(self.config.rounds, self.config.stop_at)

    def seconds(self) -> float:
        return float(sum(t["seconds"] for t in self.folder.records("timings.jsonl")[: len(self.history())]))

    @property
    def failed(self) -> str:
        """Why the run could not be finished, in one line: it diverged, or ended in an error."""
        return self.folder.diverged or self.error.partition("\n")[0]

    @property
    def error(self) -> str:
        """The error that the run ended in, with the place in its user's code; it is tried again next time."""
        return error_of(self.root / self.key)

    @property
    def finished(self) -> bool:
        if self.folder.diverged:  # a result: it would be the same next time
            return True
        records = self.history()
        stop = self.config.stop_at
        stopped = stop is not None and bool(records) and (records[-1]["test_accuracy"] or 0) >= stop
        return stopped or len(records) >= self.config.rounds


class Workers:
    """Processes that finish cells, kept for the whole comparison."""

    def __init__(self, count: int, device: str | None) -> None:
        if device is not None:
            find_device(device)  # before any worker is started
        self.count, self.device = count, device
        self.broken: list[Cell] = []  # cells that ended in an error; no other stage of this comparison tries them again
        self._pool = Pool(count)  # its processes begin with their first work

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.close(at_once=kind is not None)  # a cell's folder is whole after every round: nothing is lost

    def run(self, cells: Sequence[Cell], watch: Callable[[Sequence[Cell]], None]) -> None:
        """Finish all cells, several at a time; `watch` is called about twice a second.

        An error in one leaves the others alone: its cell is then among `broken`.
        """
        tried = {cell.folder.path for cell in self.broken}
        left = [cell for cell in cells if not cell.finished and cell.folder.path not in tried]
        waiting = {cell.key: cell for cell in left}  # equal cells run once
        for cell in waiting.values():
            note_of(cell.folder.path).unlink(missing_ok=True)
        futures = [self._pool.submit(_work, cell, self.device) for cell in waiting.values()]
        while not all(future.done() for future in futures):
            watch(cells)
            time.sleep(0.5)
        try:
            for future in futures:
                future.result()
        except BrokenProcessPool:
            raise NTKFLError(
                "a worker was ended from outside, most likely for lack of memory: call again with fewer --workers; "
                "finished runs are kept"
            ) from None
        self.broken += [cell for cell in waiting.values() if cell.error]
        watch(cells)


def _work(cell: Cell, device: str | None) -> None:
    try:
        data = _prepared(_data_settings(cell.config))
        execute(cell.config, data=data, out=cell.folder.path, resume=True, device=device)
    except (NumericalError, Diverged) as error:  # a setting that diverges is a result, not a failure of the comparison
        write_atomically(cell.folder.path / "failed.txt", str(error).encode())
    except Exception as error:  # of a user's own code, mostly: told with its place, and the other cells go on
        write_error(cell.folder.path, cell.config, device, error)


def _data_settings(config: RunConfig) -> str:
    """As JSON, only what the data depend on, so that one worker prepares equal data once."""
    values = {"data": config.data, "seed": config.seed, "method": {"name": config.method["name"]}}
    return RunConfig(**values).model_dump_json(exclude_unset=True)


def _own_files(config: RunConfig) -> dict[str, str]:
    """Digests of a user's own code and data file: whoever edits them asks for new runs."""
    found = {f"code {name}": source_digest(name) for name in config.code}
    if is_own(config.data.dataset):
        found["data"] = own_digest(config.data.dataset)
    return found


@lru_cache(maxsize=2)
def _prepared(config: str) -> Federated:
    return load_data(RunConfig.model_validate_json(config))
