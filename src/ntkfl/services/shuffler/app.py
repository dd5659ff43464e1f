"""The shuffler over HTTP: every request is signed, by a client or by the aggregator.

    client       POST /v1/runs/RUN/rows, /sums
    aggregator   POST /v1/runs/RUN, /v1/runs/RUN/announcements
                 DELETE BATCH, POST BATCH/release, BATCH/cancel, where BATCH is /v1/runs/RUN/ROUND/EXCHANGE

The log has no name and no address of a client: the times at which it sends would say as much as its name beside its
rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.receipt import issue_receipt
from ntkfl.crypto.row_frames import FRAME_BYTES, SEED_BYTES, Announced, BatchKey, frame_rows, unpack_rows
from ntkfl.errors import MessageError, Refused, TrustError
from ntkfl.services.announcement import MOST_HEAD, Head
from ntkfl.services.peers import Peers
from ntkfl.services.shuffler.runs import Runs
from ntkfl.services.shuffler.store import BatchStore
from ntkfl.services.web import SignedRequest, serve, service_app

MAX_BODY = 256 << 20  # bytes of a submission
AT_ONCE = 16  # bodies of submissions in memory; other clients wait for their turn before they send
PIECE = 1 << 20  # bytes of a released batch that are read at once
_BESIDE_ROWS = SEED_BYTES + FRAME_BYTES  # bytes of a submission at most, besides its rows
_logger = logging.getLogger("ntkfl.services")
Handler = Callable[[Request], Awaitable[Response]]


def serve_shuffler(folder: Path, host: str | None = None, port: int | None = None) -> None:
    """Serve the state in `folder` until told to stop."""
    peers = Peers.read(folder)
    signer, runs = peers.load_key(folder, "shuffler"), Runs(folder, peers)
    try:
        serve("shuffler", shuffler_app(runs, peers, signer), folder, peers.shuffler.url, host, port)
    finally:
        runs.close()


def shuffler_app(runs: Runs, peers: Peers, signer: SigningKey) -> Starlette:
    """The requests of the module's docstring. Handlers only check who asks and what came; every decision, and all that
    is written, is the store's, in a thread: SQLite waits for the disk.
    """
    turns = asyncio.Semaphore(AT_ONCE)

    def submission(*, summed: bool) -> Handler:
        """A client's rows, or the seed of its mask and its masked vector. What was sent first counts, and has its
        receipt again; all receipts of an exchange are the same bytes.
        """

        async def submit(request: Request) -> Response:
            signed, run = SignedRequest(request, peers), request.path_params["run"]
            client, store = signed.client.client, runs.find(run)
            most = min(MAX_BODY, _BESIDE_ROWS + await run_in_threadpool(store.submission_limit))
            async with turns:
                body = memoryview(await signed.body(most))
                seed, frame = (bytes(body[:SEED_BYTES]), body[SEED_BYTES:]) if summed else (None, body)
                try:
                    announced, rows = await run_in_threadpool(unpack_rows, frame)
                    await run_in_threadpool(store.submit, client, announced, rows, seed)
                except MessageError as error:
                    raise Refused("malformed", str(error)) from None
                except Refused as refused:
                    if refused.reason != "replayed":
                        raise
            return JSONResponse({"receipt": issue_receipt(signer, peers.federation, run, announced).hex()})

        return submit

    def by_aggregator(handler: Callable[[Request, SignedRequest], Awaitable[Response]]) -> Handler:
        """A handler of what only the aggregator may ask."""

        async def checked(request: Request) -> Response:
            signed = SignedRequest(request, peers)
            if signed.credential is not None:
                raise Refused("not-aggregator", "only the aggregator asks for this")
            return await handler(request, signed)

        return checked

    def on_batch(handler: Callable[[BatchStore, BatchKey], Response]) -> Handler:
        """A handler of the aggregator's on one exchange of a run, which its address names."""

        async def checked(request: Request, signed: SignedRequest) -> Response:
            await signed.body()
            store, values = runs.find(request.path_params["run"]), request.path_params
            try:
                key = BatchKey(values["round"], values["exchange"]).check()
            except MessageError as error:
                raise Refused("malformed", str(error)) from None
            return await run_in_threadpool(handler, store, key)

        return by_aggregator(checked)

    @by_aggregator
    async def begin(request: Request, signed: SignedRequest) -> Response:
        terms = (await signed.body(64)).decode("ascii", "replace")
        return JSONResponse(await run_in_threadpool(runs.begin, request.path_params["run"], terms))

    @by_aggregator
    async def announce(request: Request, signed: SignedRequest) -> Response:
        """Open a batch, if all have agreed to one like it. Who is revoked is asked each time: nobody who was by now can
        answer, and nothing opens while that is not known.
        """
        body, run = await signed.body(MOST_HEAD), request.path_params["run"]
        store = runs.find(run)
        try:
            head = Head.check(body, peers)
        except (TrustError, MessageError) as error:
            raise Refused("malformed", f"not the aggregator's announcement: {error}") from None
        batch, agreed = head.batch, peers.round
        if head.run != run or batch.clients != agreed.clients:
            raise Refused("terms", f"a batch of this run asks {agreed.clients} clients, not {batch.clients}")
        if batch.max_rows * batch.row_bytes > MAX_BODY - _BESIDE_ROWS:
            raise Refused("terms", f"a client's rows may have at most {MAX_BODY} bytes in all")
        digest, revoked = Announced.of(batch.key, body).digest, await run_in_threadpool(runs.revoked)
        await run_in_threadpool(store.open, batch, digest, head.terms, revoked)
        return JSONResponse({"status": "open"})

    @on_batch
    def release(store: BatchStore, key: BatchKey) -> Response:
        """The frame of all rows; of a secure sum, the sum of the masks before it. Made and sent piece by piece."""
        batch = store.permute(key)
        masks, count = store.masks(key) if batch.numbers else b"", batch.rows or 0
        _logger.info("round %d: released %d rows of %d clients", key.round, count, batch.clients)
        piece = max(1, PIECE // batch.row_bytes)  # rows that are in memory at once, however many there are
        pieces = (b"".join(store.released(key, at, piece)) for at in range(0, count, piece))
        length = {"content-length": str(len(masks) + FRAME_BYTES + count * batch.row_bytes)}
        frame = frame_rows(batch.announced, count, batch.row_bytes, pieces)
        return StreamingResponse((part for parts in ((masks,), frame) for part in parts), headers=length)

    @on_batch
    def cancel(store: BatchStore, key: BatchKey) -> Response:
        _logger.warning("round %d: cancelled, %d clients had answered", key.round, store.status(key).clients)
        store.cancel(key)
        return JSONResponse({"status": "cancelled"})

    @on_batch
    def forget(store: BatchStore, key: BatchKey) -> Response:
        store.forget(key)
        return JSONResponse({"status": "forgotten"})

    run, batch = "/v1/runs/{run}", "/v1/runs/{run}/{round:int}/{exchange:int}"
    routes = [
        Route(f"{run}/rows", submission(summed=False), methods=["POST"]),
        Route(f"{run}/sums", submission(summed=True), methods=["POST"]),
        Route(run, begin, methods=["POST"]),
        Route(f"{run}/announcements", announce, methods=["POST"]),
        Route(batch, forget, methods=["DELETE"]),
        Route(f"{batch}/release", release, methods=["POST"]),
        Route(f"{batch}/cancel", cancel, methods=["POST"]),
    ]
    return service_app("shuffler", routes, runs.check)
