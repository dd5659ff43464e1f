"""A client's identity: its keys, its credential, and what the key server gives to it alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from ntkfl.atomic import replace_private, write_private
from ntkfl.crypto.credentials import Credential
from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.errors import ConfigError, NTKFLError, TrustError
from ntkfl.privacy.projection import RunSecret
from ntkfl.services.http.client import HttpClient
from ntkfl.services.key_server.key_protocol import enrolment, open_run_secret, token_client
from ntkfl.services.trusted_peers import TrustedPeers

if TYPE_CHECKING:
    import httpx


_AGAIN_S = 60.0  # between two tries to renew a credential that is still good


class Identity:
    """A client's keys and credential: made at its first start and kept in its folder; private keys are never sent."""

    def __init__(self, folder: Path, peers: TrustedPeers, patience: float) -> None:
        self._peers, self._patience = peers, patience
        self._key_server = HttpClient(peers.key_server.url, folder / "ca.pem", patience=patience)
        paths = folder / "sealing-key.pem", folder / "signing-key.pem", folder / "credential"
        if not paths[0].exists():
            SealingKey.generate().save(paths[0])
        if not paths[1].exists():
            SigningKey.generate().save(paths[1])
        self.sealing, self.signing = SealingKey.load(paths[0]), SigningKey.load(paths[1])
        self._file, self._again = paths[2], 0.0
        if not self._file.exists():
            body = enrolment(_token(folder), peers.federation, self.sealing, self.signing)
            issued = self._check(self._key_server.ask("POST", "/v1/enrol", json=body))  # before it is kept
            write_private(self._file, issued.encode())
        self.credential = self._file.read_text()
        self.known = self._read(self.credential)
        if self.known.signing_key != self.signing.public.hex():
            raise TrustError(f"{self._file} was issued for other keys than those beside it")
        self.current()

    def current(self) -> str:
        """The credential, renewed at the key server if its end is near.

        While the old one is good, a key server that cannot be reached is tried again a while later.
        """
        now = time.time()
        if now < self.known.renew_from or (now < self.known.ends and time.monotonic() < self._again):
            return self.credential
        self._again = time.monotonic() + _AGAIN_S
        self._key_server.patience = 0 if now < self.known.ends else self._patience
        try:
            self._key_server.identify(self.credential, self.signing)
            issued = self._check(self._key_server.ask("POST", "/v1/renew"))
        except NTKFLError:
            if now >= self.known.ends:
                raise
            return self.credential
        finally:
            self._key_server.patience = self._patience
        replace_private(self._file, issued.encode())
        self.credential, self.known = issued, self._read(issued)
        return issued

    def _read(self, issued: str) -> Credential:
        signer = bytes.fromhex(self._peers.key_server.signing_key)
        return Credential.check(issued, signer, self._peers.federation, allow_expired=True)

    def _check(self, answer: httpx.Response) -> str:
        """A credential for this client's keys, as the key server just issued it."""
        issued = str(_values(answer).get("credential", ""))
        given = self._read(issued)
        if (given.sealing_key, given.signing_key) != (self.sealing.public.hex(), self.signing.public.hex()):
            raise TrustError("the key server issued a credential for other keys than this client's")
        return issued

    @staticmethod
    def of(folder: Path, patience: float = 60) -> Identity:
        """Of a client's folder."""
        return Identity(folder, TrustedPeers.read(folder), patience)

    def run_secret(self) -> RunSecret:
        """ρ of the run, from the key server; kept in memory alone."""
        peers = self._peers
        self._key_server.identify(self.current(), self.signing)
        answer = _values(self._key_server.ask("POST", f"/v1/runs/{peers.run}/seed"))
        signer = bytes.fromhex(peers.key_server.signing_key)
        secret = open_run_secret(answer, self.sealing, signer, peers.federation, peers.run, self.known.client)
        return RunSecret(secret, peers.federation, peers.run)


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
