"""What requests to the shuffler have in common on both of its listeners, and its answers in JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ntkfl.crypto.mask_format import SEED_BYTES
from ntkfl.crypto.row_frames import FRAME_BYTES
from ntkfl.errors import Refused
from ntkfl.services.http.application import Answer
from ntkfl.services.trusted_peers import TrustedPeers

RUN = "/v1/runs/{run}"
MAX_BODY = 256 << 20  # bytes of a submission or an announcement
BESIDE_ROWS = SEED_BYTES + FRAME_BYTES  # bytes of a submission at most, besides its rows


def check_run(run: str, peers: TrustedPeers) -> None:
    if run != peers.run:
        raise Refused("unknown-run", "this shuffler serves another run")


class Done(Answer):
    status: str


class Receipt(Answer):
    status: Literal["received"] = "received"
    receipt: str = Field(pattern="^[0-9a-f]{128}$", description="the shuffler's signature, hexadecimal")


class Clients(Answer):
    clients: list[str]
    away: int = Field(ge=0, description="how many of these do not answer and have not called since")
    lapsed: list[str] = Field(description="their names, where fewer than all clients are asked; else none is told")


class Latest(Answer):
    sequence: int = Field(ge=0, description="of the newest announcement; 0: none yet")
    key: Annotated[list[int], Field(min_length=2, max_length=2)] | None = Field(description="its round and exchange")


class Sequence(Answer):
    sequence: int = Field(ge=1)


class BatchStatus(Answer):
    state: Literal["open", "ready", "released", "cancelled"]
    clients: int = Field(ge=0)
    rows: int | None = Field(description="once it is released")
    seconds: float | None = Field(description="until the deadline, while there is one to wait for")
    missing: list[str] = Field(description="clients that a later exchange still needs after its deadline")


class Reports(Answer):
    reports: list[str] = Field(description="base64, sealed to the aggregator")
