"""Certificates for trying it out: an authority that lives as long as this process, and what it signs."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta

from ntkfl.errors import ConfigError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:  # the core works without; this room does not
    raise ConfigError("certificates need the extra 'services': pip install 'ntkfl[services]'") from error

_VALID = timedelta(days=365)
_SKEW = timedelta(hours=1)  # clocks differ


class Authority:
    """A certificate authority (EC P-256, one year). Its private key is in memory only and ends with the object."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = _builder(self._name, self._name, self._key.public_key(), ca=True)
        self._certificate = builder.sign(self._key, SHA256())
        self.pem: bytes = self._certificate.public_bytes(Encoding.PEM)

    def server(self, name: str, host: str) -> tuple[bytes, bytes]:
        """A certificate for who answers at `host` (a DNS name or an IP address), and its key; both PEM."""
        return self._issue(name, ExtendedKeyUsageOID.SERVER_AUTH, x509.SubjectAlternativeName([_host(host)]))

    def client(self, name: str) -> tuple[bytes, bytes]:
        """A certificate for who calls, and its key; both PEM."""
        return self._issue(name, ExtendedKeyUsageOID.CLIENT_AUTH, x509.SubjectAlternativeName([x509.DNSName(name)]))

    def _issue(
        self, name: str, usage: x509.ObjectIdentifier, names: x509.SubjectAlternativeName
    ) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        identifier = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        certificate = (
            _builder(_name(name), self._name, key.public_key(), ca=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(names, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
            .sign(self._key, SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return certificate.public_bytes(Encoding.PEM), private


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, ca: bool
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
        .not_valid_after(now + _VALID)
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
