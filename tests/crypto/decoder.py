"""A second reader of what crosses the wire, from docs/protocol.md and the RFCs alone, without the package.

Seals are HPKE (RFC 9180, base mode: X25519, HKDF-SHA256, ChaCha20-Poly1305) step by step, masks are ChaCha20 (RFC 8439)
in plain Python; from `cryptography` come X25519, Ed25519 and the AEAD.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

HEADER = 4 + 1 + 4 + 1 + 32 + 4 + 4
KEM, HPKE = b"KEM\x00\x20", b"HPKE\x00\x20\x00\x01\x00\x03"


class Wrong(Exception):
    """Bytes that are not what they should be."""


def context(*parts: bytes | str | int) -> bytes:
    """Each part with its length before it; whole numbers as 8 bytes."""
    whole = b""
    for part in parts:
        raw = part.to_bytes(8, "little") if isinstance(part, int) else part.encode() if isinstance(part, str) else part
        whole += len(raw).to_bytes(4, "little") + raw
    return whole


# -- Seals: RFC 9180 ---------------------------------------------------------------------------------------------------


def extract(suite: bytes, salt: bytes, label: bytes, material: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + material, "sha256")


def expand(suite: bytes, key: bytes, label: bytes, info: bytes, size: int) -> bytes:
    labelled = size.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
    made, block = b"", b""
    for number in range(1, -(-size // 32) + 1):
        block = hmac.digest(key, block + labelled + bytes([number]), "sha256")
        made += block
    return made[:size]


def unseal(private: bytes, sealed: bytes, info: bytes) -> bytes:
    """Encapsulated key (32 bytes), ciphertext, tag (16)."""
    key, sender = X25519PrivateKey.from_private_bytes(private), sealed[:32]
    shared = key.exchange(X25519PublicKey.from_public_bytes(sender))
    both = sender + key.public_key().public_bytes_raw()
    secret = expand(KEM, extract(KEM, b"", b"eae_prk", shared), b"shared_secret", both, 32)
    schedule = b"\x00" + extract(HPKE, b"", b"psk_id_hash", b"") + extract(HPKE, b"", b"info_hash", info)
    secret = extract(HPKE, secret, b"secret", b"")
    cipher = ChaCha20Poly1305(expand(HPKE, secret, b"key", schedule, 32))
    return cipher.decrypt(expand(HPKE, secret, b"base_nonce", schedule, 12), sealed[32:], b"")


# -- Signatures: announcements and receipts ----------------------------------------------------------------------------


def check_signature(public: bytes, signature: bytes, what: bytes, payload: bytes) -> None:
    """Ed25519 over the context and the payload; raises where it does not hold."""
    Ed25519PublicKey.from_public_bytes(public).verify(signature, context("ntkfl signature v1", what, payload))


@dataclass(frozen=True)
class Announcement:
    head: dict[str, Any]
    digest: bytes

    @property
    def key(self) -> tuple[int, int]:
        round, exchange = self.head["batch"]["key"]
        return round, exchange


def read_head(signed: bytes, aggregator: bytes, federation: str) -> Announcement:
    """Signature (64 bytes), JSON."""
    check_signature(aggregator, signed[:64], context("ntkfl announcement v4", federation), signed[64:])
    return Announcement(json.loads(signed[64:]), hashlib.sha256(signed).digest())


def read_question(question: bytes, aggregator: bytes, federation: str) -> tuple[Announcement, bytes]:
    """Length of the head (4 bytes), head, message."""
    size = int.from_bytes(question[:4], "little")
    announcement, message = read_head(question[4 : 4 + size], aggregator, federation), question[4 + size :]
    if hashlib.sha256(message).hexdigest() != announcement.head["message"]:
        raise Wrong("another message than the head names")
    return announcement, message


def check_receipt(receipt: bytes, shuffler: bytes, federation: str, run: str, said: Announcement) -> None:
    payload = context("ntkfl receipt v2", *said.key, said.digest)
    check_signature(shuffler, receipt, context("ntkfl receipt v2", federation, run), payload)


# -- Frames of sealed rows ---------------------------------------------------------------------------------------------


def read_frame(frame: bytes) -> tuple[tuple[int, int], bytes, list[bytes]]:
    """(round and exchange, digest of the announcement, sealed rows)."""
    magic, version, round, exchange, digest, count, size = struct.unpack("<4sBIB32sII", frame[:HEADER])
    if (magic, version) != (b"NTKR", 2):
        raise Wrong("not a frame of version 2")
    if not count or not size or len(frame) != HEADER + count * size + 4:
        raise Wrong("a frame of another length than it says")
    if zlib.crc32(frame[:-4]) != int.from_bytes(frame[-4:], "little"):
        raise Wrong("a damaged frame")
    return (round, exchange), digest, [frame[at : at + size] for at in range(HEADER, len(frame) - 4, size)]


def read_rows(frame: bytes, private: bytes, federation: str, run: str, said: Announcement) -> list[bytes]:
    """The opened rows of a frame that answers this announcement."""
    key, digest, sealed = read_frame(frame)
    if (key, digest) != (said.key, said.digest):
        raise Wrong("rows for another announcement")
    info = context("ntkfl row v2", federation, run, *key, digest)
    return [unseal(private, row, info) for row in sealed]


# -- Masks: RFC 8439 ---------------------------------------------------------------------------------------------------


def quarter(s: list[int], a: int, b: int, c: int, d: int) -> None:
    for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        s[x] = (s[x] + s[y]) % 2**32
        word = s[z] ^ s[x]
        s[z] = (word << turn | word >> 32 - turn) % 2**32


def stream(key: bytes) -> Iterator[int]:
    """The words of ChaCha20 from block 0 on, with a nonce of zeros."""
    block = 0
    while True:
        start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), block, 0, 0, 0]
        s = list(start)
        for _ in range(10):
            for i in range(4):
                quarter(s, i, 4 + i, 8 + i, 12 + i)
            for i in range(4):
                quarter(s, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
        yield from ((a + b) % 2**32 for a, b in zip(s, start, strict=True))
        block += 1


def mask(seed: bytes, said: Announcement, count: int) -> list[int]:
    bound = context("ntkfl mask v1", *said.key, said.digest)
    words = stream(hashlib.blake2b(bound, key=seed, digest_size=32).digest())
    return [next(words) for _ in range(count)]


def read_total(
    submissions: Sequence[bytes], private: bytes, federation: str, run: str, said: Announcement
) -> list[int]:
    """The signed sum of masked vectors: each submission is a seed (32 bytes) and a frame of one sealed vector."""
    total = [0] * said.head["batch"]["numbers"]
    for body in submissions:
        (row,) = read_rows(body[32:], private, federation, run, said)
        words = struct.unpack(f"<{len(total)}I", row)
        total = [t + w - m for t, w, m in zip(total, words, mask(body[:32], said, len(total)), strict=True)]
    return [(t + 2**31) % 2**32 - 2**31 for t in total]
