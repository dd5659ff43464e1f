"""`ntkfl keys` and what `ntkfl serve` says when it cannot."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ntkfl.cli import app
from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.errors import NTKFLError
from ntkfl.services.key_server.key_protocol import enrolment
from ntkfl.services.key_server.store import KeyServer

RUN = "inputs = [64]\noutputs = 10\nrounds = 3\nclients_per_round = 2\n[method]\nname = 'ntk-fl'\n"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(*arguments: str | Path) -> list[str]:
    result = run(*arguments)
    assert result.exit_code == 0, result.exception
    return result.stdout.splitlines()


def fault(*arguments: str | Path) -> str:
    error = run(*arguments).exception
    assert isinstance(error, NTKFLError), error
    assert "\n" not in str(error)
    return str(error)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    lines = said("keys", "init", tmp_path / "made", "--config", tmp_path / "run.toml", "--clients", "2")
    assert lines[0] == "federation demo, run run-0: 2 clients, 1 evaluator"
    assert "In production no machine sees two roles' keys" in lines[-1]
    return tmp_path / "made"


def listed(made: Path) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in said("keys", "list", made / "key-server")}


def test_init_makes_what_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    options = ["--federation", "fed", "--run", "r1", "--host", "localhost", "--evaluators", "0", "--clients", "3"]
    ports = ["--key-server-port", "1001", "--shuffler-port", "1002", "--aggregator-port", "1003", "--min-clients", "3"]
    said("keys", "init", tmp_path / "made", "--config", tmp_path / "run.toml", *options, *ports)
    text = (tmp_path / "made" / "clients" / "client-2" / "federation.toml").read_text()
    for part in ('"fed"', '"r1"', '"https://localhost:1001"', "localhost:1002", "localhost:1003", "min_clients = 3"):
        assert part in text
    assert len(list((tmp_path / "made" / "clients").iterdir())) == 3
    assert "there already" in fault("keys", "init", tmp_path / "made", "--config", tmp_path / "run.toml")
    assert "no such file" in fault("keys", "init", tmp_path / "new", "--config", tmp_path / "absent.toml")


def test_token_enrol_list_revoke(made: Path) -> None:
    assert listed(made) == {
        "client": ["role", "enrolled", "revoked", "credential", "ends"],
        "client-0": ["client", "no", "no"],
        "client-1": ["client", "no", "no"],
        "evaluator-0": ["evaluator", "no", "no"],
        "runs:": ["run-0"],
    }
    (token,) = said("keys", "token", made / "key-server", "--client", "late", "--role", "evaluator")
    assert re.fullmatch(r"late\.[A-Za-z0-9_-]{43}", token)
    server = KeyServer.open(made / "key-server")
    server.enrol(**enrolment(token, "demo", SealingKey.generate(), SigningKey.generate()))
    *late, date, clock = listed(made)["late"]
    assert late == ["evaluator", "yes", "no"]
    ends = parsed(f"{date} {clock}")
    assert timedelta(days=29.9) < ends - datetime.now(UTC) <= timedelta(days=30)
    assert "if it held ρ" in said("keys", "revoke", made / "key-server", "late")[0]
    assert listed(made)["late"][:3] == ["evaluator", "yes", "yes"]
    assert "no client 'nobody'" in fault("keys", "revoke", made / "key-server", "nobody")
    assert "unknown role" in fault("keys", "token", made / "key-server", "--client", "x", "--role", "y")


def test_token_can_make_the_client_s_folder(made: Path) -> None:
    out = made / "clients" / "late"
    (line,) = said("keys", "token", made / "key-server", "--client", "late", "--out", out)
    assert line == f"made {out} for client late"
    assert (out / "token").stat().st_mode & 0o777 == 0o600
    assert (out / "token").read_text().startswith("late.")
    assert {path.name for path in out.iterdir()} == {"token", "ca.pem", "federation.toml"}
    for name in ("ca.pem", "federation.toml"):
        assert (out / name).read_bytes() == (made / "clients" / "client-0" / name).read_bytes()
    kept = (out / "token").read_text().strip()
    assert "there already" in fault("keys", "token", made / "key-server", "--client", "late", "--out", out)
    server = KeyServer.open(made / "key-server")  # the token in the folder is still the one that counts
    server.enrol(**enrolment(kept, "demo", SealingKey.generate(), SigningKey.generate()))


def test_show_tells_public_keys_and_what_ends_when(made: Path) -> None:
    lines = dict(line.split(" ", 1) for line in said("keys", "show", made / "aggregator"))
    signing = SigningKey.load(made / "aggregator" / "signing-key.pem").public.hex()
    assert lines["signing-key.pem"] == f"Ed25519 {signing}"
    ends = {name: parsed(line.removeprefix("ends ")) for name, line in lines.items() if line.startswith("ends ")}
    assert set(ends) == {"ca.pem", "tls.pem"} == set(lines) - {"signing-key.pem"}
    assert timedelta(days=364) < ends["tls.pem"] - datetime.now(UTC) <= timedelta(days=365)
    assert timedelta(days=3649) < ends["ca.pem"] - datetime.now(UTC) <= timedelta(days=3650)
    recipient = SealingKey.generate()
    recipient.save(made / "reader.pem")
    assert said("keys", "show", made / "reader.pem") == [f"reader.pem X25519 {recipient.public.hex()}"]
    own = SigningKey.load(made / "shuffler" / "signing-key.pem").public.hex()
    assert f"signing-key.pem Ed25519 {own}" in said("keys", "show", made / "shuffler")
    assert not any("key" in line for line in said("keys", "show", made / "clients" / "client-0"))
    assert "no key, certificate or credential" in fault("keys", "show", made / "absent")


def parsed(moment: str) -> datetime:
    return datetime.strptime(moment, "%Y-%m-%d %H:%M:%SZ").replace(tzinfo=UTC)


def test_a_client_is_let_in_again_by_the_operator(made: Path) -> None:
    assert "no client 'client-0' has enrolled" in fault("keys", "readmit", made / "key-server", "client-0")
    server = KeyServer.open(made / "key-server")
    token = (made / "clients" / "client-0" / "token").read_text()
    server.enrol(**enrolment(token, "demo", SealingKey.generate(), SigningKey.generate()))
    assert said("keys", "readmit", made / "key-server", "client-0")[0].startswith("client-0 can renew its credential")
    said("keys", "revoke", made / "key-server", "client-0")
    assert "which is for ever" in fault("keys", "readmit", made / "key-server", "client-0")


def test_new_makes_a_private_key_once(tmp_path: Path) -> None:
    (public,) = said("keys", "new", tmp_path / "me.pem")
    assert SealingKey.load(tmp_path / "me.pem").public.hex() == public
    assert (tmp_path / "me.pem").stat().st_mode & 0o777 == 0o600
    assert said("keys", "show", tmp_path / "me.pem") == [f"me.pem X25519 {public}"]
    assert "never overwritten" in fault("keys", "new", tmp_path / "me.pem")
    assert "cannot write" in fault("keys", "new", tmp_path / "absent" / "me.pem")
    assert SealingKey.load(tmp_path / "me.pem").public.hex() == public
