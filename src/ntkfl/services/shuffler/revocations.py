"""The key server's signed list of revoked clients, which the shuffler fetches every ten seconds."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from ntkfl.errors import NTKFLError, Refused
from ntkfl.services.http.client import MANY, HttpClient
from ntkfl.services.key_server.key_protocol import check_revoked
from ntkfl.services.log import log
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.services.trusted_peers import TrustedPeers

REFRESH_S = 10.0  # between two requests


class Revocations:
    """The list of revoked clients. While the key server cannot be reached, the last one stays in force."""

    def __init__(self, shuffler: Shuffler, peers: TrustedPeers, ca: Path) -> None:
        self._shuffler, self._peers, self._failing = shuffler, peers, False
        self._key_server = HttpClient(peers.key_server.url, ca, patience=0, timeout=3)

    async def refresh(self) -> None:
        signer, federation = bytes.fromhex(self._peers.key_server.signing_key), self._peers.federation
        try:
            answer = await asyncio.to_thread(self._key_server.ask, "GET", "/v1/revoked", most=MANY)
            serial, clients = check_revoked(answer.json(), signer, federation)
        except (NTKFLError, ValueError, AttributeError, RecursionError) as error:
            if not self._failing:
                log("revocations-unavailable", level=logging.WARNING, failed=error)
            self._failing = True
            return
        if self._failing:
            log("revocations-restored")
        self._failing = False
        await asyncio.to_thread(self._shuffler.set_revoked, clients, serial)

    async def keep_refreshing(self) -> None:
        while True:
            try:
                await self.refresh()
            except Refused as error:  # by the state: it may recover
                log("revocations-unavailable", level=logging.WARNING, failed=error)
            await asyncio.sleep(REFRESH_S)
