"""A whole federation at its most talkative, with nothing masked: no secret in what it says or leaves open to others."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest

from ntkfl.services.key_server.client import Identity
from tests.deployment.roles import HERE, Roles
from tests.services.processes import Process
from tests.spellings import private_bytes, spellings

pytestmark = pytest.mark.timeout(240)


def test_the_search_finds_what_is_there() -> None:
    secret = bytes(range(200, 232))
    for text in (
        secret,
        f"key={secret!r}".encode(),
        f'"{secret.hex()}"'.encode(),
        secret.hex().upper().encode(),
        str(list(secret)).encode(),
        *(base64.b64encode(b"x" * before + secret + b"y" * 9) for before in range(7)),
        *(base64.urlsafe_b64encode(b"x" * before + secret + b"y" * 9) for before in range(7)),
    ):
        assert any(spelling in text for spelling in spellings(secret)), text
    assert not any(spelling in secret[:-1] + bytes([secret[-1] ^ 1]) for spelling in spellings(secret))


def secrets_of(roles: Roles) -> dict[Path, list[bytes]]:
    """The file each secret belongs in, and the secrets."""
    found: dict[Path, list[bytes]] = {}
    for path in roles.folder.rglob("*.pem"):
        text = path.read_bytes()
        if b"PRIVATE" in text:
            found[path] = [private_bytes(text), b"".join(text.splitlines()[1:-1])]
    for path in roles.folder.rglob("token"):
        found[path] = [path.read_bytes().strip(), path.read_bytes().strip().rpartition(b".")[2]]
    rho = Identity.of(roles.folder / "clients" / "client-0").run_secret().seed.reveal()
    found[roles.folder / "key-server" / "state.sqlite"] = [rho]
    return found


def test_a_federation_that_tells_all_it_can_tells_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    before = os.umask(0)
    try:
        with Roles(tmp_path, clients=2, evaluators=0, clients_per_round=2, rounds=1) as roles:

            def debugged(*arguments: str | Path, listeners: int = 0) -> Process:
                return roles.start(HERE / "debug_logging.py", *arguments, listeners=listeners)

            debugged("serve", "key-server", roles.folder / "key-server", listeners=1)
            debugged("serve", "shuffler", roles.folder / "shuffler", listeners=2)
            folder, names = roles.folder / "clients", ("client-0", "client-1")
            members = [debugged("join", folder / name, "--data", roles.data / f"{name}.npz") for name in names]
            aggregator = debugged("aggregate", roles.folder / "aggregator", "--out", roles.out)
            assert aggregator._process.wait(120) == 0, aggregator.output()[-2000:]
            for member in members:
                assert member._process.wait(30) == 0, member.output()[-2000:]
            secrets = secrets_of(roles)
            for process in roles.processes[:2]:
                assert process.stop() == 0
            for process in roles.processes:
                assert "DEBUG" in process.output() or '"level": "debug"' in process.output()
            said = {f"process {i}": p.output().encode() for i, p in enumerate(roles.processes)}
            written = {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    finally:
        os.umask(before)
    # Two keys and a token of each client, six keys of the other roles, those of the two authorities, and ρ.
    assert len(secrets) == 2 * 3 + 6 + 2 + 1
    for home, values in secrets.items():
        for value in values:
            for spelling in spellings(value):
                leaks = [where for where, text in (said | written).items() if spelling in text and where != str(home)]
                assert not leaks, f"{home.name} of {home.parent.name} is in {leaks}"
    open_to_others(roles.folder, secrets)
    assert stat.S_IMODE(roles.out.stat().st_mode) == 0o700


def open_to_others(folder: Path, secrets: dict[Path, list[bytes]]) -> None:
    """Every folder is its owner's alone, and so is every file that holds a secret, or who sent what."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    held = {*secrets, *folder.rglob("credential"), *folder.rglob("*.sqlite*")}
    assert len(held) > len(secrets)
    for path in held:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
