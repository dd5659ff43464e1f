"""A demo federation: every role gets what it may hold and nothing more, and its certificates do their work."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest

from ntkfl.crypto.hpke import SigningKey
from ntkfl.deployment.contract import Federation
from ntkfl.deployment.demo_setup import DemoSetup, init
from ntkfl.services.http.application import service_app
from ntkfl.services.http.server import Listener, tls_context

RUN = """
inputs = [8, 8]
outputs = 10
precision = "float64"
rounds = 3
clients_per_round = 3
[model]
hidden = [20]
[method]
name = "ntk-fl"
lr = 0.02
"""
ROLES = {
    "key-server": {"signing-key.pem", "tls.pem", "tls-key.pem", "state.sqlite"},
    "shuffler": {"tls.pem", "tls-key.pem", "aggregator-ca.pem", "signing-key.pem"},
    "aggregator": {"signing-key.pem", "tls.pem", "tls-key.pem", "run.toml"},
    **{f"clients/{name}": {"token"} for name in ("client-0", "client-1", "client-2", "evaluator-0", "evaluator-1")},
}
PRIVATE = {"signing-key.pem", "tls-key.pem", "state.sqlite", "token"}
AUTHORITIES = {"services-key.pem", "aggregator-key.pem"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "my.toml").write_text(RUN)
    init(
        folder / "made",
        folder / "my.toml",
        DemoSetup(clients=3, evaluators=2, federation="fed", run="r", min_clients=3),
    )
    return folder / "made"


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """A TLS handshake in memory; raises what either side objects to."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=host),
    ]
    for _ in range(6):
        for side in sides:
            try:
                side.do_handshake()
                if side is sides[0]:
                    side.read(1)
            except ssl.SSLWantReadError:
                continue
    assert all(side.version() == "TLSv1.3" for side in sides)


def serving(folder: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    app = service_app("test", max_body=1)
    return tls_context(Listener(app, "127.0.0.1", 0, folder / "tls.pem", folder / "tls-key.pem", client_ca))


def calling(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def test_each_folder_holds_what_its_role_may_hold(made: Path) -> None:
    assert {path.name for path in made.iterdir()} == {"key-server", "shuffler", "aggregator", "clients", "authority"}
    assert {path.name for path in (made / "authority").iterdir()} == AUTHORITIES | {"services.pem", "aggregator.pem"}
    assert {f"clients/{path.name}" for path in (made / "clients").iterdir()} == {n for n in ROLES if "clients/" in n}
    for role, files in ROLES.items():
        assert {path.name for path in (made / role).iterdir()} == files | {"federation.toml", "ca.pem"}


def test_private_files_are_their_owner_s_alone_and_no_two_roles_share_one(made: Path) -> None:
    contents = []
    for path in made.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        elif path.name in PRIVATE | AUTHORITIES:
            assert mode == 0o600, path
            contents.append(path.read_bytes())
        else:
            assert b"PRIVATE" not in path.read_bytes(), path
    assert len(contents) == len(set(contents)) == 2 + sum(len(files & PRIVATE) for files in ROLES.values())
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_all_pin_the_same_and_it_is_true(made: Path) -> None:
    assert len({(made / role / "federation.toml").read_bytes() for role in ROLES}) == 1
    federation = Federation.read(made / "shuffler")
    assert (federation.federation, federation.run, federation.shuffler.min_clients) == ("fed", "r", 3)
    assert federation.key_server.url == "https://127.0.0.1:8441"
    assert (federation.shuffler.url, federation.shuffler.aggregator_url) == (
        "https://127.0.0.1:8442",
        "https://127.0.0.1:8443",
    )
    assert federation.key_server.signing_key == SigningKey.load(made / "key-server" / "signing-key.pem").public.hex()
    assert federation.shuffler.signing_key == SigningKey.load(made / "shuffler" / "signing-key.pem").public.hex()
    assert federation.aggregator.signing_key == SigningKey.load(made / "aggregator" / "signing-key.pem").public.hex()
    assert set(federation.aggregator.model_dump()) == {"signing_key"}  # sealing keys are made round by round
    assert (federation.terms.inputs, federation.terms.outputs, federation.terms.precision) == ((8, 8), 10, "float64")
    assert (federation.terms.model.hidden, federation.terms.method["lr"]) == ((20,), 0.02)
    assert (federation.terms.rounds, federation.terms.most_rounds, federation.terms.clients_per_round) == (3, 13, 3)
    assert (made / "aggregator" / "run.toml").read_text() == RUN


def test_the_shuffler_lets_in_the_aggregator_alone(made: Path) -> None:
    server = serving(made / "shuffler", made / "shuffler" / "aggregator-ca.pem")
    server.verify_flags |= ssl.VERIFY_X509_STRICT
    aggregator = calling(made / "aggregator")
    aggregator.load_cert_chain(made / "aggregator" / "tls.pem", made / "aggregator" / "tls-key.pem")
    handshake(server, aggregator, "127.0.0.1")
    with pytest.raises(ssl.SSLError):
        handshake(server, calling(made / "clients" / "client-0"), "127.0.0.1")
    other = calling(made / "key-server")
    other.load_cert_chain(made / "key-server" / "tls.pem", made / "key-server" / "tls-key.pem")
    with pytest.raises(ssl.SSLError):
        handshake(server, other, "127.0.0.1")
