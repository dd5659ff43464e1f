"""The services as others see them: an HTTP client over TLS, a client's identity, and the shuffler for the aggregator.

Every request is safe to repeat, and is repeated while a service cannot be reached: a service that restarts in between
has lost nothing. A refusal is final.
"""

from __future__ import annotations

import random
import ssl
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.crypto.row_frames import FRAME_BYTES, WORD_BYTES, Announced, BatchKey, unpack_rows
from ntkfl.crypto.signed import AGGREGATOR, Credential, open_run_secret, sign_request
from ntkfl.errors import ConfigError, MessageError, Refused, TrustError
from ntkfl.extras import missing
from ntkfl.safe_parse import parse_json
from ntkfl.services.announcement import Batch
from ntkfl.services.peers import CA, SIGNING_KEY, Peers

try:
    import httpx
except ImportError as error:
    raise missing("a service", "services") from error

if TYPE_CHECKING:
    from ntkfl.privacy.projection import RunSecret

SEALING_KEY, CREDENTIAL = "sealing-key.pem", "credential"
_LONGEST_PAUSE_S = 2.0
_MOST_BYTES = 1 << 20  # of an answer that is not a batch of rows
Signer = tuple[str, SigningKey]


class HttpClient:
    """A service at `url`, trusted by the certificates in the folder's `ca.pem` alone. `signs` every request: a
    credential, or the word "aggregator", and its holder's key.
    """

    def __init__(
        self, url: str, folder: Path, signs: Signer | None = None, patience: float = 60, timeout: float = 60
    ) -> None:
        try:
            context = ssl.create_default_context(cafile=str(folder / CA))
        except (OSError, ssl.SSLError) as error:
            raise TrustError(f"cannot use the certificates in {folder / CA}: {error}") from None
        self.url, self.patience = url.rstrip("/"), patience
        limits = httpx.Timeout(timeout, connect=min(5, timeout))
        plain = {"accept-encoding": "identity"}  # a bound on compressed bytes bounds nothing
        self._http = httpx.Client(base_url=self.url, verify=context, timeout=limits, headers=plain)
        self.signs = signs

    def ask(self, method: str, path: str, body: bytes = b"", most: int = _MOST_BYTES) -> bytes:
        """The body of the answer. A service that is away or overloaded is asked again for `patience` seconds.
        `Refused` as the service refuses, or "unreachable"; "too-large" where the answer has more than `most` bytes.
        """
        until, pause = time.monotonic() + self.patience, 0.1
        while True:
            request = self._http.build_request(method, path, content=body or None)
            if self.signs is not None:
                signed = sign_request(*self.signs, method, request.url.raw_path.decode(), body)
                request.headers["authorization"] = signed
            try:
                response, answer = self._received(request, most)
                if response.status_code not in (502, 503, 504) or time.monotonic() > until:
                    return _accept(response, answer)
            except httpx.TransportError as error:
                if time.monotonic() > until:
                    reason = str(error) or type(error).__name__
                    raise Refused("unreachable", f"{self.url} cannot be reached ({reason})") from None
            time.sleep(pause * random.uniform(1, 1.5))  # clients refused together retry apart
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    def _received(self, request: httpx.Request, most: int) -> tuple[httpx.Response, bytes]:
        """An answer and its body. What is too long is dropped on its way: no service fills the memory of who asks."""
        answer = bytearray()
        with closing(self._http.send(request, stream=True)) as response:
            for piece in response.iter_raw():
                answer += piece
                if len(answer) > most:
                    raise Refused("too-large", f"{self.url} answers with more than {most:,} bytes")
        return response, bytes(answer)


def _accept(response: httpx.Response, answer: bytes) -> bytes:
    """The answer, or `Refused` with the service's own reason; a proxy's page has none."""
    if response.is_success:
        return answer
    try:
        values = parse_json(answer.decode())
        reason, message = str(values["error"]), str(values["message"])
    except (ValueError, KeyError, TypeError):
        reason, message = "refused", f"status {response.status_code}"
    raise Refused(reason, message)


class Identity:
    """A client's keys and credential, from its folder as `ntkfl keys` makes it."""

    def __init__(self, folder: Path, patience: float = 60) -> None:
        self.peers = Peers.read(folder)
        self.sealing, self.signing = SealingKey.load(folder / SEALING_KEY), SigningKey.load(folder / SIGNING_KEY)
        try:
            self.issued = (folder / CREDENTIAL).read_text()
        except (OSError, ValueError):
            raise ConfigError(f"no credential in {folder}: the key server's operator gives one (keys client)") from None
        known = Credential.check(self.issued, self.peers.key_of("key_server"), self.peers.federation)
        if (known.sealing_key, known.signing_key) != (self.sealing.public.hex(), self.signing.public.hex()):
            raise TrustError(f"the credential in {folder} was issued for other keys than those beside it")
        self.name = known.client
        self.signs: Signer = self.issued, self.signing
        self._key_server = HttpClient(self.peers.key_server.url, folder, self.signs, patience)

    def run_secret(self, run: str) -> RunSecret:
        """ρ of the run, from the key server; kept in memory alone."""
        from ntkfl.privacy.projection import RunSecret  # torch comes with it

        try:
            answer = parse_json(self._key_server.ask("POST", f"/v1/runs/{run}/secret").decode())
        except ValueError:
            answer = None
        key, federation = self.peers.key_of("key_server"), self.peers.federation
        return RunSecret(open_run_secret(answer, self.sealing, key, federation, run, self.name), federation, run)


class ShufflerClient:
    """The shuffler for one run of the aggregator whose folder this is."""

    def __init__(self, folder: Path, peers: Peers, signer: SigningKey, run: str) -> None:
        self.http = HttpClient(peers.shuffler.url, folder, (AGGREGATOR, signer))
        self._run = f"/v1/runs/{run}"

    def begin(self, terms: str) -> int:
        """Pin the run's terms, given by their SHA-256: the first round that was not announced yet."""
        try:
            return int(self.http.ask("POST", self._run, terms.encode()))
        except ValueError:
            raise MessageError("an answer of the shuffler's that cannot be read") from None

    def publish(self, signed: bytes) -> None:
        """Open the batch of a signed head; the batch before it ends."""
        self.http.ask("POST", f"{self._run}/announcements", signed)

    def release(self, announced: Announced, batch: Batch) -> tuple[list[bytes], bytes]:
        """The batch's rows in random order; and of a secure sum the sum of the clients' masks, 4 bytes a number."""
        size = WORD_BYTES * batch.numbers
        most = size + FRAME_BYTES + batch.clients * batch.max_rows * batch.row_bytes
        body = self.http.ask("POST", self._batch(announced.key), most=max(most, _MOST_BYTES))
        found, rows = unpack_rows(body[size:])
        if found != announced:
            raise MessageError("the shuffler released rows that answer another announcement")
        return rows, body[:size]

    def discard(self, key: BatchKey) -> None:
        """Delete all that the shuffler holds of a batch, fetched or given up."""
        self.http.ask("DELETE", self._batch(key))

    def _batch(self, key: BatchKey) -> str:
        return f"{self._run}/{key.round}/{key.exchange}"
