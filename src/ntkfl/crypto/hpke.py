"""Sealing to one reader and signing as one writer: HPKE (RFC 9180) and Ed25519 (RFC 8032), from `cryptography`.

Everything sealed or signed is bound to what it is for: a `context` made by `bind`. A seal opened, or a signature
checked, under another context fails, so nothing can be carried from one federation, run, round or client to another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Generic, Self, TypeVar

from ntkfl.atomic import check_private, write_private
from ntkfl.crypto.context import bind
from ntkfl.errors import ConfigError, TrustError
from ntkfl.extras import missing

try:
    from cryptography.exceptions import InternalError, InvalidSignature, InvalidTag, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
except ImportError as error:  # the core works without; this room does not
    raise missing("sealing", "services") from error

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
SEAL_BYTES = 48  # what sealing adds: the encapsulated key (32) and the tag (16)
KEY_BYTES = 32


Private = TypeVar("Private", X25519PrivateKey, Ed25519PrivateKey)


class _Key(Generic[Private]):
    """A private key, kept in a file of its own. `public` are the 32 bytes that others know it by."""

    kind: type[Private]

    def __init__(self, key: Private) -> None:
        self._key: Private = key
        self.public: bytes = key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Self:
        """A new key, from the operating system's randomness."""
        return cls(cls.kind.generate())

    @classmethod
    def load(cls, path: Path) -> Self:
        """The key in a PEM file that only its owner can read; `TrustError` for anything else."""
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except FileNotFoundError:
            raise TrustError(f"no key at {path}") from None
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm, InternalError):
            raise TrustError(f"{path} holds no private key that can be read") from None
        check_private(path)
        if not isinstance(key, cls.kind):
            raise TrustError(f"{path} is no {cls.kind.__name__.removesuffix('PrivateKey')} key")
        return cls(key)

    def save(self, path: Path) -> None:
        """Write it to a new file that only its owner can read."""
        write_private(path, self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


class SealingKey(_Key[X25519PrivateKey]):
    """An X25519 private key: opens what was sealed to its `public` bytes."""

    kind = X25519PrivateKey

    def open(self, sealed: bytes, context: bytes) -> bytes:
        """The plaintext; `TrustError` if it was sealed to another key or for another context, or was changed."""
        try:
            return _SUITE.decrypt(sealed, self._key, info=context)
        except (InvalidTag, ValueError):
            raise TrustError("a seal does not open: another key, another context, or changed on the way") from None


def seal(public: bytes, plaintext: bytes, context: bytes) -> bytes:
    """The plaintext sealed to the holder of `public`'s key: encapsulated key (32), ciphertext, tag (16)."""
    try:
        key = X25519PublicKey.from_public_bytes(public)
        return _SUITE.encrypt(plaintext, key, info=context)
    except ValueError:
        raise TrustError("not an X25519 public key: 32 bytes, not all of which are of small order") from None


class SigningKey(_Key[Ed25519PrivateKey]):
    """An Ed25519 private key."""

    kind = Ed25519PrivateKey

    def sign(self, payload: bytes, context: bytes) -> bytes:
        """64 bytes over the context and the payload."""
        return self._key.sign(bind("ntkfl signature v1", context, payload))


def verify(public: bytes, signature: bytes, payload: bytes, context: bytes) -> None:
    """`TrustError` unless the holder of `public`'s key signed this payload for this context."""
    try:
        key = Ed25519PublicKey.from_public_bytes(public)
        key.verify(signature, bind("ntkfl signature v1", context, payload))
    except (InvalidSignature, ValueError):
        raise TrustError("a signature does not hold: another key, another context, or changed on the way") from None


def parse_key(text: str, what: str) -> bytes:
    """A public key as people write it: 64 hexadecimal digits."""
    try:
        key = bytes.fromhex(text)
    except (ValueError, TypeError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{what} must be a public key: 64 hexadecimal digits")
    return key
