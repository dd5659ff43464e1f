"""`ntkfl flower` as its users type it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.errors import ConfigError
from ntkfl.flower.folders import ClientFile, known_keys

RUN = {"inputs": [1, 8, 8], "outputs": 10, "clients": 3, "clients_per_round": 2, "method": {"name": "fedavg"}}


def invoke(*arguments: str | Path) -> str:
    return CliRunner().invoke(app, ["flower", *map(str, arguments)], catch_exceptions=False).output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(RUN))
    invoke("init", tmp_path / "fl", "--config", tmp_path / "run.toml", "--clients", 12, "--port", 8123)
    return tmp_path / "fl"


def test_each_role_gets_what_it_may_hold(folder: Path) -> None:
    server = {path.name for path in (folder / "server").iterdir()}
    assert server == {"server.toml", "run.toml", "ca.pem", "tls.pem", "tls-key.pem", "executor-secret", "clients"}
    own = folder / "clients" / "client-7"
    assert {path.name for path in own.iterdir()} == {
        "client.toml", "ca.pem", "node-key", "node-key.pub", "executor-secret",
    }  # fmt: skip
    private = [
        folder / "server" / "tls-key.pem",
        own / "node-key",
        own / "executor-secret",
        folder / "server" / "executor-secret",
    ]
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    assert len({(path / "executor-secret").read_bytes() for path in (folder / "clients").iterdir()}) == 12
    about = ClientFile.read(own)
    assert (about.name, about.number, about.clients, about.superlink) == ("client-7", 7, 12, "127.0.0.1:8123")
    assert about.terms.method["name"] == "fedavg"
    assert list(known_keys(folder / "server"))[-3:] == ["client-9", "client-10", "client-11"]  # as they are numbered


def test_the_commands_printed_are_safe_ones(folder: Path) -> None:
    superlink, register = invoke("server", folder / "server", "--print").splitlines()
    for part in (
        "FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1", "--host 127.0.0.1", "--port 8123",
        f"--ssl-certfile {folder}/server/tls.pem", "--enable-supernode-auth", "--isolation process",
        "--disable-runtime-dependency-installation", "--superexec-auth-secret-file",
    ):  # fmt: skip
        assert part in superlink
    assert "--insecure" not in superlink
    assert register == f"ntkfl flower register {folder}/server"
    assert "--host 0.0.0.0" in invoke("server", folder / "server", "--host", "0.0.0.0", "--print")
    own = folder / "clients" / "client-0"
    supernode, answering = invoke("client", own, "--data", "mine.npz", "--print").splitlines()
    for part in (
        "FLWR_TELEMETRY_ENABLED=0", "--superlink 127.0.0.1:8123", f"--root-certificates {own}/ca.pem",
        f"--auth-supernode-private-key {own}/node-key", "--isolation process", "--host 127.0.0.1",
    ):  # fmt: skip
        assert part in supernode
    assert "--insecure" not in supernode
    assert "--allow-runtime" not in supernode
    port = supernode.rsplit(" ", 1)[1]
    assert answering == f"ntkfl flower client {own} --data mine.npz --attach 127.0.0.1:{port}"
    named = invoke("client", own, "--data", "mine.csv", "--label-column", "ill", "--allow-code", "--print").splitlines()
    assert named[1].endswith(" --label-column ill --allow-code")


def test_flower_takes_the_commands_as_printed(folder: Path) -> None:
    """Its own parsers, on our words."""
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    from ntkfl.flower import commands

    arguments = commands.superlink(folder / "server").arguments
    program, words = arguments[:3], arguments[3:]
    assert program == (sys.executable, "-m", "ntkfl.flower.superlink")  # Flower's, with its control locked
    superlink = _parse_args_run_superlink().parse_args(words)
    assert superlink.enable_supernode_auth
    assert not superlink.runtime_dependency_install
    assert not superlink.insecure
    supernode = _parse_args_run_supernode().parse_args(commands.supernode(folder / "clients/client-0", 9).arguments[1:])
    assert (supernode.isolation, supernode.insecure, supernode.runtime_dependency_install) == ("process", False, False)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("server/tls-key.pem", ["server", "server", "--print"]),
        ("server/executor-secret", ["server", "server", "--print"]),
        ("server/executor-secret", ["register", "server"]),
        ("clients/client-0/node-key", ["client", "clients/client-0", "--data", "x.npz", "--print"]),
        ("clients/client-0/executor-secret", ["client", "clients/client-0", "--data", "x.npz", "--attach", "[::1]:9"]),
    ],
)
def test_a_secret_that_others_can_read_is_refused(folder: Path, file: str, words: list[str]) -> None:
    (folder / file).chmod(0o640)
    with pytest.raises(ConfigError, match=f"{file} holds a secret and others can read it: chmod 600"):
        invoke(words[0], folder / words[1], *words[2:])
