"""What the key server decides, on its own disk; over the network: `test_attacks.py`."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ntkfl.crypto.credentials import Credential
from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.errors import ConfigError, TrustError
from ntkfl.services.key_server.protocol import enrolment, open_run_secret
from ntkfl.services.key_server.store import KeyServer
from ntkfl.services.peers import RoundTerms
from ntkfl.services.setup import add_client, init
from tests.services.shuffler.batches import refusal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init(tmp_path / "f", ["ada", "bob"], RoundTerms(clients=2, least=2))
    return tmp_path / "f"


class Client:
    """One that enrols by hand."""

    def __init__(self, folder: Path, server: KeyServer, name: str) -> None:
        self.sealing, self.signing = SealingKey.generate(), SigningKey.generate()
        token = (folder / "clients" / name / "token").read_text()
        self.body = enrolment(token, self.sealing, self.signing)
        self.server, self.name = server, name

    def enrol(self, **changes: str) -> Credential:
        issued = self.server.enrol(**(self.body | changes))
        return Credential.check(issued, self.server.peers.key_of("key_server"), self.server.peers.federation)

    def secret(self, credential: Credential, run: str) -> bytes:
        answer = self.server.run_secret(credential, run)
        peers = self.server.peers
        key, where = peers.key_of("key_server"), (peers.federation, run, self.name)
        return open_run_secret(answer, self.sealing, key, *where).reveal()


def test_a_run_has_one_secret_that_only_its_clients_can_open(folder: Path) -> None:
    server = KeyServer(folder / "key-server")
    ada, bob = (Client(folder, server, name) for name in ("ada", "bob"))
    own, other = ada.enrol(), bob.enrol()
    assert ada.secret(own, "r1") == bob.secret(other, "r1") == Client.secret(ada, own, "r1")
    assert ada.secret(own, "r2") != ada.secret(own, "r1")
    assert KeyServer(folder / "key-server").run_secret(own, "r1") is not None  # on the disk
    with pytest.raises(TrustError):
        bob.secret(own, "r1")  # sealed to ada
    with refusal("malformed"):
        ada.secret(own, "../r1")


def test_a_revoked_client_gets_nothing_more(folder: Path) -> None:
    server = KeyServer(folder / "key-server")
    ada = Client(folder, server, "ada")
    own = ada.enrol()
    server.revoke("ada")
    server.revoke("ada")
    with refusal("revoked"):
        ada.secret(own, "r1")
    with refusal("revoked"):
        ada.enrol()
    assert server.revoked() == ["ada"]
    with pytest.raises(ConfigError, match="no client"):
        server.revoke("cyd")
    with pytest.raises(ConfigError, match="revoked: choose another name"):
        server.make_tokens(["ada"])
    assert [(c.name, c.enrolled, c.revoked) for c in server.clients()] == [("ada", True, True), ("bob", False, False)]


def test_a_token_enrols_usable_keys_of_its_own_client(folder: Path) -> None:
    server = KeyServer(folder / "key-server")
    ada, bob = (Client(folder, server, name) for name in ("ada", "bob"))
    for changes, reason in [
        ({"token": bob.body["token"]}, "bad-token"),
        ({"client": "bob"}, "bad-token"),
        ({"signing_key": "x"}, "invalid-key"),
        ({"sealing_key": "00" * 32}, "invalid-key"),
    ]:
        with refusal(reason):
            ada.enrol(**changes)
    assert ada.enrol() == ada.enrol()  # the answer was lost


def test_folders_are_their_owners_alone_and_never_overwritten(folder: Path) -> None:
    for path in folder.rglob("*"):
        secret = path.is_dir() or path.name in ("signing-key.pem", "tls-key.pem", "token", "state.sqlite")
        assert not (secret and stat.S_IMODE(path.stat().st_mode) & 0o077), path
    held = {path.parent.name: path.parent for path in folder.rglob("signing-key.pem")}
    assert set(held) == {"key-server", "shuffler", "aggregator"}
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
