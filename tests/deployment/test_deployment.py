"""The whole of CP-NTK-FL as processes that do not trust one another, on loopback, with TLS."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from typer.testing import CliRunner

import ntkfl
from ntkfl.cli import app
from ntkfl.crypto.hpke import SealingKey
from ntkfl.crypto.row_frames import Announced, BatchKey, open_row
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.errors import NTKFLError, TrustError
from ntkfl.federation.build import build_network
from ntkfl.federation.config import ModelConfig
from ntkfl.federation.export import load_exported
from ntkfl.federation.simulation import Simulation
from ntkfl.methods import CPNTKFL
from ntkfl.services.http.client import HttpClient
from ntkfl.services.key_server.client import Identity
from tests.deployment.roles import METHOD, Roles
from tests.services.processes import Process

pytestmark = pytest.mark.timeout(600)


def wait(process: Process, timeout: float = 250) -> int:
    return process._process.wait(timeout)


def until(condition: Callable[[], bool], timeout: float = 200) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def rounds(roles: Roles) -> list[dict[str, object]]:
    path = roles.out / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_three_rounds_end_with_the_simulations_weights(tmp_path: Path) -> None:
    """Key server, shuffler, aggregator, four clients and an evaluator, against one process with the same seeds."""
    with Roles(tmp_path, seed=7) as roles:
        key_server, shuffler = roles.key_server(), roles.shuffler()
        members = [roles.client(i, seed=7) for i in range(4)] + [roles.evaluator()]
        aggregator = roles.aggregator()
        assert wait(aggregator) == 0, aggregator.output()
        for member in members:
            assert wait(member, 60) == 0, member.output()
        simulated = simulation(roles, seed=7, clients_per_round=3)
        deployed = roles.weights()
        for name, tensor in simulated.model.state_dict().items():
            assert (tensor - deployed[name]).abs().max() < 1e-6
        for here, there in zip(simulated.history, rounds(roles), strict=True):
            assert there["test_accuracy"] == here["test_accuracy"]
            assert there["steps"] == here["steps"]
            assert there["uplink_bytes"] == here["uplink_bytes"]  # simulated bytes are real bytes
            assert there["clients"] == [f"client-{i}" for i in here["clients"]]
            assert there["dropped_rows"] == 0

        rho = Identity.of(roles.folder / "clients" / "client-0").run_secret().seed.reveal()
        nothing_secret_outside(roles, key_server, shuffler, aggregator, rho)
        export_needs_a_client(roles, tmp_path)


def nothing_secret_outside(
    roles: Roles, key_server: Process, shuffler: Process, aggregator: Process, rho: bytes
) -> None:
    """ρ is in the key server's state alone; nobody's private key is anywhere but in its own folder."""
    spellings = (rho, rho.hex().encode())
    for path in roles.folder.rglob("*"):
        if path.is_file() and path != roles.folder / "key-server" / "state.sqlite":
            assert not any(text in path.read_bytes() for text in spellings), path
    for path in roles.out.rglob("*"):
        assert not path.is_file() or not any(text in path.read_bytes() for text in spellings), path
    for process in (key_server, shuffler, aggregator):
        assert rho.hex() not in process.output()
    openers = [raw(folder / "sealing-key.pem") for folder in (roles.folder / "clients").iterdir()]
    assert not (roles.folder / "aggregator" / "sealing-key.pem").exists()  # rounds have keys, and keep them nowhere
    for secret in (rho, *openers):
        assert not in_memory(shuffler.pid, secret), "the shuffler holds a key it must not have"
    assert not in_memory(key_server.pid, openers[0])


def raw(path: Path) -> bytes:
    key = load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, X25519PrivateKey)
    return key.private_bytes_raw()


def in_memory(pid: int, needle: bytes) -> bool:
    """Whether a process holds these bytes anywhere it can write to."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in maps:
                span, mode, *_ = line.split()
                if mode.startswith("rw"):
                    start, end = (int(text, 16) for text in span.split("-"))
                    memory.seek(start)
                    try:
                        if needle in memory.read(end - start):
                            return True
                    except (OSError, OverflowError):
                        continue  # a hole
    except PermissionError:
        pytest.skip("this system does not let a process read its child's memory")
    return False


