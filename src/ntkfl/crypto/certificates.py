"""TLS certificates of a federation's services, each signed by itself; all roles trust just these (`ca.pem`).

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


def self_signed(name: str, host: str) -> tuple[bytes, bytes]:
    """A certificate (EC P-256) for a service at `host`, a DNS name or an IP address, and its key; both PEM."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)  # it vouches for no other
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(host)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), private


def _host(host: str) -> x509.GeneralName:
    """What a certificate names: an IP address where the host is one, and else a DNS name."""
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
