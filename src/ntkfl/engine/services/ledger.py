"""What a client has answered, on its disk: no question is answered twice, whatever kills the client in between.

Round numbers are bounded by the run's contract and never come again, so the newest one answered is also the count of
all that may have been answered. The ledger is written before an answer is computed; a client that is killed in between
has used up the question.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ntkfl.atomic import write_atomically
from ntkfl.errors import ConfigError, MessageError
from ntkfl.privacy.rows import BatchKey


class Ledger:
    """Of one run, in the client's folder: the newest question heeded, and the digest of its round's cohort."""

    def __init__(self, folder: Path, run: str) -> None:
        self._path = folder / f"answered-{run}.json"
        self.newest: BatchKey | None = None
        self.cohort = ""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return  # nothing was answered yet
        except (OSError, UnicodeDecodeError):
            text = ""
        try:
            round, exchange, self.cohort = json.loads(text)
            if not isinstance(self.cohort, str) or type(round) is not int or type(exchange) is not int:
                raise ValueError
            self.newest = BatchKey(round, exchange).check()
        except (ValueError, TypeError, RecursionError, MessageError):
            raise ConfigError(
                f"{self._path} cannot be read: which rounds were answered is not known, and no more will be in this run"
            ) from None

    def is_new(self, key: BatchKey) -> bool:
        return self.newest is None or key > self.newest

    def cohort_of(self, round: int) -> str:
        """The digest of the round's cohort; empty if none was heard of."""
        return self.cohort if self.newest is not None and self.newest.round == round else ""

    def record(self, key: BatchKey, cohort: str) -> None:
        """On return it is on the disk, also through a loss of power."""
        cohort = cohort or self.cohort_of(key.round)
        write_atomically(self._path, json.dumps([*key, cohort]).encode())
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.newest, self.cohort = key, cohort
