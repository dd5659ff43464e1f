"""All runs of one shuffler: a database for each, opened when the service starts or the aggregator begins the run; and
the key server's signed list of revoked clients, which holds for all of them.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from pathlib import Path

from ntkfl.atomic import write_atomically
from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.crypto.row_frames import BatchKey
from ntkfl.errors import ConfigError, NTKFLError, Refused
from ntkfl.safe_parse import parse_json
from ntkfl.services.http_client import HttpClient
from ntkfl.services.key_server.protocol import check_revoked
from ntkfl.services.peers import Peers
from ntkfl.services.shuffler.store import BatchStore

REFRESH_S = 10.0  # between two looks at the list of revoked clients
_MOST_LIST = 16 << 20  # bytes
_logger = logging.getLogger("ntkfl.services")


class Runs:
    """Of a shuffler's folder. `ConfigError` where a run's files do not belong together: see `ReleaseLog`."""

    def __init__(self, folder: Path, peers: Peers) -> None:
        self._folder, self._peers, self._list = folder, peers, folder / "revoked.json"
        self._lock, self._reachable, self._serial = threading.Lock(), True, -1
        self._key_server = HttpClient(peers.key_server.url, folder, patience=0, timeout=3)
        self._revoked: frozenset[str] = frozenset()
        self._stores = {path.stem[4:]: self._load(path.stem[4:]) for path in sorted(folder.glob("run-*.sqlite"))}
        for path in folder.glob("run-*.released"):
            if path.stem[4:] not in self._stores:
                raise ConfigError(f"{path} has no database beside it: delete it, and never use this run's name again")
        if self._list.exists():
            self._take(self._list.read_text())

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def check(self) -> None:
        """`Refused` while any run's state, or the folder, cannot be written."""
        try:
            write_atomically(self._folder / ".ready", b"x" * 4096)
        except OSError as error:
            raise Refused("storage", f"{self._folder} cannot be written: {error.strerror}") from None
        for store in list(self._stores.values()):
            store.check()

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

    def refuse_revoked(self, client: str) -> None:
        if client in self._revoked:
            raise Refused("revoked", "this client is revoked")

    def submission_limit(self) -> int:
        return max((store.submission_limit() for store in list(self._stores.values())), default=0)

    def refresh(self) -> None:
        """Fetch the list of revoked clients. While the key server cannot be reached, the last one stays in force."""
        try:
            text = self._key_server.ask("GET", "/v1/revoked", most=_MOST_LIST).text
            if self._take(text):
                write_atomically(self._list, text.encode())
        except (NTKFLError, OSError, ValueError) as error:
            if self._reachable:  # said once, not every ten seconds
                _logger.warning("the list of revoked clients cannot be renewed: %s", error)
            self._reachable = False
        else:
            self._reachable = True

    def _take(self, text: str) -> bool:
        """Whether this list is newer than the one in force; then it holds from now on."""
        answer = parse_json(text)
        serial, clients = check_revoked(answer, self._peers.key_of("key_server"), self._peers.federation)
        with self._lock:
            if serial <= self._serial:
                return False
            self._revoked = clients
            for store in self._stores.values():
                store.set_revoked(clients)
            self._serial = serial  # where one of them could not, the next look tries again
        return True

    def _load(self, run: str) -> BatchStore:
        owner = json.dumps([self._peers.federation, run])
        store = BatchStore(self._folder / f"run-{run}.sqlite", floor=self._peers.round.least, run=owner)
        store.set_revoked(self._revoked)
        return store
