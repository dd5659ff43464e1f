"""The folders of a federation: keys and certificates, each role with just what it may hold.

DIR/key-server     federation.toml ca.pem signing-key.pem tls.pem tls-key.pem master issued/ revoked/
DIR/shuffler       federation.toml ca.pem signing-key.pem tls.pem tls-key.pem
DIR/aggregator     federation.toml ca.pem signing-key.pem
DIR/clients/NAME   federation.toml ca.pem signing-key.pem sealing-key.pem credential

The services' TLS certificates are signed by themselves, and all roles trust just these (`ca.pem`). TLS is the outer
layer: rows are sealed, sums masked and requests signed inside it. A federation with certificates of its own puts them
in the place of `tls.pem`, `tls-key.pem` and `ca.pem`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ntkfl.atomic import write_private
from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.errors import ConfigError
from ntkfl.services.clients import CREDENTIAL, SEALING_KEY
from ntkfl.services.key_server import KeyServer
from ntkfl.services.peers import CA, SIGNING_KEY, TLS_CERT, TLS_KEY, AggregatorPeer, Peers, RoundTerms, ServicePeer

_VALID = timedelta(days=3650)
_SKEW = timedelta(hours=1)  # clocks differ


def init(
    folder: Path,
    clients: Sequence[str],
    terms: RoundTerms,
    federation: str = "demo",
    key_server: str = "127.0.0.1:8441",
    shuffler: str = "127.0.0.1:8442",
) -> Peers:
    """Make the folders of all roles in `folder`, which must be new or empty. Services are given as HOST:PORT."""
    if terms.clients > len(clients):
        raise ConfigError(f"a round cannot ask {terms.clients} clients: there are {len(clients)}")
    keys = {role: SigningKey.generate() for role in ("key-server", "shuffler", "aggregator")}
    public = {role: key.public.hex() for role, key in keys.items()}
    peers = Peers(
        federation=federation,
        round=terms,
        key_server=ServicePeer(url=f"https://{key_server}", signing_key=public["key-server"]),
        shuffler=ServicePeer(url=f"https://{shuffler}", signing_key=public["shuffler"]),
        aggregator=AggregatorPeer(signing_key=public["aggregator"]),
    )
    addresses = {"key-server": key_server, "shuffler": shuffler}
    made = {role: self_signed(f"{federation} {role}", address) for role, address in addresses.items()}
    trusted = b"".join(certificate for certificate, _ in made.values())
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    _new_folder(folder)
    for role, key in keys.items():
        _role_folder(folder / role, peers, trusted)
        key.save(folder / role / SIGNING_KEY)
    for role, (certificate, private) in made.items():
        (folder / role / TLS_CERT).write_bytes(certificate)
        write_private(folder / role / TLS_KEY, private)
    KeyServer.create(folder / "key-server")
    _new_folder(folder / "clients")
    for name in clients:
        add_client(folder / "clients" / name, folder / "key-server", name)
    return peers


def add_client(folder: Path, key_server: Path, name: str) -> None:
    """A new folder for one more client: its keys and credential, and whom it trusts, from the key server's folder.

    The key server's operator makes it, who could sign for any client anyway, and sees every ρ.
    """
    server, sealing, signing = KeyServer(key_server), SealingKey.generate(), SigningKey.generate()
    if folder.exists():  # before a credential is issued that no client would get
        raise ConfigError(f"{folder} is there already; give a new folder")
    issued = server.issue(name, sealing.public, signing.public)
    _role_folder(folder, server.peers, (key_server / CA).read_bytes())
    sealing.save(folder / SEALING_KEY)
    signing.save(folder / SIGNING_KEY)
    write_private(folder / CREDENTIAL, issued.encode())


def self_signed(name: str, address: str) -> tuple[bytes, bytes]:
    """A certificate (EC P-256) for a service at `address`, HOST:PORT, and its key; both PEM."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)  # it vouches for no other
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(address)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), private


def _host(address: str) -> x509.GeneralName:
    """What a certificate names: an IP address where the host of HOST:PORT is one, and else a DNS name."""
    if not (found := re.fullmatch(r"([\w.-]+):\d+", address, re.ASCII)) or found[1] == "0.0.0.0":
        raise ConfigError(f"a service's address is HOST:PORT as others reach it, by name or IPv4, got {address!r}")
    try:
        return x509.IPAddress(ipaddress.ip_address(found[1]))
    except ValueError:
        return x509.DNSName(found[1])


def _role_folder(folder: Path, peers: Peers, ca: bytes) -> None:
    _new_folder(folder)
    peers.write(folder)
    (folder / CA).write_bytes(ca)


def _new_folder(folder: Path) -> None:
    """Made for its owner alone; never one that is there."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        raise ConfigError(f"{folder} is there already; keys are never overwritten: give a new folder") from None
