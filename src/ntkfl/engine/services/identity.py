"""A client's identity: its keys, its credential, and what the key server gives to it alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ntkfl.engine.services.peer import Peer
from ntkfl.engine.services.pins import Pins
from ntkfl.engine.services.seed import enrolment, open_seed, token_client
from ntkfl.errors import ConfigError, TrustError
from ntkfl.privacy.identity import Credential
from ntkfl.privacy.projection import RunSecret
from ntkfl.privacy.sealing import SealingKey, SigningKey, write_private

if TYPE_CHECKING:
    import httpx


class Identity:
    """A client's keys and credential: made at its first start, kept in its folder, the private ones never sent."""

    def __init__(self, folder: Path, pins: Pins, patience: float) -> None:
        self._pins = pins
        self._key_server = Peer(pins.key_server.url, folder / "ca.pem", patience=patience)
        paths = folder / "sealing-key.pem", folder / "signing-key.pem", folder / "credential"
        if not paths[0].exists():
            SealingKey.generate().save(paths[0])
        if not paths[1].exists():
            SigningKey.generate().save(paths[1])
        self.sealing, self.signing = SealingKey.load(paths[0]), SigningKey.load(paths[1])
        if not paths[2].exists():
            body = enrolment(_token(folder), pins.federation, self.sealing, self.signing)
            answer = self._key_server.ask("POST", "/v1/enrol", json=body)
            issued = str(_values(answer).get("credential", ""))
            Credential.check(issued, bytes.fromhex(pins.key_server.signing_key), pins.federation)  # before it is kept
            write_private(paths[2], issued.encode())
        self.credential = paths[2].read_text()
        self.known = Credential.check(self.credential, bytes.fromhex(pins.key_server.signing_key), pins.federation)
        if self.known.signing_key != self.signing.public.hex():
            raise TrustError(f"{paths[2]} was issued for other keys than those beside it")

    @staticmethod
    def of(folder: Path, patience: float = 60) -> Identity:
        """Of a client's folder."""
        return Identity(folder, Pins.read(folder), patience)

    def seed(self) -> RunSecret:
        """ρ of the run, from the key server; kept in memory alone."""
        pins = self._pins
        self._key_server.identify(self.credential, self.signing)
        answer = _values(self._key_server.ask("POST", f"/v1/runs/{pins.run}/seed"))
        signer = bytes.fromhex(pins.key_server.signing_key)
        seed = open_seed(answer, self.sealing, signer, pins.federation, pins.run, self.known.client)
        return RunSecret(seed, pins.federation, pins.run)


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
