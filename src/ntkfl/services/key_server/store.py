"""The key server's decisions: enrolled clients, their keys and credentials, and the secret ρ of each run.

The operator hands out one-time tokens; a client enrols its public keys with one and gets a signed credential, which is
valid for a time and renewed by its holder before it ends. A client whose credential has ended is readmitted by the
operator, a revoked one never. A run has one ρ: made when first asked for, the same for all its clients; a new ρ means a
new run. Revocation stops further service, but takes nothing back: a client that was given ρ has it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ntkfl.atomic import check_private
from ntkfl.crypto.context import Secret
from ntkfl.crypto.credentials import NAME_PATTERN, ROLES, Credential, as_date
from ntkfl.crypto.hpke import SigningKey, parse_key
from ntkfl.errors import ConfigError, Refused, TrustError, unknown
from ntkfl.services.key_server.key_protocol import check_enrolment, seal_run_secret, sign_revoked
from ntkfl.services.key_server.state import StateFile
from ntkfl.services.trusted_peers import TrustedPeers

STATE, SIGNING_KEY = "state.sqlite", "signing-key.pem"
DAY = 86_400
LIFETIME = 30 * DAY  # seconds that a credential is valid, unless the operator says otherwise


@dataclass(frozen=True)
class EnrolledClient:
    """A client as the operator sees it."""

    name: str
    role: str
    enrolled: bool
    revoked: bool
    ends: int | None  # of its last credential, in seconds since 1970


class KeyServer:
    """What the key server knows and does; any thread may call it."""

    def __init__(self, state: Path, federation: str, key: SigningKey) -> None:
        """On a state file made by `create`."""
        self.federation, self._key, self.public = federation, key, key.public
        self._transaction = StateFile(state, federation).transaction

    @classmethod
    def create(cls, state: Path, federation: str, key: SigningKey, lifetime: int = LIFETIME) -> Self:
        """With an empty state, at a path where there is nothing yet; credentials are valid for `lifetime` seconds."""
        _check_name("federation", federation)
        StateFile.create(state, federation, lifetime)
        return cls(state, federation, key)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Of a key server's folder."""
        peers = TrustedPeers.read(folder)
        key = SigningKey.load(folder / SIGNING_KEY)
        if key.public.hex() != peers.key_server.signing_key:
            raise ConfigError(f"{folder / SIGNING_KEY} is not the key that federation.toml names")
        check_private(folder / SIGNING_KEY)
        return cls(folder / STATE, peers.federation, key)

    # -- The operator's side

    def add_run(self, run: str) -> None:
        """From now on its clients can ask for its ρ."""
        _check_name("run", run)
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM runs WHERE name = ?", (run,)).fetchone():
                raise ConfigError(f"run {run!r} exists, and has one ρ for ever: choose another name")
            db.execute("INSERT INTO runs VALUES (?, NULL)", (run,))

    def make_token(self, client: str, role: str) -> str:
        """A one-time token: the client's name, a dot, 256 random bits. It takes the place of an earlier, unused one."""
        return self.make_tokens({client: role})[client]

    def make_tokens(self, roles: Mapping[str, str]) -> dict[str, str]:
        """Of many clients by name, with their roles: all of them, or none."""
        tokens = {}
        for client, role in roles.items():
            _check_name("client", client)
            if role not in ROLES:
                raise unknown("role", role, ROLES)
            tokens[client] = f"{client}.{secrets.token_urlsafe(32)}"
        with self._transaction() as db:
            for client, token in tokens.items():
                row = db.execute("SELECT signing_key, revoked FROM clients WHERE name = ?", (client,)).fetchone()
                if row is not None and (row[0] is not None or row[1]):
                    what = "revoked" if row[1] else "enrolled"
                    raise ConfigError(f"client {client!r} is {what}: choose another name")
                values = (client, roles[client], _hash(token))
                db.execute("INSERT OR REPLACE INTO clients (name, role, token_hash) VALUES (?, ?, ?)", values)
        return tokens

    def revoke(self, client: str) -> None:
        """No ρ and no enrolment for this name any more; the list of revoked clients gets a new serial number."""
        with self._transaction() as db:
            row = db.execute("SELECT revoked FROM clients WHERE name = ?", (client,)).fetchone()
            if row is None:
                raise ConfigError(f"no client {client!r}; `ntkfl keys list` names all")
            if not row[0]:
                db.execute("UPDATE clients SET revoked = 1 WHERE name = ?", (client,))
                db.execute("UPDATE federation SET revoked_serial = revoked_serial + 1")

    def readmit(self, client: str) -> None:
        """Let a client renew a credential that has ended: for as long as a credential is valid."""
        with self._transaction() as db:
            row = db.execute("SELECT signing_key, revoked FROM clients WHERE name = ?", (client,)).fetchone()
            if row is None or row[0] is None:
                raise ConfigError(f"no client {client!r} has enrolled; `ntkfl keys list` names all")
            if row[1]:
                raise ConfigError(f"client {client!r} is revoked, which is for ever")
            ends = int(time.time()) + _lifetime(db)
            db.execute("UPDATE clients SET ends = ? WHERE name = ?", (ends, client))

    def set_lifetime(self, seconds: int) -> None:
        """Of credentials issued from now on."""
        with self._transaction() as db:
            db.execute("UPDATE federation SET lifetime = ?", (seconds,))

    def clients(self) -> list[EnrolledClient]:
        """All clients, by name."""
        with self._transaction() as db:
            rows = db.execute("SELECT name, role, signing_key IS NOT NULL, revoked, ends FROM clients ORDER BY name")
            return [
                EnrolledClient(name, role, bool(yes), bool(revoked), ends) for name, role, yes, revoked, ends in rows
            ]

    def runs(self) -> list[str]:
        """The names of all runs."""
        with self._transaction() as db:
            return [name for (name,) in db.execute("SELECT name FROM runs ORDER BY name")]

    # -- The clients' side

    def enrol(self, token: str, client: str, sealing_key: str, signing_key: str, proof: str) -> str:
        """The credential for a client's keys (hexadecimal). With the same keys a client may ask again, if it lost the
        answer.
        """
        with self._transaction() as db:
            found = "SELECT role, token_hash, sealing_key, signing_key, revoked, issued, ends FROM clients"
            row = db.execute(f"{found} WHERE name = ?", (client,)).fetchone()
            role, token_hash, *enrolled, revoked, issued, ends = row or ("", bytes(32), None, None, 0, None, None)
            if not hmac.compare_digest(token_hash, _hash(token)):
                raise Refused("bad-token", "this token is not one for this client; ask the operator for one")
            if revoked:
                raise Refused("revoked", f"client {client!r} is revoked")
            self._check_keys(client, sealing_key, signing_key, proof)
            if enrolled[0] is None:
                db.execute(
                    "UPDATE clients SET sealing_key = ?, signing_key = ? WHERE name = ?",
                    (sealing_key, signing_key, client),
                )
                issued, ends = _begin_validity(db, client)
            elif enrolled != [sealing_key, signing_key]:
                raise Refused("already-enrolled", f"client {client!r} has enrolled other keys with this token")
            valid = _refuse_expired(client, issued, ends)
        return Credential(self.federation, client, role, sealing_key, signing_key, *valid).issue(self._key)

    def renew(self, credential: Credential) -> str:
        """The next credential for the holder of this one, who must have been authenticated: for the same keys, in the
        same role. The state says whether it may, whatever the credential says of its own end.
        """
        with self._transaction() as db:
            _refuse_unknown(db, credential)
            known = db.execute("SELECT issued, ends FROM clients WHERE name = ?", (credential.client,)).fetchone()
            _refuse_expired(credential.client, *known)
            issued, ends = _begin_validity(db, credential.client)
        return replace(credential, issued=issued, ends=ends).issue(self._key)

    def run_secret(self, credential: Credential, run: str) -> dict[str, str]:
        """The run's ρ, sealed to the credential's holder, who must have been authenticated (see `authenticate`)."""
        with self._transaction() as db:
            _refuse_unknown(db, credential)
            _refuse_unknown_run(db, run)
            found = db.execute("SELECT seed FROM runs WHERE name = ?", (run,)).fetchone()
            if found[0] is None:
                found = (os.urandom(32),)
                db.execute("UPDATE runs SET seed = ? WHERE name = ?", (found[0], run))
        public = bytes.fromhex(credential.sealing_key)
        return seal_run_secret(Secret(found[0]), public, self._key, self.federation, run, credential.client)

    def revoked(self) -> dict[str, object]:
        """The signed list of revoked clients."""
        with self._transaction() as db:
            (serial,) = db.execute("SELECT revoked_serial FROM federation").fetchone()
            names = [name for (name,) in db.execute("SELECT name FROM clients WHERE revoked")]
        return sign_revoked(serial, names, self._key, self.federation)

    def _check_keys(self, client: str, sealing_key: str, signing_key: str, proof: str) -> None:
        try:
            keys = parse_key(sealing_key, "the sealing key"), parse_key(signing_key, "the signing key")
            check_enrolment(self.federation, client, *keys, bytes.fromhex(proof))
        except (ConfigError, TrustError, ValueError):
            message = "a sealing key that can be sealed to, a signing key and a proof of holding it are needed"
            raise Refused("invalid-key", message) from None


