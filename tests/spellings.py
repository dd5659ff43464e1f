"""Secrets, and how they would look in what a program says or leaves behind."""

from __future__ import annotations

import base64

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key


def spellings(secret: bytes) -> list[bytes]:
    """As it is, and as programs write bytes: hexadecimal, base64 at each of its three phases, repr, numbers."""
    found = [secret, secret.hex().encode(), secret.hex().upper().encode(), repr(secret)[2:-1].encode()]
    found.append(", ".join(map(str, secret)).encode())
    for phase in range(3):
        whole = len(secret) - (len(secret) + phase) % 3  # ends where a group of three does
        coded = base64.b64encode(bytes(phase) + secret[:whole])[4 if phase else 0 :]
        found += [coded, coded.replace(b"+", b"-").replace(b"/", b"_")]
    return found


def private_bytes(text: bytes) -> bytes:
    """The secret number of a key in PEM or OpenSSH's form, without zeros before it: neither form always has them."""
    key = load_ssh_private_key(text, None) if b"OPENSSH" in text else load_pem_private_key(text, None)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        number = key.private_numbers().private_value
        return number.to_bytes((number.bit_length() + 7) // 8, "big")
    return key.private_bytes_raw()  # type: ignore[union-attr]
