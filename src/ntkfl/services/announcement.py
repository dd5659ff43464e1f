"""What the aggregator tells everybody, through the shuffler: a step of the run and the message that goes with it.

    signature (64 bytes, Ed25519) | length of the head u32 | head (JSON) | message

The aggregator signs for this federation and run, so the shuffler that relays an announcement can neither write nor
change one, and clients refuse any whose key is not newer than the last they saw. The SHA-256 of all these bytes goes
into every answer, and the shuffler takes one announcement per key: all clients answer the same weights, sealed to the
same key, or their rows are refused. The sealing key is the round's own; its private half does not outlive the round.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter, ValidationError

from ntkfl.crypto.context import bind
from ntkfl.crypto.hpke import KEY_BYTES, SigningKey, verify
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.errors import MessageError, NTKFLError
from ntkfl.services.shuffler.batch import EVALUATION as EVALUATION
from ntkfl.services.shuffler.batch import Batch

if TYPE_CHECKING:  # torch comes with it, and the shuffler, which reads heads alone, does without
    from ntkfl.wire import Message

Kind = Literal["exchange", "evaluate", "end"]
MOST_EXCHANGES = 4  # of a round, besides the evaluation: what a client answers
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Head:
    """What the shuffler reads of an announcement: which step it is, the batch that it opens, and the public key
    (hexadecimal) that answers are sealed to.
    """

    kind: Kind
    key: BatchKey
    batch: Batch | None
    sealing_key: str | None

    @staticmethod
    def check(signed: bytes, aggregator: bytes, federation: str, run: str) -> tuple[Head, bytes]:
        """The head and the encoded message, if the aggregator signed it; `TrustError` or `MessageError` otherwise."""
        signature, body = signed[:64], signed[64:]
        verify(aggregator, signature, body, _context(federation, run))
        try:
            (length,) = _LENGTH.unpack_from(body)
            head = _HEAD.validate_json(body[_LENGTH.size : _LENGTH.size + length], strict=True)
            head.key.check()
            if head.batch is not None and (head.batch.check().key != head.key or head.kind == "end"):
                raise MessageError("it asks for a batch that is not its own")
            if (head.sealing_key is None) != (head.kind == "end"):
                raise MessageError("whatever is to be answered has a sealing key")
            if head.sealing_key is not None and not re.fullmatch(f"[0-9a-f]{{{2 * KEY_BYTES}}}", head.sealing_key):
                raise MessageError("its sealing key is not 64 hexadecimal digits")
            return head, body[_LENGTH.size + length :]
        except (ValidationError, struct.error):
            raise MessageError("an announcement that cannot be read") from None
        except NTKFLError as error:
            raise MessageError(f"an announcement that cannot be read: {error}") from None


_HEAD = TypeAdapter(Head)


@dataclass(frozen=True)
class Announcement:
    """`exchange`: the cohort of `batch` answers `message`. `evaluate`: evaluators, or the cohort, count how well its
    weights do. `end`: the run is over. Answers are sealed to `sealing_key`; `announced` is what they name.
    """

    kind: Kind
    key: BatchKey
    batch: Batch | None = None
    message: Message | None = None
    sealing_key: bytes | None = None
    announced: Announced | None = None  # of one that was received

    def sign(self, signer: SigningKey, federation: str, run: str) -> bytes:
        sealing_key = None if self.sealing_key is None else self.sealing_key.hex()
        text = _HEAD.dump_json(Head(self.kind, self.key, self.batch, sealing_key))
        body = _LENGTH.pack(len(text)) + text + (b"" if self.message is None else self.message.encode())
        return signer.sign(body, _context(federation, run)) + body

    @staticmethod
    def check(signed: bytes, aggregator: bytes, federation: str, run: str) -> Announcement:
        """What was announced, if the aggregator signed it; `TrustError` or `MessageError` otherwise."""
        from ntkfl.wire import Message

        head, payload = Head.check(signed, aggregator, federation, run)
        try:
            message = Message.decode(payload) if payload else None
        except NTKFLError as error:
            raise MessageError(f"an announcement that cannot be read: {error}") from None
        sealing_key = None if head.sealing_key is None else bytes.fromhex(head.sealing_key)
        return Announcement(head.kind, head.key, head.batch, message, sealing_key, Announced.of(head.key, signed))


def _context(federation: str, run: str) -> bytes:
    return bind("ntkfl announcement v2", federation, run)
