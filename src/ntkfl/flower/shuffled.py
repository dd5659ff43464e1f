"""CP-NTK-FL and secure sums on Flower: questions and receipts travel through Flower, rows and masked sums do not.

    strategy ── signed question ──► Flower ──► client ── sealed rows, or seed and masked sum ──► shuffler
       ▲  ▲                                        └── the shuffler's receipt ──► Flower ──┐        │
       │  └────────────────────────────────────────────────────────────────────────────────┘        │
       └────────────────── rows in random order, or masked sums and the sum of the masks ◄──────────┘

`Shuffler(folder)` stands on both sides: `Strategy(…, through=…)` and `reply(…, through=…)`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from flwr.app import Context

from ntkfl.crypto.credentials import NAME_PATTERN
from ntkfl.crypto.hpke import SEAL_BYTES, SigningKey
from ntkfl.crypto.receipt import check_receipt
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.errors import ConfigError, MessageError, Refused, TooFew, TrustError
from ntkfl.federation.policy import Agreed, Terms
from ntkfl.federation.secure_sum import SumSchema, mask_reply
from ntkfl.federation.shuffled import Mixed, RowSchema, ShuffledTransport, seal_reply
from ntkfl.federation.transport import Traffic
from ntkfl.flower.records import content, payload_of
from ntkfl.flower.transport import FlowerTransport
from ntkfl.methods import Method, State, Task
from ntkfl.privacy.projection import RunSecret
from ntkfl.privacy.randomness import Randomness
from ntkfl.services.announcement import Head, Question
from ntkfl.services.answered import take
from ntkfl.services.http_client import HttpClient
from ntkfl.services.key_server.client import Identity
from ntkfl.services.peers import Peers
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.shuffler.client import ShufflerClient
from ntkfl.wire import Message

FOLDER, ENVIRONMENT = "ntkfl-folder", "NTKFL_FOLDER"  # in a node's config, and beside it


class Shuffler:
    """The way through a shuffler, of the role whose folder this is (`ntkfl keys init`): a client's or the aggregator's.

    A client uses it for one question: `heed` it, `seal` the answer, `deliver` what was sealed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.peers = Peers.read(self.folder)
        self._question: Question | None = None

    @classmethod
    def from_config(cls, context: Context) -> Shuffler:
        """Of the folder that the node's owner named: `--node-config 'ntkfl-folder="…"'`, or NTKFL_FOLDER."""
        folder = context.node_config.get(FOLDER) or os.environ.get(ENVIRONMENT)
        if not folder:
            raise ConfigError(f"no folder of this client: give --node-config '{FOLDER}=\"…\"', or set {ENVIRONMENT}")
        return cls(str(folder))

    @property
    def digest(self) -> str:
        """Stands for the shuffler in a run's terms and in a site's policy."""
        return f"sha256:{hashlib.sha256(self.peers.key_of('shuffler')).hexdigest()}"

    # -- A client's side

    @cached_property
    def identity(self) -> Identity:
        """This client's keys; enrolled with its token when first asked for."""
        return Identity(self.folder)

    @cached_property
    def _http(self) -> HttpClient:
        client = HttpClient(self.peers.shuffler.url, self.folder)
        return client.identify(self.identity.issued, self.identity.signing)

    @property
    def _asked(self) -> Question:
        if self._question is None:
            raise ConfigError("no question was heeded: a new Shuffler(…) for each one")
        return self._question

    def hello(self, run: str) -> bytes:
        """Tell the shuffler that this client takes part in the run; its name, for the strategy."""
        self._http.ask("POST", f"/v1/runs/{run}/hello")
        return self.identity.name.encode()

    def heed(self, question: bytes, run: str, terms: Terms) -> Message:
        """What the aggregator asks, if it signed it and this client may answer: newer than all before, of this run and
        under these terms, in a cohort of as many as all have agreed on. On return it is on the disk.
        """
        asked = Question.check(question, self.peers)
        head, batch, agreed = asked.head, asked.head.batch, self.peers.round
        if (head.run, head.terms) != (run, terms.digest):
            raise TrustError("the question is of another run, or under other terms than it came with")
        if self.identity.name not in batch.cohort or len(batch.cohort) != agreed.clients:
            raise TrustError(f"the question is not for {agreed.clients} clients with this one among them")
        least = max(agreed.least, terms.min_clients)
        if batch.min_clients < least:
            raise TrustError(f"answers would be released with {batch.min_clients} clients; agreed are {least}")
        take(self.folder, asked)
        self._question = asked
        return Message.decode(asked.message)

    def run_secret(self) -> RunSecret:
        """ρ of the question's run, from the key server."""
        return self.identity.run_secret(self._asked.head.run)

    def rows(self, agreed: Agreed) -> int | None:
        """Samples that this client uses in a round, at most; None: all."""
        sampled = any(reply.sampled for reply in agreed.method.replies.values())
        return self.peers.round.rows if sampled and not agreed.privacy.secure_sum else None

    def seal(self, answer: Message, method: Method, task: Task, randomness: Randomness) -> bytes:
        """What goes to the shuffler: rows, filled up to as many as all clients send and sealed one by one; or the seed
        of a mask and the masked, sealed summand, rounded with the client's randomness. `TrustError` where the batch
        asks for anything else.
        """
        asked, batch = self._asked, self._asked.head.batch
        where = (bytes.fromhex(asked.head.sealing_key), self.peers.federation, asked.head.run, asked.announced)
        question = Message.decode(asked.message)
        reply = method.replies[question.kind](answer.arrays, answer.halves)
        if task.privacy.secure_sum:
            addends = reply.addends(method, task, question)
            schema = SumSchema.of(reply.kind, addends, self.peers.round.clients)
            if (batch.numbers, batch.row_bytes) != (schema.numbers, schema.sealed_bytes):
                raise TrustError(f"round {batch.key.round} asks for {batch.numbers} numbers, not {schema.numbers}")
            return mask_reply(schema.encode(addends, randomness), *where)
        count, rows = self.peers.round.rows if reply.sampled else 1, reply.split()
        size = len(rows[0].message(answer.round).encode()) + SEAL_BYTES
        if (batch.numbers, batch.max_rows, batch.row_bytes) != (0, count, size) or len(rows) > count:
            asks = f"{batch.max_rows} rows of {batch.row_bytes} bytes"
            raise TrustError(f"round {batch.key.round} asks for {asks}; this client has {len(rows)} of {size}")
        return seal_reply(reply, answer.round, count, *where)

    def deliver(self, sealed: bytes) -> bytes:
        """The shuffler's receipt: it holds what was sealed, for the question that was heeded. May be repeated."""
        asked = self._asked
        kind = "sums" if asked.head.batch.numbers else "rows"
        answer = self._http.ask("POST", f"/v1/runs/{asked.head.run}/{kind}", sealed)
        try:
            receipt = bytes.fromhex(answer.json()["receipt"])
        except (ValueError, TypeError, KeyError):
            raise MessageError("the shuffler's answer holds no receipt that can be read") from None
        check_receipt(receipt, self.peers.key_of("shuffler"), self.peers.federation, asked.head.run, asked.announced)
        return receipt

    # -- The strategy's side

    def transport(
        self,
        flower: FlowerTransport,
        task: Task,
        method: Method,
        terms: Terms,
        run: str,
    ) -> FlowerShuffler:
        """Over Flower's nodes."""
        return FlowerShuffler(self, flower, task, method, terms, run)


