"""What the key server decides, on its own disk; over the network: `test_attacks.py`."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.signed import Credential, open_run_secret
from ntkfl.errors import ConfigError, TrustError
from ntkfl.services.clients import Identity
from ntkfl.services.key_server import KeyServer
from ntkfl.services.peers import RoundTerms
from ntkfl.services.setup import add_client, init
from tests.services.federation import refusal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init(tmp_path / "f", ["ada", "bob"], RoundTerms(clients=2, least=2))
    return tmp_path / "f"


def secret(folder: Path, holder: str, run: str, opener: str | None = None) -> bytes:
    """What the key server gives the holder of a credential, opened by it or by another."""
    server, client = KeyServer(folder / "key-server"), Identity(folder / "clients" / holder)
    key, federation = server.peers.key_of("key_server"), server.peers.federation
    answer = server.run_secret(Credential.check(client.issued, key, federation), run)
    sealing = Identity(folder / "clients" / (opener or holder)).sealing
    return open_run_secret(answer, sealing, key, federation, run, holder).reveal()


def test_a_run_has_one_secret_that_only_its_clients_can_open(folder: Path) -> None:
    assert secret(folder, "ada", "r1") == secret(folder, "bob", "r1")
    assert secret(folder, "ada", "r2") != secret(folder, "ada", "r1")
    with pytest.raises(TrustError):
        secret(folder, "ada", "r1", opener="bob")
    with refusal("malformed"):
        secret(folder, "ada", "../r1")
    (folder / "key-server" / "master").unlink()
    with pytest.raises(ConfigError, match="every ρ is lost"):
        secret(folder, "ada", "r1")


def test_a_revoked_client_gets_nothing_more_and_a_name_is_given_once(folder: Path) -> None:
    server = KeyServer(folder / "key-server")
    server.revoke("ada")
    server.revoke("ada")
    with refusal("revoked"):
        secret(folder, "ada", "r1")
    assert server.revoked() == ["ada"]
    with pytest.raises(ConfigError, match="no client"):
        server.revoke("cyd")
    for attempt in (server.revoke, lambda name: add_client(folder / "clients" / "third", folder / "key-server", name)):
        with refusal("malformed"):
            attempt("../ada")
    with pytest.raises(ConfigError, match="choose another name"):
        add_client(folder / "clients" / "other", folder / "key-server", "ada")


def test_a_credential_is_of_the_keys_beside_it(folder: Path) -> None:
    ada = folder / "clients" / "ada"
    (ada / "credential").write_bytes((folder / "clients" / "bob" / "credential").read_bytes())
    with pytest.raises(TrustError, match="other keys"):
        Identity(ada)
    (ada / "credential").unlink()
    with pytest.raises(ConfigError, match="no credential"):
        Identity(ada)


def test_folders_are_their_owners_alone_and_never_overwritten(folder: Path) -> None:
    for path in folder.rglob("*"):
        secret = path.is_dir() or path.name in ("signing-key.pem", "sealing-key.pem", "tls-key.pem", "master")
        assert not (secret and stat.S_IMODE(path.stat().st_mode) & 0o077), path
    with pytest.raises(ConfigError, match="never overwritten"):
        init(folder, ["ada", "bob"], RoundTerms(clients=2, least=2))
    with pytest.raises(ConfigError, match="there already"):
        add_client(folder / "clients" / "ada", folder / "key-server", "cyd")
    with pytest.raises(ConfigError, match="can never be 3"):
        RoundTerms(clients=2, least=3)
    (folder / "key-server" / "signing-key.pem").unlink()
    SigningKey.generate().save(folder / "key-server" / "signing-key.pem")
    with pytest.raises(ConfigError, match="not the key that federation"):
        KeyServer(folder / "key-server")
