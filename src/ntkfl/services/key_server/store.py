"""The key server's state, one SQLite file: who is enrolled with which keys, and until when credentials are good."""

from __future__ import annotations

import sqlite3
import time

from ntkfl.crypto.credentials import Credential, as_date
from ntkfl.errors import Refused

VERSION = 2
SCHEMA = f"""
CREATE TABLE federation (name TEXT NOT NULL, revoked_serial INTEGER NOT NULL, lifetime INTEGER NOT NULL);
CREATE TABLE runs (name TEXT PRIMARY KEY, seed BLOB);
CREATE TABLE clients (
    name TEXT PRIMARY KEY, role TEXT NOT NULL, token_hash BLOB NOT NULL,
    sealing_key TEXT, signing_key TEXT, revoked INTEGER NOT NULL DEFAULT 0,
    issued INTEGER, ends INTEGER
);
PRAGMA user_version = {VERSION};
"""
DAY = 86_400
LIFETIME = 30 * DAY  # seconds that a credential is good for, unless the operator says otherwise


def lifetime_of(db: sqlite3.Connection) -> int:
    (seconds,) = db.execute("SELECT lifetime FROM federation").fetchone()
    if not isinstance(seconds, int):
        raise Refused(503, "no-state", "the key server's state is damaged: it does not say how long credentials last")
    return seconds


def begin(db: sqlite3.Connection, client: str) -> tuple[int, int]:
    """A new time of validity for a client's credential, kept: when it begins and when it ends."""
    issued = int(time.time())
    ends = issued + lifetime_of(db)
    db.execute("UPDATE clients SET issued = ?, ends = ? WHERE name = ?", (issued, ends, client))
    return issued, ends


def refuse_ended(client: str, issued: object, ends: object) -> tuple[int, int]:
    """When a client's credential began and ends, if that is still to come."""
    if not isinstance(issued, int) or not isinstance(ends, int):
        raise Refused(503, "no-state", f"the key server's state is damaged: when {client!r}'s credential ends is lost")
    if time.time() >= ends:
        line = f"the credential of {client!r} ended at {as_date(ends)}: ask the key server's operator (keys readmit)"
        raise Refused(403, "ended", line)
    return issued, ends


def refuse_unknown(db: sqlite3.Connection, credential: Credential) -> None:
    """`Refused` unless the client is enrolled with the credential's keys, and not revoked."""
    name = credential.client
    row = db.execute("SELECT sealing_key, signing_key, revoked FROM clients WHERE name = ?", (name,)).fetchone()
    if row is None or row[:2] != (credential.sealing_key, credential.signing_key):
        raise Refused(403, "unknown-client", f"client {name!r} is not enrolled here with these keys")
    if row[2]:
        raise Refused(403, "revoked", f"client {name!r} is revoked")
