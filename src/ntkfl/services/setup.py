"""The folders of a federation: keys and certificates, each role with just what it may hold.

DIR/key-server     federation.toml ca.pem signing-key.pem tls.pem tls-key.pem master issued/ revoked/
DIR/shuffler       federation.toml ca.pem signing-key.pem tls.pem tls-key.pem
DIR/aggregator     federation.toml ca.pem signing-key.pem
DIR/clients/NAME   federation.toml ca.pem signing-key.pem sealing-key.pem credential
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ntkfl.atomic import write_private
from ntkfl.crypto.certificates import CA, TLS_CERT, TLS_KEY, self_signed
from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.errors import ConfigError
from ntkfl.services.identity import Identity
from ntkfl.services.key_server import KeyServer
from ntkfl.services.peers import SIGNING_KEY, AggregatorPeer, Peers, RoundTerms, ServicePeer

KEY_SERVER_PORT, SHUFFLER_PORT = 8441, 8442


def init(
    folder: Path,
    clients: Sequence[str],
    terms: RoundTerms,
    federation: str = "demo",
    key_server: str = f"127.0.0.1:{KEY_SERVER_PORT}",
    shuffler: str = f"127.0.0.1:{SHUFFLER_PORT}",
) -> Peers:
    """Make the folders of all roles in `folder`, which must be new or empty. Services are given as HOST:PORT."""
    if terms.clients > len(clients):
        raise ConfigError(f"a round cannot ask {terms.clients} of {len(clients)} clients")
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
    made = {role: self_signed(f"{federation} {role}", host_of(address)) for role, address in addresses.items()}
    trusted = b"".join(certificate for certificate, _ in made.values())
    _new_folder(folder, may_be_empty=True)
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
    Identity.write(folder, sealing, signing, issued)


def host_of(address: str) -> str:
    """Of HOST:PORT, [HOST]:PORT where the host is an IPv6 address."""
    try:
        parts = urlsplit(f"//{address}")
        if parts.hostname and parts.port and parts.netloc == address and "@" not in address:
            return parts.hostname
    except ValueError:
        pass
    raise ConfigError(f"a service's address is HOST:PORT, got {address!r}")


def _role_folder(folder: Path, peers: Peers, ca: bytes) -> None:
    _new_folder(folder)
    peers.write(folder)
    (folder / CA).write_bytes(ca)


def _new_folder(folder: Path, *, may_be_empty: bool = False) -> None:
    """Made for its owner alone; never one in which there is something."""
    try:
        if may_be_empty and folder.is_dir() and not any(folder.iterdir()):
            os.chmod(folder, 0o700)
        else:
            os.mkdir(folder, 0o700)
    except FileExistsError:
        raise ConfigError(f"{folder} is there already; keys are never overwritten: give a new folder") from None
