"""`status.json` in a role's folder: how far the role is, for `ntkfl deploy status` on the same machine.

It holds names and numbers that the role knows anyway, and no secret. While the role runs it holds a lock on the file,
so a reader can tell a role that stands still from one that has died.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.safe_parse import parse_json

FILE = "status.json"
STOPPED, ENDED = "stopped", "the run has ended"  # states of a role that has left in order
_LARGEST = 1 << 20


class _Written(BaseModel):
    """What such a file may hold; all else in it is left alone."""

    role: str = ""
    pid: int | None = None
    time: float | None = None
    state: str = ""
    by: str | None = None
    run: str | None = None
    out: str | None = None
    rounds: int | None = None
    key: tuple[int, int] | None = None
    batch: dict[str, int | str | None] | None = None
    present: dict[str, list[str]] | None = None
    lapsed: dict[str, list[str]] | None = None
    refused: dict[str, int] | None = None
    heard: int | None = None
    answered: int | None = None
    problem: str | None = None


class StatusFile:
    """Written in place by the one process that has the lock; a second process of the same role writes nothing."""

    def __init__(self, folder: Path, role: str, **values: Any) -> None:
        self._handle: int | None = None
        self._values: dict[str, Any] = {"role": role, "pid": os.getpid()} | values
        self._handle = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o600)
        for _ in range(20):  # a reader holds the lock for an instant
            with suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        else:
            os.close(self._handle)
            self._handle = None
        self.update()

    def update(self, **values: Any) -> None:
        """These values, beside those given before; None removes one."""
        known = self._values | values
        self._values = {name: value for name, value in known.items() if value is not None}
        if self._handle is not None:
            text = json.dumps(self._values | {"time": round(time.time(), 1)}).encode()
            os.pwrite(self._handle, text, 0)
            os.ftruncate(self._handle, len(text))

    def close(self, state: str, by: str | None = None) -> None:
        """The role leaves in order: its last state, what made it leave (a signal), and the lock is free."""
        self.update(state=state, by=by, batch=None, lapsed=None)
        self.__del__()

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """What ends the block is the last that the file says; the role has left, and not in order."""
        try:
            yield
        except (NTKFLError, OSError) as error:
            self.update(problem=str(error))
            self.__del__()
            raise

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def refuse_second(folder: Path) -> None:
    """`ConfigError` where the role of this folder runs already: two of it would answer each other's questions."""
    status = read_status(folder)
    if status is not None and status["running"]:
        raise ConfigError(f"{folder} is in use: process {status.get('pid', '?')} runs this role; stop it first")


def read_status(folder: Path) -> dict[str, Any] | None:
    """What the role of this folder wrote last, with `running`: whether it is still there. None: it never ran."""
    running, values = False, dict[str, Any]()
    try:
        with open(folder / FILE, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                running = True
            with suppress(ValueError):  # half written, or not by us
                values = _Written.model_validate(parse_json(file.read(_LARGEST).decode())).model_dump(exclude_none=True)
    except OSError:
        return None
    return values | {"running": running}
