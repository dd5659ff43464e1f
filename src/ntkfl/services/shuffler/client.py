"""The shuffler as the aggregator sees it, over mutual TLS."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter

from ntkfl.crypto.mask_format import WORD_BYTES
from ntkfl.crypto.row_frames import FRAME_BYTES, Announced, BatchKey, unpack_rows
from ntkfl.errors import MessageError
from ntkfl.services.announcement import Head
from ntkfl.services.http.client import MANY, SMALL, HttpClient
from ntkfl.services.shuffler.batch import Status
from ntkfl.services.shuffler.schemas import Clients
from ntkfl.services.trusted_peers import TrustedPeers

_KEY, _STATUS = TypeAdapter(BatchKey), TypeAdapter(Status)


class ShufflerClient:
    """Every method is one request, safe to repeat: a shuffler that restarts in between loses nothing."""

    def __init__(self, peers: TrustedPeers, folder: Path) -> None:
        certificate = folder / "tls.pem", folder / "tls-key.pem"
        self.http = HttpClient(peers.shuffler.aggregator_url, folder / "ca.pem", certificate)
        self._run = f"/v1/runs/{peers.run}"
        self._signed_by = bytes.fromhex(peers.aggregator.signing_key), peers.federation, peers.run
        self._most: dict[BatchKey, int] = {}  # bytes that the rows of an announced batch can have

    def clients(self, role: str) -> list[str]:
        """Names of those present in that role, sorted."""
        return self.presence(role).clients

    def presence(self, role: str) -> Clients:
        """The same, with those of them that are not waited for, where that is told."""
        with _reading():
            answer = self.http.ask("GET", f"{self._run}/clients?role={role}", most=MANY)
            return Clients.model_validate(answer.json())

    def newest(self) -> BatchKey | None:
        """The key of the newest announcement."""
        with _reading():
            key = self.http.ask("GET", f"{self._run}/latest").json()["key"]
            return None if key is None else _KEY.validate_python(key).check()

    def publish(self, signed: bytes) -> None:
        asked = Head.check(signed, *self._signed_by)[0].batch
        if asked is not None:
            self._most[asked.key] = FRAME_BYTES + len(asked.cohort) * asked.max_rows * asked.row_bytes
        self.http.ask("POST", f"{self._run}/announcements", signed)

    def status(self, key: BatchKey) -> Status:
        with _reading():
            return _STATUS.validate_python(self.http.ask("GET", self._batch(key)).json())

    def release(self, announced: Announced) -> list[bytes]:
        most = self._most.get(announced.key, SMALL)
        found, rows = unpack_rows(self.http.ask("POST", f"{self._batch(announced.key)}/release", most=most).content)
        if found != announced:
            raise MessageError("the shuffler released rows that answer another announcement")
        return rows

    def masks(self, announced: Announced, numbers: int) -> bytes:
        """Of a released secure sum, the sum of the clients' masks: 4 bytes for each of so many numbers."""
        size = WORD_BYTES * numbers
        most = max(SMALL, FRAME_BYTES + size)
        body = self.http.ask("GET", f"{self._batch(announced.key)}/masks", most=most).content
        found, rows = unpack_rows(body, max_rows=1, row_bytes=size)
        if found != announced:
            raise MessageError("the shuffler released masks that answer another announcement")
        return rows[0]

    def forget(self, key: BatchKey) -> None:
        self.http.ask("DELETE", self._batch(key))
        self._most.pop(key, None)

    def cancel(self, key: BatchKey) -> None:
        self.http.ask("POST", f"{self._batch(key)}/cancel")

    def reports(self, key: BatchKey) -> list[bytes]:
        with _reading():
            answer = self.http.ask("GET", f"{self._batch(key)}/reports", most=MANY).json()
            return [base64.b64decode(sealed) for sealed in answer["reports"]]

    def _batch(self, key: BatchKey) -> str:
        return f"{self._run}/batches/{key.round}/{key.exchange}"


@contextmanager
def _reading() -> Iterator[None]:
    """`MessageError` where an answer is not what this role was promised."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError):  # of pydantic and of JSON too
        raise MessageError("an answer of the shuffler's that cannot be read") from None
