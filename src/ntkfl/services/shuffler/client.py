"""The shuffler as the aggregator sees it. Every method is one request, safe to repeat: a shuffler that restarts in
between loses nothing.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.row_frames import FRAME_BYTES, WORD_BYTES, Announced, BatchKey, unpack_rows
from ntkfl.errors import MessageError
from ntkfl.services.http_client import SMALL, HttpClient
from ntkfl.services.peers import Peers
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.signing import AGGREGATOR

_NEWEST: TypeAdapter[BatchKey | None] = TypeAdapter(BatchKey | None)


class ShufflerClient:
    """For one run, of the aggregator whose folder this is."""

    def __init__(self, folder: Path, peers: Peers, signer: SigningKey, run: str) -> None:
        self.http = HttpClient(peers.shuffler.url, folder).identify(AGGREGATOR, signer)
        self._run = f"/v1/runs/{run}"

    def begin(self, terms: str) -> BatchKey | None:
        """Pin the run's terms, given by their SHA-256; the newest exchange that was announced."""
        try:
            return _NEWEST.validate_json(self.http.ask("POST", self._run, terms.encode()).content)
        except ValueError:
            raise MessageError("an answer of the shuffler's that cannot be read") from None

    def publish(self, signed: bytes) -> None:
        self.http.ask("POST", f"{self._run}/announcements", signed)

    def release(self, announced: Announced, batch: Batch) -> tuple[list[bytes], bytes]:
        """The batch's rows in random order; and of a secure sum the sum of the clients' masks, 4 bytes a number."""
        size = WORD_BYTES * batch.numbers
        most = max(SMALL, size + FRAME_BYTES + batch.clients * batch.max_rows * batch.row_bytes)
        body = self.http.ask("POST", f"{self._batch(announced.key)}/release", most=most).content
        found, rows = unpack_rows(body[size:], row_bytes=batch.row_bytes)
        if found != announced:
            raise MessageError("the shuffler released rows that answer another announcement")
        return rows, body[:size]

    def forget(self, key: BatchKey) -> None:
        self.http.ask("DELETE", self._batch(key))

    def cancel(self, key: BatchKey) -> None:
        self.http.ask("POST", f"{self._batch(key)}/cancel")

    def _batch(self, key: BatchKey) -> str:
        return f"{self._run}/{key.round}/{key.exchange}"
