"""The key server's decisions: enrolled clients, their keys and credentials, and the secret ρ of each run.

The operator hands out one-time tokens; a client enrols its public keys with one and gets a signed credential. A run has
one ρ: made when a client first asks for it, the same for all clients; a new ρ means a new run. Revocation stops further
service, but takes nothing back: a client that was given ρ has it.

All of it lies in one SQLite file that only its owner can read. Operator commands and the service may use it at once.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ntkfl.atomic import check_private, write_private
from ntkfl.crypto.context import Secret
from ntkfl.crypto.credentials import NAME_PATTERN, Credential
from ntkfl.crypto.hpke import SigningKey, parse_key, seal
from ntkfl.errors import ConfigError, Refused, TrustError
from ntkfl.services.key_server.protocol import seal_run_secret
from ntkfl.services.peers import PROTOCOL, Peers

STATE, SIGNING_KEY = "state.sqlite", "signing-key.pem"
_PATIENCE_S = 20  # for the state, which operator commands use too
_SCHEMA = f"""
CREATE TABLE checked (times INTEGER);
INSERT INTO checked VALUES (0);
CREATE TABLE runs (name TEXT PRIMARY KEY, secret BLOB NOT NULL);
CREATE TABLE clients (name TEXT PRIMARY KEY, token_hash BLOB NOT NULL, sealing_key TEXT, signing_key TEXT,
  revoked INTEGER NOT NULL DEFAULT 0);
PRAGMA user_version = {PROTOCOL};
"""


@dataclass(frozen=True)
class EnrolledClient:
    """A client as the operator sees it."""

    name: str
    enrolled: bool
    revoked: bool


class KeyServer:
    """Of a key server's folder; any thread may call it."""

    def __init__(self, folder: Path) -> None:
        self.peers, self._path, self._turn = Peers.read(folder), folder / STATE, threading.Lock()
        self._key = SigningKey.load(folder / SIGNING_KEY)
        if self._key.public != self.peers.key_of("key_server"):
            raise ConfigError(f"{folder / SIGNING_KEY} is not the key that federation.toml names")
        if not self._path.is_file():
            raise ConfigError(f"no state at {self._path}; a lost state is a lost ρ: begin a new federation")
        check_private(self._path)
        with self._transaction() as db:
            if db.execute("PRAGMA user_version").fetchone() != (PROTOCOL,):
                raise ConfigError(f"{self._path} was written by another version of ntkfl: begin a new federation")

    @staticmethod
    def create(state: Path) -> None:
        """An empty state, at a path where there is nothing yet."""
        write_private(state, b"")
        with closing(sqlite3.connect(state, isolation_level=None)) as db:
            db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")

    # -- The operator's side

    def make_tokens(self, clients: Sequence[str]) -> list[str]:
        """A one-time token for each: its name, a dot, 256 random bits. It takes the place of an earlier, unused one."""
        tokens = [f"{client}.{secrets.token_urlsafe(32)}" for client in clients]
        with self._transaction() as db:
            for client, token in zip(clients, tokens, strict=True):
                if not re.fullmatch(NAME_PATTERN, client):
                    raise ConfigError(f"a client's name has up to 64 letters, digits, '.', '_' or '-', got {client!r}")
                row = db.execute("SELECT signing_key, revoked FROM clients WHERE name = ?", (client,)).fetchone()
                if row is not None and (row[0] is not None or row[1]):
                    what = "revoked" if row[1] else "enrolled"
                    raise ConfigError(f"client {client!r} is {what}: choose another name")
                db.execute("INSERT OR REPLACE INTO clients (name, token_hash) VALUES (?, ?)", (client, _hash(token)))
        return tokens

    def revoke(self, client: str) -> None:
        """No ρ and no enrolment for this name any more, and the shuffler takes nothing from it."""
        with self._transaction() as db:
            row = db.execute("SELECT revoked FROM clients WHERE name = ?", (client,)).fetchone()
            if row is None:
                raise ConfigError(f"no client {client!r}; `ntkfl keys list` names all")
            db.execute("UPDATE clients SET revoked = 1 WHERE name = ?", (client,))

    def clients(self) -> list[EnrolledClient]:
        """All clients, by name."""
        with self._transaction() as db:
            rows = db.execute("SELECT name, signing_key IS NOT NULL, revoked FROM clients ORDER BY name")
            return [EnrolledClient(name, bool(enrolled), bool(revoked)) for name, enrolled, revoked in rows]

    # -- The clients' side

    def enrol(self, token: str, client: str, sealing_key: str, signing_key: str) -> str:
        """The credential for a client's keys (hexadecimal). With the same keys a client may ask again, if it lost the
        answer.
        """
        try:
            seal(parse_key(sealing_key, "the sealing key"), b"", b"")
            parse_key(signing_key, "the signing key")
        except (ConfigError, TrustError):
            raise Refused("invalid-key", "a sealing key that can be sealed to and a signing key are needed") from None
        with self._transaction() as db:
            found = "SELECT token_hash, revoked, sealing_key, signing_key FROM clients WHERE name = ?"
            token_hash, revoked, *keys = db.execute(found, (client,)).fetchone() or (bytes(32), 0, None, None)
            if not hmac.compare_digest(token_hash, _hash(token)):
                raise Refused("bad-token", "this token is not one for this client; ask the operator for one")
            if revoked:
                raise Refused("revoked", f"client {client!r} is revoked")
            if keys == [None, None]:
                update = "UPDATE clients SET sealing_key = ?, signing_key = ? WHERE name = ?"
                db.execute(update, (sealing_key, signing_key, client))
            elif keys != [sealing_key, signing_key]:
                raise Refused("already-enrolled", f"client {client!r} has enrolled other keys with this token")
        return Credential(self.peers.federation, client, sealing_key, signing_key).issue(self._key)

    def run_secret(self, credential: Credential, run: str) -> dict[str, str]:
        """The run's ρ, sealed to the credential's holder, who must have been authenticated."""
        if not re.fullmatch(NAME_PATTERN, run):
            raise Refused("malformed", "a run's name has up to 64 letters, digits, '.', '_' or '-'")
        name, public = credential.client, bytes.fromhex(credential.sealing_key)
        with self._transaction() as db:
            row = db.execute("SELECT signing_key, revoked FROM clients WHERE name = ?", (name,)).fetchone()
            if row is None or row[0] != credential.signing_key:
                raise Refused("unknown-client", f"client {name!r} is not enrolled here with these keys")
            if row[1]:
                raise Refused("revoked", f"client {name!r} is revoked")
            db.execute("INSERT OR IGNORE INTO runs VALUES (?, ?)", (run, os.urandom(32)))
            (secret,) = db.execute("SELECT secret FROM runs WHERE name = ?", (run,)).fetchone()
        return seal_run_secret(Secret(secret), public, self._key, self.peers.federation, run, name)

    def revoked(self) -> list[str]:
        """Names of the revoked clients."""
        with self._transaction() as db:
            return [name for (name,) in db.execute("SELECT name FROM clients WHERE revoked ORDER BY name")]

    def check(self) -> None:
        """`Refused` while the state cannot be written."""
        with self._transaction() as db:
            db.execute("UPDATE checked SET times = times + 1")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
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
            raise Refused("storage", "the key server's state cannot be read or written now") from None
        finally:
            self._turn.release()


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