def test_the_search_of_memory_finds_what_is_there(tmp_path: Path) -> None:
    with Roles(tmp_path) as roles:
        shuffler = roles.shuffler()
        assert in_memory(shuffler.pid, roles.peers.aggregator.signing_key.encode())


def test_no_key_of_the_shuffler_opens_a_row(tmp_path: Path) -> None:
    """Rows as they lie in the shuffler's file, against every key in its folder."""
    with Roles(tmp_path, evaluators=0, clients_per_round=4) as roles:
        roles.key_server()
        shuffler = roles.shuffler()
        for i in range(3):
            roles.client(i)
        greet(roles, "client-3")  # and it never answers: the batch stays open, with rows in it
        aggregator = Aggregator(roles.folder / "aggregator", roles.out, lambda line: None)
        running = threading.Thread(target=run_until_it_fails, args=(aggregator,), daemon=True)
        running.start()
        state = roles.folder / "shuffler" / "state.sqlite"
        until(lambda: holds_rows(state))
        opener, aggregator.transport.shuffler.http.patience = aggregator.transport.opener, 0.1
        shuffler.kill()
        running.join(60)
        rows = pending_rows(state)
        assert rows
        with sqlite3.connect(state) as db:
            ((signed,),) = db.execute("SELECT signed FROM announcements").fetchall()
        db.close()
        where = (roles.peers.federation, roles.peers.run, Announced.of(BatchKey(1, 0), signed))
        begun = {open_row(opener, row, *where)[:4] for row in rows}
        assert {b"NTKF"} <= begun <= {b"NTKF", bytes(4)}  # a message, or padding
        keys = []
        for path in (roles.folder / "shuffler").glob("*.pem"):
            if b"PRIVATE" in path.read_bytes():
                key = load_pem_private_key(path.read_bytes(), None)
                if isinstance(key, Ed25519PrivateKey):
                    value = key.private_bytes_raw()
                else:
                    value = key.private_numbers().private_value.to_bytes(32, "big")  # type: ignore[union-attr]
                keys.append(SealingKey(X25519PrivateKey.from_private_bytes(value)))
        assert keys
        for key in keys:
            for row in rows:
                with pytest.raises(TrustError):
                    open_row(key, row, *where)


def run_until_it_fails(aggregator: Aggregator) -> None:
    with suppress(NTKFLError):
        aggregator.run()


def holds_rows(state: Path) -> bool:
    """Of a client at least, and for good: what is being written does not count before it is committed."""
    journal = state.with_name(f"{state.name}-journal")
    return state.stat().st_size > 200_000 and journal.exists() and journal.stat().st_size == 0


def greet(roles: Roles, name: str) -> Identity:
    """Enrol and say hello, as a client that then dies would."""
    folder = roles.folder / "clients" / name
    identity = Identity.of(folder)
    client = HttpClient(roles.peers.shuffler.url, folder / "ca.pem").identify(identity.credential, identity.signing)
    client.ask("POST", f"/v1/runs/{roles.peers.run}/hello")
    return identity


def pending_rows(state: Path) -> list[bytes]:
    with sqlite3.connect(state) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE name LIKE 'pending_%'")]
        return [row for table in tables for (row,) in db.execute(f"SELECT row FROM {table}")]


