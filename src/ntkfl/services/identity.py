"""A client's identity: its keys and its credential, and what the key server gives to it alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ntkfl.atomic import write_private
from ntkfl.crypto.credentials import Credential
from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.errors import ConfigError, TrustError
from ntkfl.safe_parse import parse_json
from ntkfl.services.http_client import HttpClient
from ntkfl.services.peers import SIGNING_KEY, Peers

if TYPE_CHECKING:
    from ntkfl.privacy.projection import RunSecret

SEALING_KEY, CREDENTIAL = "sealing-key.pem", "credential"


class Identity:
    """Of a client's folder, as `ntkfl keys` makes it."""

    def __init__(self, folder: Path, patience: float = 60) -> None:
        self.peers = Peers.read(folder)
        self.sealing, self.signing = SealingKey.load(folder / SEALING_KEY), SigningKey.load(folder / SIGNING_KEY)
        try:
            self.issued = (folder / CREDENTIAL).read_text()
        except (OSError, ValueError):
            raise ConfigError(f"no credential in {folder}: the key server's operator gives one (keys client)") from None
        known = Credential.check(self.issued, self.peers.key_of("key_server"), self.peers.federation)
        if (known.sealing_key, known.signing_key) != (self.sealing.public.hex(), self.signing.public.hex()):
            raise TrustError(f"the credential in {folder} was issued for other keys than those beside it")
        self.name = known.client
        self._key_server = HttpClient(self.peers.key_server.url, folder, patience)
        self._key_server.identify(self.issued, self.signing)

    @staticmethod
    def write(folder: Path, sealing: SealingKey, signing: SigningKey, issued: str) -> None:
        sealing.save(folder / SEALING_KEY)
        signing.save(folder / SIGNING_KEY)
        write_private(folder / CREDENTIAL, issued.encode())

    def run_secret(self, run: str) -> RunSecret:
        """ρ of the run, from the key server; kept in memory alone."""
        from ntkfl.privacy.projection import RunSecret  # torch comes with it
        from ntkfl.services.key_server import open_run_secret

        try:
            answer = parse_json(self._key_server.ask("POST", f"/v1/runs/{run}/secret").text)
        except ValueError:
            answer = None
        key, federation = self.peers.key_of("key_server"), self.peers.federation
        return RunSecret(open_run_secret(answer, self.sealing, key, federation, run, self.name), federation, run)
