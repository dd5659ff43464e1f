"""`federation.toml`: what every role knows of the others, and what all have agreed on, handed over out of band.

What stands here no message can change: how many clients a round asks, how many must have sent before anything is
released, and how many rows each of them sends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import tomli_w
from pydantic import Field, model_validator

from ntkfl.atomic import write_atomically
from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.signed import NAME_PATTERN
from ntkfl.errors import ConfigError
from ntkfl.options import Options, read_from
from ntkfl.safe_parse import read_toml

FILE, SIGNING_KEY = "federation.toml", "signing-key.pem"
TLS_CERT, TLS_KEY, CA = "tls.pem", "tls-key.pem", "ca.pem"
HEX_KEY = "^[0-9a-f]{64}$"


class AggregatorPeer(Options):
    """Its key signs announcements, and requests to the shuffler."""

    signing_key: str = Field(pattern=HEX_KEY, description="64 hexadecimal digits")


class ServicePeer(AggregatorPeer):
    """The key server, whose key signs credentials and each ρ; or the shuffler, whose key signs receipts."""

    url: str = Field(pattern="^https://", description="an address that begins with https://")


class RoundTerms(Options):
    """Who takes part in a round. `least` below `clients` lets a round go on without those who do not answer. It also
    lets a cheating aggregator keep a question from one client, and take the difference of two sums.
    """

    clients: int = Field(ge=2, description="clients that every round asks, exactly")
    least: int = Field(ge=2, description="clients that must have sent before anything is released")
    rows: int = Field(200, ge=1, description="rows of samples that each client sends, padding included")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.least > self.clients:
            raise ValueError(f"{self.clients} clients can never be {self.least} distinct ones")
        return self


class Peers(Options):
    """Addresses and public keys of the roles, and the terms of a round."""

    federation: str = Field(pattern=NAME_PATTERN)
    round: RoundTerms
    key_server: ServicePeer
    shuffler: ServicePeer
    aggregator: AggregatorPeer

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Of a role's folder."""
        if not (folder / FILE).exists():
            raise ConfigError(f"{folder} is no role's folder: it holds no {FILE}; `ntkfl keys init` makes such folders")
        with read_from(folder / FILE):
            return cls(**read_toml(folder / FILE))

    def write(self, folder: Path) -> None:
        """Into a role's folder."""
        write_atomically(folder / FILE, tomli_w.dumps(self.model_dump(mode="json")).encode())

    def load_key(self, folder: Path, role: str) -> SigningKey:
        """The role's private signing key, from its folder; `ConfigError` if it is another than all know."""
        key = SigningKey.load(folder / SIGNING_KEY)
        if key.public != self.key_of(role):
            raise ConfigError(f"{folder / SIGNING_KEY} is not the key that {FILE} names")
        return key

    def key_of(self, role: str) -> bytes:
        """The public signing key of "key_server", "shuffler" or "aggregator"."""
        return bytes.fromhex(getattr(self, role).signing_key)
