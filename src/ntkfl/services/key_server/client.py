"""A client's identity: its keys, its credential, and what the key server gives to it alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ntkfl.atomic import replace_private
from ntkfl.crypto.credentials import Credential
from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.errors import ConfigError, TrustError
from ntkfl.services.http_client import HttpClient
from ntkfl.services.key_server.protocol import enrolment, open_run_secret, token_client
from ntkfl.services.peers import Peers

if TYPE_CHECKING:
    import httpx

    from ntkfl.privacy.projection import RunSecret


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two processes of one client take turns in its folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        os.fsync(handle)
    finally:
        os.close(handle)


class Identity:
    """A client's keys and credential: made at its first use and kept in its folder; private keys are never sent."""

    def __init__(self, folder: Path, patience: float = 60) -> None:
        if not folder.is_dir():
            raise ConfigError(f"no folder {folder}: `ntkfl keys init` makes one for each client")
        self.peers = Peers.read(folder)
        self._key_server = HttpClient(self.peers.key_server.url, folder, patience=patience)
        sealing, signing, issued = (folder / name for name in ("sealing-key.pem", "signing-key.pem", "credential"))
        with locked(folder):
            if not sealing.exists():
                SealingKey.generate().save(sealing)
            if not signing.exists():
                SigningKey.generate().save(signing)
            self.sealing, self.signing = SealingKey.load(sealing), SigningKey.load(signing)
            if not issued.exists():
                body = enrolment(_token(folder), self.sealing, self.signing)
                given = str(_values(self._key_server.ask("POST", "/v1/enrol", json=body)).get("credential", ""))
                self._read(given)  # before it is kept
                replace_private(issued, given.encode())
            self.issued = issued.read_text()
        self.name = self._read(self.issued).client
        self._key_server.identify(self.issued, self.signing)

    def _read(self, issued: str) -> Credential:
        known = Credential.check(issued, self.peers.key_of("key_server"), self.peers.federation)
        if (known.sealing_key, known.signing_key) != (self.sealing.public.hex(), self.signing.public.hex()):
            raise TrustError("this client's credential was issued for other keys than those beside it")
        return known

    def run_secret(self, run: str) -> RunSecret:
        """ρ of the run, from the key server; kept in memory alone."""
        from ntkfl.privacy.projection import RunSecret  # torch comes with it

        answer = _values(self._key_server.ask("POST", f"/v1/runs/{run}/secret"))
        key, federation = self.peers.key_of("key_server"), self.peers.federation
        return RunSecret(open_run_secret(answer, self.sealing, key, federation, run, self.name), federation, run)


def _values(answer: httpx.Response) -> dict[str, object]:
    """What the key server said: an object, or there is nothing in it to believe."""
    try:
        values = answer.json()
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise TrustError("an answer of the key server's that cannot be read")
    return values


def _token(folder: Path) -> str:
    try:
        token = (folder / "token").read_text().strip()
    except OSError:
        raise ConfigError(f"no token in {folder}: the key server's operator gives one (ntkfl keys token)") from None
    if not token_client(token):
        raise ConfigError(f"{folder / 'token'} holds no token")
    return token
