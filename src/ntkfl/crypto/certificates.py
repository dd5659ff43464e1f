"""TLS certificates of a federation's services, from an authority that exists for as long as it takes to sign them.

TLS is the outer layer: rows are sealed, sums masked and requests signed inside it. A federation with certificates of
its own puts them in the place of `tls.pem`, `tls-key.pem` and `ca.pem`.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta

from ntkfl.errors import ConfigError
from ntkfl.extras import missing

try:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:  # the core works without; this room does not
    raise missing("a certificate", "services") from error

TLS_CERT, TLS_KEY, CA = "tls.pem", "tls-key.pem", "ca.pem"
_VALID = timedelta(days=3650)
_SKEW = timedelta(hours=1)  # clocks differ


class Authority:
    """A certificate authority (EC P-256). Its private key is never written: nobody can sign with it later."""

    def __init__(self, name: str) -> None:
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _name(name)
        builder = _builder(self._name, self._name, self._key.public_key(), ca=True)
        self.pem = builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)

    def server(self, name: str, host: str) -> tuple[bytes, bytes]:
        """A certificate for a service at `host` (a DNS name or an IP address), and its key; both PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(_name(name), self._name, key.public_key(), ca=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_host(host)]), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return certificate.public_bytes(Encoding.PEM), private


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, ca: bool
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    no = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    usage = x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, decipher_only=False, **no)
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
