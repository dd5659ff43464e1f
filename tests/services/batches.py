"""A small crowd, and how to ask what became of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.errors import Refused
from ntkfl.services.announcement import Batch
from ntkfl.services.store import BatchStore

KEY = BatchKey(1, 0)
DIGEST = bytes(range(32))  # of an announcement
NAMES = ("ada", "bob", "cyd", "dan")


def batch(key: BatchKey = KEY, clients: int = len(NAMES), **terms: int) -> Batch:
    return Batch(key, clients, **({"max_rows": 2, "row_bytes": 8, "min_clients": 2} | terms))


def said(key: BatchKey = KEY) -> Announced:
    """What rows for the batch answer."""
    return Announced(key, DIGEST)


def rows_of(client: str, count: int = 2, size: int = 8) -> list[bytes]:
    """Rows one can tell apart, whose sender one can see."""
    return [f"{client}{i}".encode().ljust(size, b".") for i in range(count)]


def submit_all(shuffler: BatchStore, key: BatchKey = KEY, names: tuple[str, ...] = NAMES) -> list[bytes]:
    for name in names:
        shuffler.submit(name, said(key), rows_of(name))
    return [row for name in names for row in rows_of(name)]


@contextmanager
def refusal(reason: str) -> Iterator[None]:
    with pytest.raises(Refused) as caught:
        yield
    assert caught.value.reason == reason


def on_disk(path: Path) -> bytes:
    """The state's file and all beside it."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.iterdir()))
