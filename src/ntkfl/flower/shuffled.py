"""CP-NTK-FL and secure sums on Flower: questions and receipts travel through Flower, rows and masked sums do not.

    strategy ── signed question ──► Flower ──► client ── sealed rows, or seed and masked sum ──► shuffler
       ▲  ▲                                        └── the shuffler's receipt ──► Flower ──┐        │
       │  └────────────────────────────────────────────────────────────────────────────────┘        │
       └────────────────── rows in random order, or masked sums and the sum of the masks ◄──────────┘

`Shuffler(folder)` stands on both sides: `Strategy(…, through=…)` and `reply(…, through=…)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from flwr.app import Context

from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.crypto.signed import check_receipt
from ntkfl.errors import ConfigError, MessageError, Refused, TooFew, TrustError
from ntkfl.federation.policy import Agreed, Terms
from ntkfl.federation.secure_sum import SumSchema, mask_reply
from ntkfl.federation.shuffled import Mixed, ShuffledTransport, seal_reply
from ntkfl.federation.transport import Traffic
from ntkfl.flower.transport import FlowerTransport, fail, why
from ntkfl.methods import Method, Task
from ntkfl.privacy.projection import RunSecret
from ntkfl.privacy.randomness import Randomness
from ntkfl.safe_parse import parse_json
from ntkfl.services.announcement import Batch, Head, Question
from ntkfl.services.clients import HttpClient, Identity, ShufflerClient
from ntkfl.services.peers import Peers
from ntkfl.wire import Message

FOLDER = "ntkfl-folder"  # in a node's config


class Shuffler:
    """The way through a shuffler, of the role whose folder this is (`ntkfl keys init`): a client's or the aggregator's.

    A client uses it for one question: `heed` it, `seal` the answer, `deliver` what was sealed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.peers = Peers.read(self.folder)

    @classmethod
    def from_config(cls, context: Context) -> Shuffler:
        """Of the folder that the node's owner named: `--node-config 'ntkfl-folder="…"'`."""
        if not (folder := context.node_config.get(FOLDER)):
            raise ConfigError(f"no folder of this client: give the SuperNode --node-config '{FOLDER}=\"…\"'")
        return cls(str(folder))

    @property
    def digest(self) -> str:
        """Stands for the shuffler in a run's terms and in a site's policy."""
        return f"sha256:{hashlib.sha256(self.peers.key_of('shuffler')).hexdigest()}"

    # -- A client's side

    @cached_property
    def identity(self) -> Identity:
        """This client's keys and credential."""
        return Identity(self.folder)

    def heed(self, question: bytes, run: str, terms: Terms) -> Message:
        """What the aggregator asks, if it signed it, for this run and under these terms, of as many clients as all have
        agreed on. That nothing is asked twice, or otherwise, is the shuffler's to see to: it takes one announcement for
        each exchange, and answers to no other; a site's ledger keeps what it has answered besides.
        """
        self._asked = asked = Question.check(question, self.peers)
        head, batch, agreed = asked.head, asked.head.batch, self.peers.round
        if (head.run, head.terms) != (run, terms.digest):
            raise TrustError("the question is of another run, or under other terms than it came with")
        least = max(agreed.least, terms.min_clients)
        if batch.clients != agreed.clients or batch.min_clients < least:
            asks = f"asks {batch.clients} clients and is released with {batch.min_clients}"
            raise TrustError(f"the round {asks}; agreed are {agreed.clients} and {least}")
        _ = self.identity  # read before anything is computed, or entered in a ledger
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
        of a mask and the masked, sealed summand, rounded with the client's randomness. What does not fit the batch that
        was announced, in kind, number or size, the shuffler refuses.
        """
        asked, agreed = self._asked, self.peers.round
        where = (bytes.fromhex(asked.head.sealing_key), self.peers.federation, asked.head.run, asked.announced)
        question = Message.decode(asked.message)
        reply = method.replies[question.kind](answer.arrays, answer.halves)
        if not task.privacy.secure_sum:
            return seal_reply(reply, answer.round, agreed.rows if reply.sampled else 1, *where)
        addends = reply.addends(method, task, question)
        return mask_reply(SumSchema.of(addends, agreed.clients).encode(addends, randomness), *where)

    def deliver(self, sealed: bytes, summed: bool) -> bytes:
        """The shuffler's receipt: it holds what was sealed, for the question that was heeded. May be repeated."""
        asked, shuffler = self._asked, HttpClient(self.peers.shuffler.url, self.folder, self.identity.signs)
        answer = shuffler.ask("POST", f"/v1/runs/{asked.head.run}/{'sums' if summed else 'rows'}", sealed)
        try:
            receipt = bytes.fromhex(parse_json(answer.decode())["receipt"])
        except (ValueError, TypeError, KeyError):
            raise MessageError("the shuffler's answer holds no receipt that can be read") from None
        check_receipt(receipt, self.peers.key_of("shuffler"), self.peers.federation, asked.head.run, asked.announced)
        return receipt

    # -- The server's side

    def transport(self, flower: FlowerTransport, task: Task, method: Method, terms: Terms, run: str) -> FlowerShuffler:
        """What the strategy asks its clients through, with the aggregator's folder."""
        return FlowerShuffler(self, flower, task, method, terms, run)