@pytest.mark.long
def test_a_client_that_vanishes_and_one_that_comes_late(tmp_path: Path) -> None:
    """The round completes with the rest after its deadline; a client that comes later takes part from then on."""
    with Roles(tmp_path, clients=5, clients_per_round=4, round_seconds=4.0, rounds=4, evaluators=0) as roles:
        # Started for four of the five, so that the fifth can come late.
        settings = (roles.folder / "aggregator" / "run.toml").read_text().replace("clients = 5", "clients = 4")
        (roles.folder / "aggregator" / "run.toml").write_text(settings)
        roles.key_server()
        roles.shuffler()
        vanishing, *_ = [roles.client(i) for i in range(4)]
        aggregator = roles.aggregator()
        until(lambda: len(rounds(roles)) >= 1)
        vanishing.kill()
        late = roles.client(4)
        assert wait(aggregator) == 0, aggregator.output()
        history = rounds(roles)
        assert len(history) == 4
        assert "client-4" in {name for record in history for name in record["clients"]}  # type: ignore[attr-defined]
        assert wait(late, 60) == 0, late.output()
        # Whoever vanishes between a round and its evaluation leaves that one round without a score.
        assert sum(record["evaluated_samples"] == 0 for record in history) <= 1


@pytest.mark.long
def test_restarts_change_nothing(tmp_path: Path) -> None:
    """The shuffler killed with rows of some clients in it, the aggregator after a round: the weights of a run in which
    neither happened. Nothing is lost, nothing is counted twice, and a round not finished leaves no trace.
    """
    with Roles(tmp_path, seed=5, clients_per_round=4) as roles:
        roles.key_server()
        shuffler = roles.shuffler()
        members = [roles.client(i, seed=5) for i in range(3)] + [roles.evaluator()]
        greet(roles, "client-3")
        first = roles.aggregator()
        state = roles.folder / "shuffler" / "state.sqlite"
        until(lambda: holds_rows(state))
        shuffler.kill()
        time.sleep(0.5)
        roles.shuffler()
        members.append(roles.client(3, seed=5))
        until((roles.out / "checkpoint" / "state.safetensors").exists)
        first.kill()
        second = roles.aggregator()
        assert wait(second) == 0, second.output()
        assert "goes on after round" in second.output()
        assert [record["round"] for record in rounds(roles)] == [1, 2, 3]
        simulated = simulation(roles, seed=5, clients_per_round=4)
        for name, tensor in simulated.model.state_dict().items():
            assert (tensor - roles.weights()[name]).abs().max() < 1e-6
        for member in members:
            assert wait(member, 60) == 0
        third = roles.aggregator()
        assert wait(third) == 2
        assert "has ended" in third.output()


def simulation(roles: Roles, seed: int, clients_per_round: int) -> ntkfl.Run:
    """The same run in one process, by one who is enrolled and so knows ρ."""
    method = CPNTKFL(**{k: v for k, v in METHOD.items() if k != "name"})  # type: ignore[arg-type]
    model = build_network(ModelConfig(hidden=(12,)).suited(method), (20,), 10, seed).double()
    secret = Identity.of(roles.folder / "clients" / "client-0").run_secret()
    simulation = Simulation(model, roles.fed, method, clients_per_round=clients_per_round, seed=seed, secret=secret)
    return simulation.run(3)


def export_needs_a_client(roles: Roles, folder: Path) -> None:
    """The aggregator cannot export a model that can be used; an enrolled client can, to whom it names."""
    reader = SealingKey.generate()
    reader.save(folder / "reader.pem")
    arguments = ["export", str(roles.out), "--to", f"reader={reader.public.hex()}"]
    with pytest.raises(TrustError, match="does not know ρ"):
        CliRunner().invoke(app, [*arguments, "--out", str(folder / "no")], catch_exceptions=False)
    client = str(roles.folder / "clients" / "client-1")
    CliRunner().invoke(app, [*arguments, "--out", str(folder / "model"), "--client", client], catch_exceptions=False)
    x, y = roles.fed.test
    with torch.no_grad():
        right = load_exported(folder / "model", folder / "reader.pem")(x.double()).argmax(1) == y
    assert float(right.double().mean()) == rounds(roles)[-1]["test_accuracy"]
