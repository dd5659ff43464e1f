"""All runs of one shuffler: a database for each, opened when the service starts or the aggregator begins the run."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

from ntkfl.atomic import write_atomically
from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.crypto.row_frames import BatchKey
from ntkfl.errors import ConfigError, NTKFLError, Refused
from ntkfl.safe_parse import parse_json
from ntkfl.services.http_client import HttpClient
from ntkfl.services.peers import Peers
from ntkfl.services.shuffler.store import BatchStore

_MOST_LIST = 16 << 20  # bytes


class Runs:
    """Of a shuffler's folder. `ConfigError` where a run's files do not belong together: see `ReleaseLog`."""

    def __init__(self, folder: Path, peers: Peers) -> None:
        self._folder, self._peers, self._lock = folder, peers, threading.Lock()
        self._key_server = HttpClient(peers.key_server.url, folder, patience=0, timeout=3)
        self._stores = {path.stem[4:]: self._load(path.stem[4:]) for path in sorted(folder.glob("run-*.sqlite"))}
        for path in folder.glob("run-*.released"):
            if path.stem[4:] not in self._stores:
                raise ConfigError(f"{path} has no database beside it: delete it, and never use this run's name again")

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def check(self) -> None:
        """`Refused` while the folder cannot be written."""
        try:
            write_atomically(self._folder / ".ready", b"x" * 4096)
        except OSError as error:
            raise Refused("storage", f"{self._folder} cannot be written: {error.strerror}") from None

    def begin(self, run: str, terms: str) -> BatchKey | None:
        """Begin a run, or go on with it: the newest exchange that was announced in it."""
        if not re.fullmatch(NAME_PATTERN, run):
            raise Refused("malformed", "a run's name has up to 64 letters, digits, '.', '_' or '-'")
        with self._lock:
            if run not in self._stores:
                try:
                    self._stores[run] = self._load(run)
                except ConfigError as error:
                    raise Refused("storage", str(error)) from None
        return self._stores[run].begin(terms)

    def find(self, run: str) -> BatchStore:
        if run not in self._stores:
            raise Refused("unknown-run", "the aggregator has not begun this run here")
        return self._stores[run]

    def revoked(self) -> list[str]:
        """The clients that the key server has revoked by now. `Refused` while it does not say: then nothing opens."""
        try:
            names = parse_json(self._key_server.ask("GET", "/v1/revoked", most=_MOST_LIST).text)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError("it must answer with a list of names")
        except (NTKFLError, ValueError) as error:
            raise Refused("busy", f"the key server does not say who is revoked: {error}") from None
        return names

    def _load(self, run: str) -> BatchStore:
        owner = json.dumps([self._peers.federation, run])
        return BatchStore(self._folder / f"run-{run}.sqlite", floor=self._peers.round.least, run=owner)