def _lifetime(db: sqlite3.Connection) -> int:
    (seconds,) = db.execute("SELECT lifetime FROM federation").fetchone()
    if not isinstance(seconds, int):
        raise Refused("no-state", "the key server's state is damaged: it does not say how long credentials last")
    return seconds


def _begin_validity(db: sqlite3.Connection, client: str) -> tuple[int, int]:
    """A new time of validity for a client's credential, kept: when it begins and when it ends."""
    issued = int(time.time())
    ends = issued + _lifetime(db)
    db.execute("UPDATE clients SET issued = ?, ends = ? WHERE name = ?", (issued, ends, client))
    return issued, ends


def _refuse_expired(client: str, issued: object, ends: object) -> tuple[int, int]:
    """When a client's credential began and ends, if that is still to come."""
    if not isinstance(issued, int) or not isinstance(ends, int):
        raise Refused("no-state", f"the key server's state is damaged: when {client!r}'s credential ends is lost")
    if time.time() >= ends:
        line = f"the credential of {client!r} ended at {as_date(ends)}: ask the key server's operator (keys readmit)"
        raise Refused("ended", line)
    return issued, ends


def _refuse_unknown(db: sqlite3.Connection, credential: Credential) -> None:
    """`Refused` unless the client is enrolled with the credential's keys, and not revoked."""
    name = credential.client
    row = db.execute("SELECT sealing_key, signing_key, revoked FROM clients WHERE name = ?", (name,)).fetchone()
    if row is None or row[:2] != (credential.sealing_key, credential.signing_key):
        raise Refused("unknown-client", f"client {name!r} is not enrolled here with these keys")
    if row[2]:
        raise Refused("revoked", f"client {name!r} is revoked")


def _refuse_unknown_run(db: sqlite3.Connection, run: str) -> None:
    if not db.execute("SELECT 1 FROM runs WHERE name = ?", (run,)).fetchone():
        raise Refused("unknown-run", "no such run in this federation")


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _check_name(what: str, name: str) -> None:
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"a {what}'s name has up to 64 letters, digits, '.', '_' or '-', got {name!r}")
