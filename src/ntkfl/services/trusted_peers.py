"""`federation.toml`: what every role knows of the others before it talks to them, handed over out of band.

The key server and the shuffler read addresses and keys alone: they know nothing of models, and do without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field

from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.crypto.row_frames import VERSION
from ntkfl.errors import ConfigError
from ntkfl.options import Options
from ntkfl.safe_parse import read_toml

FILE = "federation.toml"
HEX_KEY = "^[0-9a-f]{64}$"


def agreed_cohort(folder: Path) -> int | None:
    """How many clients a round asks by the contract in a role's folder; None where it does not say."""
    terms = read_toml(folder / FILE).get("terms")
    cohort = terms.get("clients_per_round") if isinstance(terms, dict) else None
    return cohort if type(cohort) is int else None


class TrustedKeyServer(Options):
    url: str = Field(pattern="^https://")
    signing_key: str = Field(pattern=HEX_KEY)


class TrustedShuffler(Options):
    url: str = Field(pattern="^https://", description="for clients")
    aggregator_url: str = Field(pattern="^https://", description="for the aggregator alone, with mutual TLS")
    signing_key: str = Field(pattern=HEX_KEY, description="of its receipts")
    min_clients: int = Field(2, ge=2, description="distinct clients below which no batch is released, ever")


class TrustedAggregator(Options):
    signing_key: str = Field(pattern=HEX_KEY, description="of announcements, which bring a sealing key per round")


class TrustedPeers(Options):
    """Addresses and public keys of the roles of a federation, and the run it is for."""

    protocol: int = VERSION
    federation: str = Field(pattern=NAME_PATTERN)
    run: str = Field(pattern=NAME_PATTERN)
    key_server: TrustedKeyServer
    shuffler: TrustedShuffler
    aggregator: TrustedAggregator

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Of a role's folder; what this role does not look at may be there."""
        values = read_toml(folder / FILE)
        written = values.get("protocol", 1)  # the first version did not say
        if written != VERSION:
            raise ConfigError(
                f"{folder / FILE} was written by protocol version {written}, this is {VERSION}: make the folders anew"
            )
        unread = {"terms"} - set(cls.model_fields)
        return cls(**{name: value for name, value in values.items() if name not in unread})
