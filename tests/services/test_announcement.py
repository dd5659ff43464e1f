"""Announcements: what the aggregator signed and nothing else, and a thousand clients that wait for one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ntkfl.crypto.context import bind
from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.errors import TrustError
from ntkfl.services.announcement import Announcement
from ntkfl.services.shuffler.batch import Batch
from ntkfl.wire import Message

batches = st.builds(
    Batch,
    st.builds(BatchKey, st.integers(0, 2**32 - 1), st.integers(0, 255)),
    st.lists(st.from_regex(NAME_PATTERN, fullmatch=True), min_size=2, max_size=4, unique=True).map(tuple),
    st.integers(1, 2**32 - 1),
    st.integers(1, 2**32 - 1),
    st.just(2),
    st.none() | st.floats(0, 1e6),
)


SIGNER = SigningKey.generate()
WHERE = ("demo", "run-0")
MESSAGE = Message("weights", 3, {"weights": torch.arange(3.0)})


def check(signed: bytes) -> Announcement:
    return Announcement.check(signed, SIGNER.public, *WHERE)


@given(batches)
def test_what_is_signed_is_read(batch: Batch) -> None:
    signed = Announcement("exchange", batch.key, batch, MESSAGE, b"k" * 32).sign(SIGNER, *WHERE)
    heard = check(signed)
    assert (heard.kind, heard.key, heard.batch, heard.sealing_key) == ("exchange", batch.key, batch, b"k" * 32)
    assert heard.announced == Announced.of(batch.key, signed)  # all its bytes, the signature included
    assert heard.message is not None
    assert torch.equal(heard.message.arrays["weights"], torch.arange(3.0))


@given(st.data())
def test_a_changed_bit_is_noticed(data: st.DataObject) -> None:
    signed = bytearray(Announcement("end", BatchKey(3, 0)).sign(SIGNER, *WHERE))
    at = data.draw(st.integers(0, 8 * len(signed) - 1))
    signed[at // 8] ^= 1 << at % 8
    with pytest.raises(TrustError):
        check(bytes(signed))


BATCH = '{"key":[1,0],"cohort":["a","b"],"max_rows":1,"row_bytes":1,"min_clients":2,"seconds":null}'
SOUND = '{"kind":"exchange","key":[1,0],"batch":' + BATCH + ',"sealing_key":"' + "ab" * 32 + '"}'


def sign_head(head: str) -> bytes:
    body = len(head).to_bytes(4, "little") + head.encode()
    return SIGNER.sign(body, bind("ntkfl announcement v2", *WHERE)) + body


def test_the_head_of_the_specification_is_read() -> None:
    assert check(sign_head(SOUND)).batch == Batch(BatchKey(1, 0), ("a", "b"), 1, 1, 2, None)