class FlowerShuffler(ShuffledTransport):
    """Clients are Flower's node ids; `name` is what they are called in their credentials."""

    def __init__(
        self,
        shuffler: Shuffler,
        flower: FlowerTransport,
        task: Task,
        method: Method,
        terms: Terms,
        run: str,
    ) -> None:
        self.peers, self.flower, self.terms = shuffler.peers, flower, terms
        super().__init__(task, method, self.peers.federation, run)
        self.signer = SigningKey.load(shuffler.folder / "signing-key.pem")
        self.shuffler = ShufflerClient(shuffler.folder, self.peers, self.signer, run)
        self.floor = self.peers.round.least
        self._names: dict[int, str] = {}
        self._key = BatchKey(0, 0)
        self._present: list[int] = []  # nodes that are asked in the round's next exchange

    def available(self, wanted: int) -> Sequence[int]:
        nodes, agreed = self.flower.available(wanted), self.peers.round.clients
        if len(nodes) != agreed:
            raise TooFew(f"a round of this federation names {agreed} clients, and Flower sampled {len(nodes)}")
        return nodes

    def name(self, client: int) -> str:
        return self._names.get(client, str(client))

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        """A round that fails is tried again under the next number of the protocol: nothing is asked twice. Rows of one
        that a restart interrupted are deleted, as no key opens them any more.
        """
        super().begin(round, cohort)
        self.flower.begin(round, cohort)
        with _asking():
            newest = self.shuffler.begin(self.terms.digest)
        if newest is not None:
            with suppress(Refused):
                self.shuffler.cancel(newest)
        self._key, self._present = BatchKey(1 if newest is None else newest.round + 1, 0), list(cohort)

    def mix(self, message: Message, cohort: Sequence[int], traffic: Traffic) -> Mixed:
        with _asking():
            return self._mix(message, cohort, traffic)

    def _mix(self, message: Message, cohort: Sequence[int], traffic: Traffic) -> Mixed:
        self._greet(cohort, traffic)
        key, self._key = self._key, BatchKey(self._key.round, self._key.exchange + 1)
        schema, batch = self._batch(key, message, cohort)
        payload = message.encode()
        digest = hashlib.sha256(payload).hexdigest()
        head = Head(self.run, batch, self.opener.public.hex(), self.terms.digest, digest)
        signed = head.sign(self.signer, self.federation)
        self.shuffler.publish(signed)
        announced, question = Announced.of(key, signed), Question.pack(signed, payload)
        traffic.downlink[message.kind] += len(question) * len(self._present)
        try:
            receipts = self.flower.ask(dict.fromkeys(self._present, question), traffic)
            good = [node for node, receipt in receipts.items() if self._holds(node, receipt, announced, traffic)]
            status = self.shuffler.status(key)
            if status.state not in ("ready", "released"):
                failed = "; ".join(f"{self.name(int(node))}: {why}" for node, why in list(traffic.failed.items())[:3])
                need = batch.min_clients if key.exchange == 0 else len(self._present)
                raise TooFew(f"the shuffler has answers of {status.clients} clients and releases {need}; {failed}")
        except TooFew:
            self.shuffler.cancel(key)
            raise
        if key.exchange == 0:  # where a receipt was lost on its way, all are asked, and who did not answer is refused
            self._present = good if len(good) == status.clients else list(cohort)
        rows = self.shuffler.release(announced, batch)
        masks = self.shuffler.masks(announced, batch.numbers) if batch.numbers else b""
        self.shuffler.forget(key)
        return Mixed(rows, schema, announced, sum(map(len, rows)), masks)

    def _batch(self, key: BatchKey, message: Message, cohort: Sequence[int]) -> tuple[RowSchema | SumSchema, Batch]:
        """What answers look like, and the batch that they make."""
        schema = self.schema(message, self.peers.round.clients)
        agreed, names = self.peers.round, tuple(self._names[node] for node in cohort)
        numbers = schema.numbers if isinstance(schema, SumSchema) else 0
        least = max(agreed.least, self.terms.min_clients)
        return schema, Batch(key, names, schema.rows(agreed.rows), schema.sealed_bytes, least, numbers)

    def _greet(self, cohort: Sequence[int], traffic: Traffic) -> None:
        """Ask nodes that are new for their names; each then tells the shuffler that it takes part."""
        asking = content({"ask": "name", "run": self.run})
        replies = self.flower.send({node: asking for node in cohort if node not in self._names}, traffic)
        self._names |= {node: payload_of(reply).decode("ascii", "replace") for node, reply in replies.items()}
        names = [self._names.get(node, "") for node in cohort]
        if lacking := [node for node, name in zip(cohort, names, strict=True) if not re.fullmatch(NAME_PATTERN, name)]:
            why = "; ".join(f"node {node}: {traffic.failed.get(str(node), 'no name')}" for node in lacking[:3])
            raise TooFew(f"{len(lacking)} of {len(cohort)} nodes did not come to the shuffler: {why}")
        if len(set(names)) < len(names):
            self._names = {}
            raise TooFew("two nodes go by one name: give each SuperNode a folder of its own")

    def _holds(self, node: int, receipt: bytes, announced: Announced, traffic: Traffic) -> bool:
        """Whether it is the shuffler's word that it holds rows for this very announcement."""
        try:
            check_receipt(receipt, self.peers.key_of("shuffler"), self.federation, self.run, announced)
        except TrustError:
            traffic.failed[str(node)] = "handed back something that is no receipt of the shuffler's"
            return False
        return True

    def end(self) -> None:
        super().end()
        self.flower.end()

    def checkpoint(self) -> State:
        return self.flower.checkpoint()

    def restore(self, tensors: State) -> None:
        self.flower.restore(tensors)


@contextmanager
def _asking() -> Iterator[None]:
    """What the shuffler refuses costs the round, and the run goes on."""
    try:
        yield
    except Refused as refused:
        raise TooFew(f"the shuffler: {refused}") from None
