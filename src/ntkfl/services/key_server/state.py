"""The key server's state: one SQLite file that only its owner can read.

Operator commands and the service may use it at the same time.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from ntkfl.atomic import check_private, write_private
from ntkfl.errors import ConfigError, Refused

_PATIENCE_S = 20  # for the state, which operator commands use too
_VERSION = 2
_SCHEMA = f"""
CREATE TABLE federation (name TEXT NOT NULL, revoked_serial INTEGER NOT NULL, lifetime INTEGER NOT NULL);
CREATE TABLE runs (name TEXT PRIMARY KEY, seed BLOB);
CREATE TABLE clients (
    name TEXT PRIMARY KEY, role TEXT NOT NULL, token_hash BLOB NOT NULL,
    sealing_key TEXT, signing_key TEXT, revoked INTEGER NOT NULL DEFAULT 0,
    issued INTEGER, ends INTEGER
);
PRAGMA user_version = {_VERSION};
"""


class StateFile:
    """Of one federation, made by `create`; any thread may use it."""

    def __init__(self, path: Path, federation: str) -> None:
        self._path, self._turn = path, threading.Lock()
        if not path.is_file():
            raise ConfigError(f"no state at {path}; a lost state is a lost ρ: begin a new federation")
        check_private(path)
        with self.transaction() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            found = None if version != _VERSION else db.execute("SELECT name FROM federation").fetchone()
        if version != _VERSION:
            raise ConfigError(f"{path} was written by another version of ntkfl: begin a new federation")
        if found is None:
            raise ConfigError(f"{path} is damaged: it does not say of which federation it is")
        if found != (federation,):
            raise ConfigError(f"{path} is of federation {found[0]!r}, not {federation!r}")

    @staticmethod
    def create(path: Path, federation: str, lifetime: int) -> None:
        """An empty state, at a path where there is nothing yet; `lifetime` is that of credentials, in seconds."""
        write_private(path, b"")
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.executescript(f"BEGIN; {_SCHEMA}")
            db.execute("INSERT INTO federation VALUES (?, 0, ?)", (federation, lifetime))
            db.execute("COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own, so that no two threads share one: all of what is done with it, or nothing."""
        address = f"file:{quote(str(self._path.absolute()))}?mode=rw"  # never makes a file
        # Threads queue here: SQLite would have each try again and again.
        if not self._turn.acquire(timeout=_PATIENCE_S):
            raise Refused("busy", "too many requests at once; try again soon")
        try:
            with closing(sqlite3.connect(address, uri=True, timeout=_PATIENCE_S, isolation_level=None)) as db:
                db.execute("PRAGMA synchronous = FULL")
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
        except (sqlite3.Error, UnicodeDecodeError):  # SQLite quotes a damaged file in what it says
            raise Refused("no-state", "the key server's state cannot be read or written now") from None
        finally:
            self._turn.release()