class FlowerShuffler(ShuffledTransport):
    """The strategy's side, over Flower's nodes. What clients are called in their credentials it never learns."""

    def __init__(
        self, through: Shuffler, flower: FlowerTransport, task: Task, method: Method, terms: Terms, run: str
    ) -> None:
        super().__init__(flower, task, method, through.peers.federation, run)
        self.peers, self.flower, self.terms = through.peers, flower, terms
        self.signer = self.peers.load_key(through.folder, "aggregator")
        self.shuffler = ShufflerClient(through.folder, self.peers, self.signer, run)
        self.floor = self.peers.round.least

    def available(self) -> Sequence[int]:
        """The nodes of Flower's sample; `TooFew` unless they are exactly as many as all roles have agreed on."""
        nodes, agreed = super().available(), self.peers.round.clients
        if len(nodes) != agreed:
            raise TooFew(
                f"federation.toml has {agreed} clients per round, and Flower sampled {len(nodes)}: connect {agreed}, "
                f"and give Strategy(…, min_train_nodes={agreed}, min_available_nodes={agreed})"
            )
        return nodes

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        """A round that fails is tried again under the next number of the protocol: nothing is asked twice."""
        super().begin(round, cohort)
        try:
            self.key = BatchKey(self.shuffler.begin(self.terms.digest), 0)
        except Refused as refused:
            raise TooFew(f"the shuffler: {refused}") from None

    def mix(self, key: BatchKey, message: Message, cohort: Sequence[int], traffic: Traffic) -> Mixed:
        """Announce the exchange to the shuffler, ask the nodes through Flower, and fetch what they have sent.

        The order matters: clients answer the announcement that the shuffler holds, so none can be asked another thing.
        A refusal of the shuffler's costs the round, and the run goes on.
        """
        agreed, schema = self.peers.round, self.schema(message, self.peers.round.clients)
        least = max(agreed.least, self.terms.min_clients)
        batch = Batch(key, agreed.clients, schema.rows(agreed.rows), schema.sealed_bytes, least, schema.numbers)
        payload = message.encode()
        digest = hashlib.sha256(payload).hexdigest()
        head = Head(self.run, batch, self.opener.public.hex(), self.terms.digest, digest)
        signed = head.sign(self.signer, self.federation)
        announced, question = Announced.of(key, signed), Question.pack(signed, payload)
        traffic.downlink[message.kind] += len(question) * len(self.present)
        try:
            self.shuffler.publish(signed)
            receipts = self.flower.ask(question, self.present, traffic)
            good = [node for node, receipt in receipts.items() if self._holds(node, receipt, announced, traffic)]
            rows, masks = self.shuffler.release(announced, batch)
        except (TooFew, Refused) as error:
            with suppress(Refused):
                self.shuffler.discard(key)
            raise TooFew(f"the shuffler: {error}; {why(traffic) or 'do two nodes share a folder?'}") from None
        if key.exchange == 0:  # where a receipt was lost on its way, all are asked, and who did not answer is refused
            self.present = good if len(good) * batch.max_rows == len(rows) else list(cohort)
        with suppress(Refused):  # what is left goes when the next batch opens
            self.shuffler.discard(key)
        return Mixed(rows, schema, announced, sum(map(len, rows)), masks)

    def _holds(self, node: int, receipt: bytes, announced: Announced, traffic: Traffic) -> bool:
        """Whether it is the shuffler's word that it holds rows for this very announcement."""
        try:
            check_receipt(receipt, self.peers.key_of("shuffler"), self.federation, self.run, announced)
        except TrustError:
            fail(node, "returned a receipt that the shuffler did not sign for these rows", traffic)
            return False
        return True
