"""What the aggregator tells everybody, through the shuffler: a step of the run and the message that goes with it.

    signature (64 bytes, Ed25519) | length of the head u32 | head (JSON) | message

The aggregator signs for this federation and run, so the shuffler that relays an announcement can neither write nor
change one, and clients refuse any whose key is not newer than the last they saw.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, replace
from typing import Any

from ntkfl.errors import MessageError, NTKFLError, TrustError
from ntkfl.privacy.rows import BatchKey
from ntkfl.privacy.sealing import SigningKey, bind, verify
from ntkfl.privacy.shuffling import Batch
from ntkfl.wire import Message

KINDS = ("exchange", "evaluate", "end")
EVALUATION = 255  # the exchange number under which a round's model is evaluated
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Announcement:
    """`exchange`: the cohort of `batch` answers `message`. `evaluate`: evaluators, or the cohort, count how well its
    weights do. `end`: the run is over.
    """

    kind: str
    key: BatchKey
    batch: Batch | None = None
    message: Message | None = None

    def sign(self, signer: SigningKey, federation: str, run: str) -> bytes:
        head = {"kind": self.kind, "key": list(self.key), "batch": None if self.batch is None else asdict(self.batch)}
        text = json.dumps(head, sort_keys=True).encode()
        body = _LENGTH.pack(len(text)) + text + (b"" if self.message is None else self.message.encode())
        return signer.sign(body, _context(federation, run)) + body

    @staticmethod
    def check(signed: bytes, aggregator: bytes, federation: str, run: str) -> Announcement:
        """What was announced, if the aggregator signed it; `TrustError` or `MessageError` otherwise."""
        signature, body = signed[:64], signed[64:]
        verify(aggregator, signature, body, _context(federation, run))
        try:
            (length,) = _LENGTH.unpack_from(body)
            head: Any = json.loads(body[_LENGTH.size : _LENGTH.size + length])
            payload = body[_LENGTH.size + length :]
            key = BatchKey(*head["key"]).check()
            batch = None
            if head["batch"] is not None:
                batch = Batch(**head["batch"])
                batch = replace(batch, key=BatchKey(*batch.key), cohort=tuple(batch.cohort)).check()
            if head["kind"] not in KINDS:
                raise MessageError(f"an announcement of kind {head['kind']!r}")
            return Announcement(head["kind"], key, batch, Message.decode(payload) if payload else None)
        except (KeyError, TypeError, ValueError, struct.error, RecursionError):
            raise MessageError("an announcement that cannot be read") from None
        except TrustError:
            raise
        except NTKFLError as error:
            raise MessageError(f"an announcement that cannot be read: {error}") from None


def _context(federation: str, run: str) -> bytes:
    return bind("ntkfl announcement v1", federation, run)
