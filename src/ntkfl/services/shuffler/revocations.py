"""The key server's signed list of revoked clients, which the shuffler fetches every ten seconds."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from pathlib import Path

import httpx

from ntkfl.errors import ConfigError, NTKFLError, Refused
from ntkfl.services.http.client import MANY, check_answer
from ntkfl.services.key_server.key_protocol import check_revoked
from ntkfl.services.log import log
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.services.trusted_peers import TrustedPeers

REFRESH_S = 10.0  # between two requests


async def _read(http: httpx.AsyncClient, url: str) -> bytes:
    """An answer, no more of it than a list of names can have."""
    async with http.stream("GET", url, headers={"accept-encoding": "identity"}) as response:
        response.raise_for_status()
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            check_answer(response, MANY, len(body))
    return bytes(body)


class Revocations:
    """The list of revoked clients. While the key server cannot be reached, the last one stays in force."""

    def __init__(self, shuffler: Shuffler, peers: TrustedPeers, ca: Path) -> None:
        self._shuffler, self._peers, self._failing = shuffler, peers, False
        try:
            self._tls = ssl.create_default_context(cafile=ca)
        except OSError:
            raise ConfigError(f"no certificate authority in {ca}") from None

    async def refresh(self) -> None:
        key_server = self._peers.key_server
        try:
            async with httpx.AsyncClient(verify=self._tls, timeout=3, trust_env=False) as http:
                answer = json.loads(await _read(http, f"{key_server.url}/v1/revoked"))
            serial, clients = check_revoked(answer, bytes.fromhex(key_server.signing_key), self._peers.federation)
        except (httpx.HTTPError, NTKFLError, ValueError, AttributeError, RecursionError) as error:
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
