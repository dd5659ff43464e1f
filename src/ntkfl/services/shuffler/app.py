"""The shuffler as a process: one listener for clients, which sign their requests, and one for the aggregator alone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI

from ntkfl.crypto.hpke import SigningKey
from ntkfl.errors import TrustError
from ntkfl.services.http.server import Listener, serve
from ntkfl.services.shuffler.aggregator_app import aggregator_app
from ntkfl.services.shuffler.client_app import MAX_HELD, client_app
from ntkfl.services.shuffler.long_poll import LongPollEvent
from ntkfl.services.shuffler.presence import Presence
from ntkfl.services.shuffler.revocations import Revocations
from ntkfl.services.shuffler.schemas import MAX_BODY
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.services.trusted_peers import TrustedPeers, agreed_cohort

STATE, SIGNING_KEY = "state.sqlite", "signing-key.pem"
CONNECTIONS = 4096  # of clients, most of which wait


def serve_shuffler(
    folder: Path,
    at: tuple[str, int],
    aggregator_at: tuple[str, int],
    max_held: int = MAX_HELD,
) -> None:
    """Serve both listeners on the state in `folder` until told to stop. At most `max_held` bytes of bodies wait."""
    peers = TrustedPeers.read(folder)
    run = f"{peers.federation}/{peers.run}"
    presence = Presence(agreed_cohort(folder))
    shuffler = Shuffler(folder / STATE, floor=peers.shuffler.min_clients, run=run, presence=presence)
    long_poll, stop = LongPollEvent(), threading.Event()
    signer = SigningKey.load(folder / SIGNING_KEY)
    if signer.public.hex() != peers.shuffler.signing_key:
        raise TrustError(f"the key in {folder} is not the one that federation.toml names")
    revocations = Revocations(shuffler, peers, folder / "ca.pem")

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(revocations.keep_refreshing()),
            asyncio.create_task(long_poll.close_after(stop)),
        ]
        yield
        for task in tasks:
            task.cancel()

    tls = folder / "tls.pem", folder / "tls-key.pem"
    clients = client_app(shuffler, peers, long_poll, signer, max_held=max_held, lifespan=lifespan)
    most = min(MAX_BODY, max_held)
    aggregator = aggregator_app(shuffler, peers, long_poll, revocations.refresh, most=most)
    listeners = [
        Listener(clients, *at, *tls, connections=CONNECTIONS),
        Listener(aggregator, *aggregator_at, *tls, client_ca=folder / "aggregator-ca.pem"),
    ]
    try:
        serve(listeners, stop)
    finally:
        shuffler.close()
