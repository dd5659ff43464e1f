"""Certificates of a federation: authorities, what they sign, and signing it anew before it ends.

An authority's folder holds, for each authority, its certificate NAME.pem and its private key NAME-key.pem. With the
keys one can pass for any role of the federation. Only renewing certificates needs them, so they may lie offline.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from ntkfl.atomic import check_private, replace_private, write_atomically, write_private
from ntkfl.errors import ConfigError
from ntkfl.extras import missing

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:  # the core works without; this room does not
    raise missing("a certificate", "services") from error

_VALID = timedelta(days=365)  # of what an authority signs
_AUTHORITY_VALID = timedelta(days=3650)  # of its own certificate, which others hold: it cannot be renewed
_SKEW = timedelta(hours=1)  # clocks differ
TLS_CERT, TLS_KEY = "tls.pem", "tls-key.pem"


class Authority:
    """A certificate authority (EC P-256, ten years)."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = _builder(self._name, self._name, self._key.public_key(), _AUTHORITY_VALID, ca=True)
        self._certificate = builder.sign(self._key, SHA256())

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM)

    @classmethod
    def load(cls, certificate: Path) -> Self:
        """The authority whose certificate this is, with the key beside it."""
        key_file = certificate.with_name(f"{certificate.stem}-key.pem")
        try:
            key = load_pem_private_key(key_file.read_bytes(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
            raise ConfigError(f"{key_file} holds no private key that can be read") from None
        check_private(key_file)
        made = cls.__new__(cls)
        made._certificate = read_certificate(certificate)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != made._certificate.public_key():
            raise ConfigError(f"{key_file} is not the key of {certificate}")
        made._key, made._name = key, made._certificate.subject
        return made

    def save(self, folder: Path, name: str) -> None:
        """Certificate and private key, for `load`."""
        private = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_private(folder / f"{name}-key.pem", private)
        (folder / f"{name}.pem").write_bytes(self.pem)

    def signed(self, certificate: x509.Certificate) -> bool:
        try:
            certificate.verify_directly_issued_by(self._certificate)
        except (InvalidSignature, ValueError, TypeError):
            return False
        return True

    def renew(self, certificate: x509.Certificate) -> tuple[bytes, bytes]:
        """A certificate for the same name, hosts and use with a new key, and that key; both PEM."""
        found = certificate.extensions
        usage = found.get_extension_for_class(x509.ExtendedKeyUsage).value
        names = found.get_extension_for_class(x509.SubjectAlternativeName).value
        return self._issue(certificate.subject, usage, names)

    def server(self, name: str, host: str) -> tuple[bytes, bytes]:
        """A certificate for a service at `host` (a DNS name or an IP address), and its key; both PEM."""
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        return self._issue(_name(name), usage, x509.SubjectAlternativeName([_host(host)]))

    def client(self, name: str) -> tuple[bytes, bytes]:
        """A certificate for the client side of TLS, and its key; both PEM."""
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        return self._issue(_name(name), usage, x509.SubjectAlternativeName([x509.DNSName(name)]))

    def _issue(
        self, name: x509.Name, usage: x509.ExtendedKeyUsage, names: x509.SubjectAlternativeName
    ) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        identifier = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        certificate = (
            _builder(name, self._name, key.public_key(), _VALID, ca=False)
            .add_extension(usage, critical=False)
            .add_extension(names, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
            .sign(self._key, SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return certificate.public_bytes(Encoding.PEM), private


@dataclass(frozen=True)
class Renewed:
    folder: Path
    before: datetime
    ends: datetime


def renew(authority: Path, folders: list[Path]) -> list[Renewed]:
    """Sign each folder's TLS certificate anew, with a new key: by whichever authority in the folder `authority` signed
    the one that is there. Nothing is written unless all of them can be.
    """
    keys = sorted(authority.glob("*-key.pem"))
    if not keys:
        raise ConfigError(f"no certificate authority's key in {authority}")
    authorities = [Authority.load(key.with_name(f"{key.name.removesuffix('-key.pem')}.pem")) for key in keys]
    made = {}
    for folder in folders:
        old = read_certificate(folder / TLS_CERT)
        signer = next((one for one in authorities if one.signed(old)), None)
        if signer is None:
            raise ConfigError(f"{folder / TLS_CERT} was signed by no authority in {authority}")
        made[folder] = old, signer.renew(old)
    return _write(made)


def _write(made: Mapping[Path, tuple[x509.Certificate, tuple[bytes, bytes]]]) -> list[Renewed]:
    renewed = []
    for folder, (old, (certificate, key)) in made.items():
        replace_private(folder / TLS_KEY, key)
        write_atomically(folder / TLS_CERT, certificate)
        ends = read_certificate(folder / TLS_CERT).not_valid_after_utc
        renewed.append(Renewed(folder, old.not_valid_after_utc, ends))
    return renewed


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        raise ConfigError(f"no certificate that can be read in {path}") from None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid: timedelta, *, ca: bool
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + valid)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            return x509.DNSName(host)
        except ValueError:
            raise ConfigError(f"a host must be a DNS name in ASCII or an IP address, got {host!r}") from None
    if address.is_unspecified:
        raise ConfigError(f"{host} is where to listen, not where others connect to: give a name or an address")
    return x509.IPAddress(address)
