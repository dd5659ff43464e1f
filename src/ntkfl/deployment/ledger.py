"""What a client has answered, on its disk: no question is answered twice, whatever kills the client in between.

Round numbers are bounded by the run's contract and never come again, so the newest one answered is also the count of
all that may have been answered. The ledger is written before an answer is computed; a client that is killed in between
has used up the question. Of an aggregator: which runs it has played to their end, as none is played twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from ntkfl.atomic import write_atomically
from ntkfl.crypto.row_frames import BatchKey
from ntkfl.errors import ConfigError, MessageError, TrustError

ANEW = "a new run has a name, a ρ and a federation.toml of its own: ntkfl keys run KEY_SERVER_DIR NAME"


class Ledger:
    """Of one run, in the client's folder: the newest question heeded, and the digest of its round's cohort."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._path = folder, folder / f"answered-{run}.json"
        self.read()

    def read(self) -> tuple[BatchKey, str] | None:
        """The newest question and its round's cohort (empty: none was named); None before the first."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError):
            text = ""
        try:
            round, exchange, cohort = json.loads(text)
            if not isinstance(cohort, str) or type(round) is not int or type(exchange) is not int:
                raise ValueError
            return BatchKey(round, exchange).check(), cohort
        except (ValueError, TypeError, RecursionError, MessageError):
            raise ConfigError(
                f"{self._path} cannot be read: which rounds were answered is not known, and no more will be in this run"
            ) from None

    def age(self) -> float:
        """Seconds since the newest question was heeded; 0 before the first."""
        try:
            return max(0.0, time.time() - self._path.stat().st_mtime)
        except OSError:
            return 0.0

    def take(self, key: BatchKey, cohort: str) -> bool:
        """Whether this question is newer than all before; then it is on the disk when this returns, also through a loss
        of power. `TrustError` if its round began with another cohort.
        """
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # two processes of one client answer a question once
            newest, known = self.read() or (None, "")
            if newest is not None and key <= newest:
                return False
            if newest is None or newest.round != key.round:
                known = ""
            if cohort and known and cohort != known:
                raise TrustError(f"round {key.round} goes on with another cohort than it began with")
            write_atomically(self._path, json.dumps([*key, cohort or known]).encode())
            os.fsync(folder)
            return True
        finally:
            os.close(folder)


def refuse_ended(folder: Path, run: str) -> None:
    """`ConfigError` where this aggregator has played all rounds of the run: clients agreed to no second training."""
    if has_ended(folder, run):
        raise ConfigError(f"run {run} has ended, with all its rounds: {ANEW}")


def mark_ended(folder: Path, run: str) -> None:
    """From now on the role of this folder takes no part in the run."""
    write_atomically(folder / f"ended-{run}", b"")


def has_ended(folder: Path, run: str) -> bool:
    return (folder / f"ended-{run}").exists()
