"""Announcements on their way: the aggregator's body, and a thousand clients that wait for one."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntkfl.engine.services.announce import Bell, pack_announcement, unpack_announcement
from ntkfl.engine.services.shuffler import client_app
from ntkfl.errors import Refused
from ntkfl.privacy.identity import NAME_PATTERN, sign_request
from ntkfl.privacy.rows import BatchKey
from ntkfl.privacy.shuffling import Batch, Shuffler

from .federation import PREFIX, Deployment

batches = st.builds(
    Batch,
    st.builds(BatchKey, st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1), st.integers(0, 255)),
    st.lists(st.from_regex(NAME_PATTERN, fullmatch=True), min_size=1, max_size=4).map(tuple),
    st.integers(1, 2**32 - 1),
    st.integers(1, 2**32 - 1),
    st.integers(1, 100),
    st.none() | st.floats(0, 1e6),
)


@given(st.binary(min_size=1, max_size=50), st.none() | batches)
def test_what_is_packed_is_unpacked(signed: bytes, batch: Batch | None) -> None:
    assert unpack_announcement(pack_announcement(signed, batch)) == (signed, batch)


@given(st.binary(max_size=40))
def test_anything_else_is_refused_or_a_plain_announcement(body: bytes) -> None:
    try:
        signed, batch = unpack_announcement(body)
    except Refused:
        return
    assert (body[:4], signed, batch) == (bytes(4), body[4:], None)


@pytest.mark.parametrize(
    "terms",
    [
        "null",
        "{}",
        "[1]",
        '{"key":[1,0,0],"cohort":["a"],"max_rows":"1","row_bytes":1,"min_clients":2,"seconds":null}',
        '{"key":[1,0,256],"cohort":["a"],"max_rows":1,"row_bytes":1,"min_clients":2,"seconds":null}',
        '{"key":[1,0],"cohort":["a"],"max_rows":1,"row_bytes":1,"min_clients":2,"seconds":null}',
        '{"key":[1,0,0],"cohort":[7],"max_rows":1,"row_bytes":1,"min_clients":2,"seconds":null}',
    ],
)
def test_terms_that_are_not_a_batchs_are_refused(terms: str) -> None:
    with pytest.raises(Refused, match="terms are not those"):
        unpack_announcement(len(terms).to_bytes(4, "little") + terms.encode() + b"signed")


def test_a_thousand_clients_wait_without_a_thread_each(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    shuffler, bell = Shuffler(), Bell()
    app = client_app(shuffler, deployment.pins, bell)
    ada, path = deployment.client("ada"), f"{PREFIX}/announcement?after=0"
    headers = sign_request(ada.credential, ada.key, "GET", path, b"")

    async def scenario() -> None:
        limits, transport = httpx.Limits(max_connections=None), httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="https://shuffler", limits=limits) as http:
            waiting = [asyncio.create_task(http.get(path, headers=headers, timeout=60)) for _ in range(1000)]
            while len(bell) < 1000:
                await asyncio.sleep(0.05)
            assert threading.active_count() < 60
            begun = time.perf_counter()
            assert (await http.get("/health")).status_code == 200
            assert time.perf_counter() - begun < 1
            await asyncio.to_thread(shuffler.publish, b"here it is")
            bell.ring()
            answers = await asyncio.gather(*waiting)
        assert {(answer.status_code, answer.content) for answer in answers} == {(200, b"here it is")}

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_wait_ends_without_an_announcement(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    app = client_app(Shuffler(), deployment.pins, Bell(), wait_s=0.2)
    ada, path = deployment.client("ada"), f"{PREFIX}/announcement?after=0"
    headers = sign_request(ada.credential, ada.key, "GET", path, b"")

    async def scenario() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://shuffler") as http:
            return await http.get(path, headers=headers)

    begun = time.perf_counter()
    answer = asyncio.run(scenario())
    assert (answer.status_code, answer.content) == (204, b"")
    assert 0.2 <= time.perf_counter() - begun < 5
