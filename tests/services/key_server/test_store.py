"""The key server's state: it survives, only its owner reads it, and it is never made anew."""

from __future__ import annotations

import base64
import json
import os
import signal
import sqlite3
import stat
from pathlib import Path

import pytest
from ntkfl.deployment.demo_setup import DemoSetup, init

from ntkfl.crypto.hpke import SigningKey
from ntkfl.errors import ConfigError, Refused
from ntkfl.services.key_server.store import KeyServer
from tests.services.fixtures import RUN, EnrollingClient, refused, start


def test_what_was_given_survives_a_stop_and_a_crash(tmp_path: Path) -> None:
    """Seed, enrolments and revocations are the same after SIGTERM and after kill -9, and nothing secret was said."""
    (tmp_path / "run.toml").write_text(RUN)
    init(tmp_path / "demo", tmp_path / "run.toml", DemoSetup(clients=3))
    one, other, late = (EnrollingClient(tmp_path / "demo" / "clients" / f"client-{number}", "") for number in range(3))
    said, seeds = [], set()
    for signalled, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -9), (signal.SIGINT, 0)):
        with start(tmp_path / "demo") as process:
            one.url = other.url = late.url = process.urls["key-server"]
            if not one.credential:
                assert one.enrol().status_code == other.enrol().status_code == 200
                KeyServer.open(tmp_path / "demo" / "key-server").revoke(other.name)
            seeds.add(one.seed())
            assert refused(other.ask()) == (403, "revoked")
            assert one.enrol().status_code == 200
            assert process.stop(signalled) == code
        said.append(process.output())
    assert len(seeds) == 1
    everything = "\n".join(said)
    assert "Traceback" not in everything
    assert "holds ρ, enrolments and the hashes of tokens" in everything
    secrets = secrets_of(tmp_path / "demo", seeds.pop())
    for secret in secrets:
        assert secret.decode("latin-1") not in everything
    for path in (tmp_path / "demo").rglob("*"):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        elif path.stat().st_mode & 0o077:
            assert not any(secret in path.read_bytes() for secret in secrets), path
        if path.is_file() and path.name != "token":
            tokens = [client.token.encode() for client in (one, other, late)]
            assert not any(token in path.read_bytes() for token in tokens), path
    requests = [line for line in map(json.loads, process.err) if line["event"] == "request"]
    assert {"client-0", "client-1"} >= {line["client"] for line in requests if "client" in line} != set()


def secrets_of(folder: Path, seed: bytes) -> list[bytes]:
    """Every secret of a demo federation, in every form it might be written in."""
    found = [path.read_bytes().strip() for path in folder.rglob("token")]
    found += [
        line for path in folder.rglob("*key.pem") for line in path.read_bytes().splitlines() if b"-----" not in line
    ]
    roles = ("key-server", "shuffler", "aggregator")
    keys = (SigningKey.load(folder / role / "signing-key.pem") for role in roles)
    raw = [seed, *(key._key.private_bytes_raw() for key in keys)]
    for value in raw:
        found += [value, value.hex().encode(), base64.b64encode(value), base64.urlsafe_b64encode(value)]
    assert len(found) > 20
    return found


def test_the_state_is_private_and_never_made_anew(tmp_path: Path) -> None:
    key, path = SigningKey.generate(), tmp_path / "state.sqlite"
    with pytest.raises(ConfigError, match="a lost state is a lost ρ"):
        KeyServer(path, "f", key)
    assert not path.exists()
    before = os.umask(0)
    try:
        server = KeyServer.create(path, "f", key)
        token = server.make_token("c", "client")
        with server._transaction() as db:
            db.execute("INSERT INTO runs VALUES ('r', NULL)")
            assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {
                "state.sqlite": 0o600,
                "state.sqlite-journal": 0o600,
            }
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["state.sqlite"]
    assert token.partition(".")[2].encode() not in path.read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        KeyServer.create(path, "f", key)
    with pytest.raises(ConfigError, match="is of federation 'f', not 'g'"):
        KeyServer(path, "g", key)
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM federation")
    with pytest.raises(ConfigError, match="does not say of which federation it is"):
        KeyServer(path, "f", key)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read it: chmod 600"):
        KeyServer(path, "f", key)
    path.unlink()
    with pytest.raises(Refused, match="cannot be read or written"):
        server.clients()
    assert not path.exists()
