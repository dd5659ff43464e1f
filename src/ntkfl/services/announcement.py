"""What the aggregator asks in one exchange of a round: a signed head, and the message that the head names.

    head       signature (64 bytes, Ed25519) | JSON: run, batch, sealing key, SHA-256 of the terms and of the message
    question   length of the head (u32, little-endian) | head | message

The shuffler gets the head, and opens the batch in it; clients get the question through Flower. The SHA-256 of the head
goes into every answer, and the shuffler takes one head for each exchange. So all clients answer the same weights under
the same terms, sealed to the same key, or their rows are refused. The sealing key is made for one round, and its
private half does not outlive the round.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from ntkfl.crypto.context import bind
from ntkfl.crypto.hpke import SigningKey, verify
from ntkfl.crypto.row_frames import MOST_NUMBERS, WORD_BYTES, Announced, BatchKey
from ntkfl.crypto.signed import SIGNATURE_BYTES
from ntkfl.errors import MessageError, NTKFLError, Refused
from ntkfl.services.peers import Digest, Name, Peers

_LENGTH = struct.Struct("<I")
MOST_HEAD = 4096  # bytes


@dataclass(frozen=True)
class Batch:
    """What the aggregator asks for: of how many clients, and how much of each.

    It names no client. Whoever is enrolled may answer, once; who hears the question is decided where it is sent.
    """

    key: BatchKey
    clients: int  # asked; one more is refused, so that their secure sum cannot overflow
    max_rows: int  # of each client, exactly
    row_bytes: int  # of every sealed row, exactly
    min_clients: int  # distinct clients below which nothing is released, ever
    numbers: int = 0  # of a secure sum, those of each client's masked vector; 0: a batch of rows

    def check(self) -> Batch:
        """Itself; `Refused` if no batch can be made of it."""
        if not (1 <= self.max_rows < 1 << 32 and 1 <= self.row_bytes < 1 << 32 and self.clients < 1 << 32):
            raise Refused("terms", "a batch asks for at least one row of at least one byte")
        whole = self.max_rows == 1 and self.row_bytes >= WORD_BYTES * self.numbers
        if self.numbers and not (whole and 1 <= self.numbers <= MOST_NUMBERS):
            raise Refused("terms", f"a secure sum asks each client for one row, of 1 to {MOST_NUMBERS} numbers")
        if self.min_clients > self.clients:
            raise Refused("terms", f"{self.clients} clients can never be {self.min_clients} distinct ones")
        self.key.check()
        return self


@dataclass(frozen=True)
class Head:
    """One exchange of a run: the batch that its answers make, and the key (hexadecimal) that they are sealed to."""

    run: Name
    batch: Batch
    sealing_key: Digest
    terms: Digest
    message: Digest

    def sign(self, signer: SigningKey, federation: str) -> bytes:
        """The head as it travels."""
        text = _HEAD.dump_json(self)
        return signer.sign(text, _context(federation)) + text

    @staticmethod
    def check(signed: bytes, peers: Peers) -> Head:
        """The head, if this federation's aggregator signed it; `TrustError` or `MessageError` otherwise."""
        signature, text = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        verify(peers.key_of("aggregator"), signature, text, _context(peers.federation))
        try:
            head = _HEAD.validate_json(text, strict=True)
            head.batch.check()
        except ValidationError:
            raise MessageError("an announcement that cannot be read") from None
        except NTKFLError as error:
            raise MessageError(f"an announcement that cannot be read: {error}") from None
        return head


_HEAD = TypeAdapter(Head)


@dataclass(frozen=True)
class Question:
    """What a client received: a checked head, the encoded message that it names, and what answers have to name."""

    head: Head
    message: bytes
    announced: Announced

    @staticmethod
    def pack(signed: bytes, message: bytes) -> bytes:
        """The question as it travels through Flower."""
        return _LENGTH.pack(len(signed)) + signed + message

    @staticmethod
    def check(question: bytes, peers: Peers) -> Question:
        """`TrustError` or `MessageError` unless the aggregator signed the head, and the message is the head's."""
        if len(question) < _LENGTH.size:
            raise MessageError("a question that cannot be read")
        end = _LENGTH.size + _LENGTH.unpack_from(question)[0]
        signed, message = question[_LENGTH.size : end], question[end:]
        head = Head.check(signed, peers)
        if hashlib.sha256(message).hexdigest() != head.message:
            raise MessageError("a question whose message is not the one that was signed")
        return Question(head, message, Announced.of(head.batch.key, signed))


def _context(federation: str) -> bytes:
    """What a head is signed for."""
    return bind("ntkfl announcement v4", federation)
