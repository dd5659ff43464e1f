"""Runs kept by content: a cell that is finished is never computed again, one that was interrupted goes on.

A cell that ends in an error leaves the others alone; the error lies beside its folder, with the place in its user's
code, and the cell is tried again next time.
"""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Self

from ntkfl.atomic import write_atomically
from ntkfl.data import Federated
from ntkfl.data.files import is_own, own_digest
from ntkfl.devices import find_device
from ntkfl.errors import Diverged, NTKFLError, NumericalError, near, own_frames, said
from ntkfl.federation.config import RunConfig, load_data, spelled_out
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.simulation import execute
from ntkfl.processes import Pool
from ntkfl.safe_parse import read_unlinked
from ntkfl.user_code import source_digest

_TRACEBACK = "\n\nThe whole traceback:\n\n"


@dataclass(frozen=True)
class Cell:
    """One run of a comparison; its folder's name is the digest of all that determines it, but for its length. `client`
    is the only one that takes part, where a number is given.
    """

    label: str
    config: RunConfig
    root: Path
    client: int | None = None

    @property
    def key(self) -> str:
        """The digest: of settings, the source of a user's own code, their data file, and the client."""
        values = {k: v for k, v in spelled_out(self.config).items() if k not in ("rounds", "stop_at")}
        values |= {f"code {name}": source_digest(name) for name in self.config.code}  # an edited method is run again
        if is_own(self.config.data.dataset):
            values["data"] = own_digest(self.config.data.dataset)
        if self.client is not None:
            values["client"] = self.client
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(self.root / self.key)

    def history(self) -> list[Record]:
        """Records so far, no more than this cell asks for."""
        return self.folder.history(self.config.rounds, self.config.stop_at)

    def rounds(self) -> list[Record]:
        """The same with what each round took."""
        timings = self.folder.records("timings.jsonl")
        return [record | timing for record, timing in zip(self.history(), timings, strict=False)]

    @property
    def failed(self) -> str:
        """Why the run could not be finished, in one line: it diverged, or ended in an error."""
        return self.folder.diverged or self.error.partition("\n")[0]

    @property
    def error(self) -> str:
        """The error that the run ended in, with the place in its user's code."""
        return error_of(self.folder.path)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do: all rounds, an early end, or divergence."""
        if self.folder.diverged:  # a result: it would be the same next time
            return True
        records, stop = self.history(), self.config.stop_at
        stopped = stop is not None and bool(records) and (records[-1]["test_accuracy"] or 0) >= stop
        return stopped or len(records) >= self.config.rounds


class Workers:
    """`count` processes that finish cells, kept for the whole comparison; with 0, cells run in this process. `watch`
    sees the cells about twice a second, and when they have ended.
    """

    def __init__(
        self, count: int, device: str | None, watch: Callable[[Sequence[Cell]], None] = lambda _: None
    ) -> None:
        if device is not None:
            find_device(device)  # before any worker is started
        self.device, self.watch = device, watch
        self.broken: list[Cell] = []  # cells that ended in an error; no other stage of this comparison tries them again
        self._pool = Pool(count) if count else None  # its processes begin with their first work

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            self._pool.close(at_once=kind is not None)  # a folder is whole after every round: nothing is lost

    def run(self, cells: Sequence[Cell]) -> None:
        """Finish all cells, several at a time. Cells that end in an error are then among `broken`."""
        tried = {cell.key for cell in self.broken}
        waiting = {cell.key: cell for cell in cells if not cell.finished and cell.key not in tried}  # equal ones once
        for cell in waiting.values():
            _note_of(cell.folder.path).unlink(missing_ok=True)
        if self._pool is None:
            for cell in waiting.values():
                _work(cell, self.device)
        else:
            futures = [self._pool.submit(_work, cell, self.device) for cell in waiting.values()]
            while not all(future.done() for future in futures):
                self.watch(cells)
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
        self.watch(cells)


def _work(cell: Cell, device: str | None) -> None:
    path = cell.folder.path
    try:
        settings = {"data": cell.config.data, "seed": cell.config.seed, "method": {"name": cell.config.method["name"]}}
        data = _prepared(RunConfig(**settings).model_dump_json(exclude_unset=True))  # equal data are prepared once
        if cell.client is not None:
            data = replace(data, indices=(data.indices[cell.client],), client_names=())
        execute(cell.config, data=data, out=path, resume=True, device=device)
    except (NumericalError, Diverged) as error:  # a setting that diverges is a result, not a failure of the comparison
        write_atomically(path / "failed.txt", str(error).encode())
    except Exception as error:  # of a user's own code, mostly: told with its place, and the other cells go on
        frames, note = own_frames(error), _note_of(path)
        place = f" ({frames[-1].partition(': ')[0]})" if frames else ""
        lines = [f"{said(error)}{place}", *(f"  {line}" for line in frames), f"  the whole traceback: {near(note)}"]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, ("\n".join(lines) + _TRACEBACK + "".join(traceback.format_exception(error))).encode())


@lru_cache(maxsize=2)
def _prepared(config: str) -> Federated:
    return load_data(RunConfig.model_validate_json(config))


# -- Errors of a user's own code ---------------------------------------------------------------------------------------


def _note_of(folder: Path) -> Path:
    """Where the error of a run in `folder` is written: beside it, so that the run can begin there anew."""
    return folder.with_name(f"{folder.name}.error.txt")


def error_of(folder: Path) -> str:
    """What is said of a run's error, in a few lines; empty where there was none."""
    try:
        return read_unlinked(_note_of(folder)).decode(errors="replace").partition(_TRACEBACK)[0].strip()
    except FileNotFoundError:
        return ""
