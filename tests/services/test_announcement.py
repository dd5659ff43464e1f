"""Announcements: what the aggregator signed and nothing else, and a thousand clients that wait for one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ntkfl.crypto.context import bind
from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.errors import MessageError, TrustError
from ntkfl.services.announcement import Announcement
from ntkfl.services.http.signing import sign_request
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.shuffler.client_app import client_app
from ntkfl.services.shuffler.long_poll import LongPollEvent
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.wire import Message
from tests.deployment.federation import PREFIX, Deployment

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


@given(st.binary(max_size=60))
def test_whatever_the_aggregator_signs_is_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(MessageError):
        check(SIGNER.sign(body, bind("ntkfl announcement v2", *WHERE)) + body)


BATCH = '{"key":[1,0],"cohort":["a","b"],"max_rows":1,"row_bytes":1,"min_clients":2,"seconds":null}'
SOUND = '{"kind":"exchange","key":[1,0],"batch":' + BATCH + ',"sealing_key":"' + "ab" * 32 + '"}'


def nonsense(changed: str, to: str) -> str:
    assert changed in SOUND
    return SOUND.replace(changed, to)


def sign_head(head: str) -> bytes:
    body = len(head).to_bytes(4, "little") + head.encode()
    return SIGNER.sign(body, bind("ntkfl announcement v2", *WHERE)) + body


def test_the_head_of_the_specification_is_read() -> None:
    assert check(sign_head(SOUND)).batch == Batch(BatchKey(1, 0), ("a", "b"), 1, 1, 2, None)


@pytest.mark.parametrize(
    "head",
    [
        "null",
        nonsense(f'"batch":{BATCH},', ""),
        nonsense("exchange", "dance"),
        nonsense('"key":[1,0]', '"key":[1.0,0]'),
        nonsense('"key":[1,0]', '"key":[1,256]'),
        nonsense('"key":[1,0]', '"key":[1,0,0]'),  # as the first version of the protocol had it
        nonsense('"key":[1,0],"batch"', '"key":[1,1],"batch"'),  # not its own
        nonsense('"exchange"', '"end"'),
        nonsense('"min_clients":2', '"min_clients":NaN'),
        nonsense('"max_rows":1', '"max_rows":1.5'),
        nonsense('"seconds":null', '"seconds":' + "9" * 400),
        nonsense('"a","b"', '"a","a"'),
        nonsense(',"sealing_key":"' + "ab" * 32 + '"', ""),
        nonsense('"' + "ab" * 32 + '"', "null"),
        nonsense("ab" * 32, "ab" * 31),
        nonsense("ab" * 32, "AB" * 32),
        '{"kind":"end","key":[1,0],"batch":null,"sealing_key":"' + "ab" * 32 + '"}',
    ],
)
def test_signed_nonsense_is_one_line(head: str) -> None:
    with pytest.raises(MessageError, match="cannot be read"):
        check(sign_head(head))


def test_a_thousand_clients_wait_without_a_thread_each(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    shuffler, long_poll = Shuffler(), LongPollEvent()
    app = client_app(shuffler, deployment.peers, long_poll, SigningKey.generate())
    path = f"{PREFIX}/announcement?after=0"
    clients = [deployment.client(f"client-{i}") for i in range(125)]  # one may have eight requests under way
    signed = [sign_request(client.credential, client.key, "GET", path, b"") for client in clients for _ in range(8)]

    async def scenario() -> None:
        limits, transport = httpx.Limits(max_connections=None), httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="https://shuffler", limits=limits) as http:
            waiting = [asyncio.create_task(http.get(path, headers=headers, timeout=60)) for headers in signed]
            while len(long_poll) < 1000:
                await asyncio.sleep(0.05)
            assert threading.active_count() < 60
            begun = time.perf_counter()
            assert (await http.get("/health")).status_code == 200
            assert time.perf_counter() - begun < 1
            await asyncio.to_thread(shuffler.publish, b"here it is", BatchKey(1, 0))
            long_poll.notify()
            answers = await asyncio.gather(*waiting)
        assert {(answer.status_code, answer.content) for answer in answers} == {(200, b"here it is")}

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_wait_ends_without_an_announcement(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    app = client_app(Shuffler(), deployment.peers, LongPollEvent(), SigningKey.generate(), wait_s=0.2)
    ada, path = deployment.client("ada"), f"{PREFIX}/announcement?after=0"
    headers = sign_request(ada.credential, ada.key, "GET", path, b"")

    async def scenario() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://shuffler") as http:
            return await http.get(path, headers=headers)

    begun = time.perf_counter()
    answer = asyncio.run(scenario())
    assert (answer.status_code, answer.content) == (204, b"")
    assert 0.2 <= time.perf_counter() - begun < 5
