"""Two holders of masks: a client's second seed lies with the key server, which is told by tickets whose to sum.

- A **ticket** is 16 random bytes and the key server's signature that it holds a seed of this client for this
  announcement. The shuffler takes a masked vector with such a ticket alone: whoever is in its batch is in both.
- A **released set** is the shuffler's signed list of the tickets that it released, in the order of their bytes. The key
  server sums the masks of exactly these, once. To the aggregator, which carries the list, tickets name nobody.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ntkfl.crypto.context import bind
from ntkfl.crypto.hpke import SigningKey, verify
from ntkfl.crypto.mask_format import SIGNATURE_BYTES, TICKET_BYTES
from ntkfl.crypto.row_frames import FRAME_BYTES, Announced, pack_rows, unpack_rows
from ntkfl.errors import MessageError

_TICKET, _RELEASED = "ntkfl mask ticket v1", "ntkfl masks released v1"
_NUMBERS = struct.Struct("<I")


class ReleasedSet(NamedTuple):
    """What the shuffler released in answer to an announcement: vectors of so many numbers, and their tickets."""

    announced: Announced
    numbers: int
    tickets: list[bytes]


def sign_ticket(
    signer: SigningKey, federation: str, run: str, client: str, announced: Announced, ticket: bytes
) -> bytes:
    """The key server's word that it holds the client's seed: 64 bytes."""
    return signer.sign(_payload(client, announced, ticket), bind(_TICKET, federation, run))


def check_ticket(
    signed: bytes, key_server: bytes, federation: str, run: str, client: str, announced: Announced
) -> bytes:
    """The ticket, of a ticket and its signature; `TrustError` unless the key server gave it to this client."""
    ticket, signature = signed[:TICKET_BYTES], signed[TICKET_BYTES:]
    verify(key_server, signature, _payload(client, announced, ticket), bind(_TICKET, federation, run))
    return ticket


def pack_released(signer: SigningKey, federation: str, run: str, released: ReleasedSet) -> bytes:
    """Signature | numbers u32 | a frame of one row per ticket."""
    body = _NUMBERS.pack(released.numbers) + pack_rows(released.announced, sorted(released.tickets))
    return signer.sign(body, bind(_RELEASED, federation, run)) + body


def unpack_released(signed: bytes, shuffler: bytes, federation: str, run: str) -> ReleasedSet:
    """`TrustError` unless the shuffler signed it; `MessageError` where it is no such list."""
    signature, body = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
    verify(shuffler, signature, body, bind(_RELEASED, federation, run))
    if len(body) < _NUMBERS.size:
        raise MessageError("a released set that is cut short")
    announced, tickets = unpack_rows(body[_NUMBERS.size :], row_bytes=TICKET_BYTES)
    if tickets != sorted(set(tickets)):
        raise MessageError("a released set names a ticket twice, or in another order than that of its bytes")
    return ReleasedSet(announced, _NUMBERS.unpack_from(body)[0], tickets)


def released_bytes(clients: int) -> int:
    """Of the list of so many."""
    return SIGNATURE_BYTES + _NUMBERS.size + FRAME_BYTES + TICKET_BYTES * clients


def split_submission(body: memoryview, seed_bytes: int) -> tuple[bytes, bytes, memoryview]:
    """A client's submission to a sum with two holders: (its first seed, its signed ticket, the frame behind them)."""
    end = seed_bytes + TICKET_BYTES + SIGNATURE_BYTES
    return bytes(body[:seed_bytes]), bytes(body[seed_bytes:end]), body[end:]


def join_tickets(tickets: Sequence[bytes]) -> bytes:
    """As the shuffler keeps them."""
    return b"".join(sorted(tickets))


def _payload(client: str, announced: Announced, ticket: bytes) -> bytes:
    key, digest = announced.check()
    return bind(_TICKET, client, *key, digest, ticket)
