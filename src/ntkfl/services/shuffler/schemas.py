"""What requests to the shuffler have in common on both of its listeners."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from ntkfl.crypto.mask_format import SEED_BYTES
from ntkfl.crypto.row_frames import FRAME_BYTES
from ntkfl.errors import Refused
from ntkfl.services.trusted_peers import TrustedPeers

RUN = "/v1/runs/{run}"
MAX_BODY = 256 << 20  # bytes of a submission or an announcement
BESIDE_ROWS = SEED_BYTES + FRAME_BYTES  # bytes of a submission at most, besides its rows


def check_run(run: str, peers: TrustedPeers) -> None:
    if run != peers.run:
        raise Refused("unknown-run", "this shuffler serves another run")


class Clients(BaseModel):
    model_config = ConfigDict(extra="forbid")

    clients: list[str]
    away: int = Field(ge=0, description="how many of these do not answer and have not called since")
    lapsed: list[str] = Field(description="their names, where fewer than all clients are asked; else none is told")
