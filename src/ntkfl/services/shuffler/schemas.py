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
    lapsed: list[str] = Field(description="those of them not waited for; none is told where all clients are asked")
