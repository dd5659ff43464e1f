"""The shuffler over HTTP: every request is signed, by a client or by the aggregator.

    client       POST /v1/runs/RUN/rows, /sums
    aggregator   POST /v1/runs/RUN, /v1/runs/RUN/announcements
                 POST BATCH (release), DELETE BATCH, where BATCH is /v1/runs/RUN/ROUND/EXCHANGE

The log has no name and no address of a client: the times at which it sends would say as much as its name beside its
rows. Each run has a database of its own in the shuffler's folder (`store.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.row_frames import FRAME_BYTES, SEED_BYTES, Announced, BatchKey, pack_rows, unpack_rows
from ntkfl.crypto.signed import check_name, issue_receipt
from ntkfl.errors import ConfigError, MessageError, NTKFLError, Refused, TrustError
from ntkfl.safe_parse import parse_json
from ntkfl.services.announcement import MOST_HEAD, Head
from ntkfl.services.clients import HttpClient
from ntkfl.services.peers import Peers
from ntkfl.services.store import BatchStore
from ntkfl.services.web import SignedRequest, serve, service_app

MAX_BODY = 256 << 20  # bytes of a submission
AT_ONCE = 16  # bodies of submissions in memory; other clients wait for their turn before they send
_BESIDE_ROWS = SEED_BYTES + FRAME_BYTES  # bytes of a submission at most, besides its rows
_logger = logging.getLogger("ntkfl.services")


class Runs:
    """All runs of a shuffler's folder. `ConfigError` where a run's files do not belong together."""

    def __init__(self, folder: Path, peers: Peers) -> None:
        self._folder, self._peers, self._lock = folder, peers, threading.Lock()
        self._key_server = HttpClient(peers.key_server.url, folder, patience=0, timeout=3)
        files = (path for path in folder.glob("run-*") if path.suffix in (".sqlite", ".released"))
        self._stores = {name: self._load(name) for name in {path.stem[4:] for path in files}}

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def begin(self, run: str, terms: str) -> int:
        """Begin a run, or go on with it: the first round that was not announced yet."""
        check_name(run)
        with self._lock:
            if run not in self._stores:
                try:
                    self._stores[run] = self._load(run)
                except ConfigError as error:
                    raise Refused("storage", str(error)) from None
        return self._stores[run].begin(terms)

    def find(self, run: str) -> BatchStore:
        """The state of a run that was begun here."""
        if run not in self._stores:
            raise Refused("unknown-run", "the aggregator has not begun this run here")
        return self._stores[run]

    def revoked(self) -> list[str]:
        """The clients that the key server has revoked by now. `Refused` while it does not say: then nothing opens."""
        try:
            names = parse_json(self._key_server.ask("GET", "/v1/revoked").decode())
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError("it must answer with a list of names")
        except (NTKFLError, ValueError) as error:
            raise Refused("busy", f"the key server does not say who is revoked: {error}") from None
        return names

    def _load(self, run: str) -> BatchStore:
        owner = json.dumps([self._peers.federation, run])
        return BatchStore(self._folder / f"run-{run}.sqlite", floor=self._peers.round.least, run=owner)


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

    async def submit(request: Request) -> Response:
        """A client's rows, or the seed of its mask and its masked vector. What was sent first counts, and has its
        receipt again; all receipts of an exchange are the same bytes.
        """
        signed, run = SignedRequest(request, peers), request.path_params["run"]
        if signed.credential is None:
            raise Refused("not-client", "only clients ask for this")
        store, seed_bytes = runs.find(run), SEED_BYTES if request.url.path.endswith("/sums") else 0
        most = min(MAX_BODY, _BESIDE_ROWS + await run_in_threadpool(store.submission_limit))
        async with turns:
            body = memoryview(await signed.body(most))
            seed = bytes(body[:seed_bytes]) if seed_bytes else None
            try:
                announced, rows = await run_in_threadpool(unpack_rows, body[seed_bytes:])
                await run_in_threadpool(store.submit, signed.credential.client, announced, rows, seed)
            except MessageError as error:
                raise Refused("malformed", str(error)) from None
        return JSONResponse({"receipt": issue_receipt(signer, peers.federation, run, announced).hex()})

    async def asked(request: Request, most: int = 0) -> bytes:
        """The body of what only the aggregator may ask."""
        signed = SignedRequest(request, peers)
        if signed.credential is not None:
            raise Refused("not-aggregator", "only the aggregator asks for this")
        return await signed.body(most)

    async def begin(request: Request) -> Response:
        """Pin a run's terms, and tell the aggregator which round comes next."""
        terms = (await asked(request, 64)).decode("ascii", "replace")
        return JSONResponse(await run_in_threadpool(runs.begin, request.path_params["run"], terms))

    async def announce(request: Request) -> Response:
        """Open a batch, if all have agreed to one like it. Who is revoked is asked each time: nobody who was by now can
        answer, and nothing opens while that is not known.
        """
        body, run = await asked(request, MOST_HEAD), request.path_params["run"]
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

    async def on_batch(request: Request) -> Response:
        """Release a batch: the sum of the masks, of a secure sum, and the frame of all rows. Or delete it."""
        await asked(request)
        store, values = runs.find(request.path_params["run"]), request.path_params
        key = BatchKey(values["round"], values["exchange"])
        if request.method == "DELETE":
            await run_in_threadpool(store.discard, key)
            return JSONResponse({"status": "deleted"})
        found = await run_in_threadpool(store.release, key)
        _logger.info("round %d, exchange %d: released %d rows", *key, len(found.rows))
        return Response(found.masks + await run_in_threadpool(pack_rows, found.announced, found.rows))

    run = "/v1/runs/{run}"
    routes = [
        Route(f"{run}/rows", submit, methods=["POST"]),
        Route(f"{run}/sums", submit, methods=["POST"]),
        Route(run, begin, methods=["POST"]),
        Route(f"{run}/announcements", announce, methods=["POST"]),
        Route(f"{run}/{{round:int}}/{{exchange:int}}", on_batch, methods=["POST", "DELETE"]),
    ]
    return service_app("shuffler", routes)
