"""Secure sums with roles as processes, on loopback with TLS: the simulation's sums to the bit, whoever is killed."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.crypto.row_frames import BatchKey
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.client import ShuffledClient
from ntkfl.errors import ConfigError, TrustError
from ntkfl.federation.build import build_method, build_network
from ntkfl.federation.client import SeededRandomness
from ntkfl.federation.config import ModelConfig
from ntkfl.federation.simulation import Simulation
from ntkfl.services.announcement import Announcement
from tests.deployment.roles import Roles
from tests.deployment.test_deployment import rounds, until, wait
from tests.own_data import read_client

pytestmark = pytest.mark.timeout(600)
FEDAVG: dict[str, Any] = {"name": "fedavg", "secure_sum": True, "local_steps": 2, "weighting": "samples"}
SUMS: dict[str, Any] = {"name": "sum-ntk-fl", "secure_sum": True}
SEED = 7


def simulated(roles: Roles, method: dict[str, Any], clients_per_round: int, played: int) -> ntkfl.Run:
    built = build_method(method)
    model = build_network(ModelConfig(hidden=(12,)).suited(built), (1, 8, 8), 10, SEED).double()
    return Simulation(model, roles.fed, built, clients_per_round=clients_per_round, seed=SEED).run(played, callbacks=[])


def same_to_the_bit(run: ntkfl.Run, roles: Roles) -> None:
    deployed = roles.weights()
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, deployed[name]), name
    for here, there in zip(run.history, rounds(roles), strict=True):
        assert there["uplink_bytes"] == here["uplink_bytes"]  # simulated bytes are real bytes
        assert there["train_loss"] == here["train_loss"]
        assert there["summed_clients"] == here["summed_clients"]


def participant(roles: Roles, number: int) -> ShuffledClient:
    folder, data = roles.folder / "clients" / f"client-{number}", roles.data / f"client-{number}.npz"
    draws = SeededRandomness(SEED, number)
    return ShuffledClient(folder, *read_client(data), randomness=draws, patience=30, say=lambda line: None)


def seeds_at(roles: Roles) -> int:
    """Seeds of masks in the shuffler's file; read from a copy, as the file has one reader."""
    copy = roles.folder / "copy.sqlite"
    with suppress(OSError, sqlite3.Error), closing(sqlite3.connect(copy)) as db:
        copy.write_bytes((roles.folder / "shuffler" / "state.sqlite").read_bytes())
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE name GLOB 'seeds_*'")]
        return sum(db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables)
    return 0


def test_sums_across_processes_are_the_simulations_to_the_bit(tmp_path: Path) -> None:
    """Key server and shuffler as processes; the shuffler is killed (SIGKILL) with two clients' seeds in its file."""
    with Roles(tmp_path, clients=3, evaluators=0, seed=SEED, rounds=2, method=SUMS) as roles:
        roles.key_server()
        shuffler = roles.shuffler()
        clients = [participant(roles, number) for number in range(3)]
        for client in clients:
            client.hello()
        said: list[str] = []
        aggregator = Aggregator(roles.folder / "aggregator", roles.out, said.append)
        threads = [
            threading.Thread(target=run, daemon=True) for run in (aggregator.run, clients[0].run, clients[1].run)
        ]
        for thread in threads:
            thread.start()
        until(lambda: seeds_at(roles) == 2)
        shuffler.kill()
        shuffler = roles.shuffler()
        last = threading.Thread(target=clients[2].run, daemon=True)
        last.start()
        for thread in (*threads, last):
            thread.join(60)
        history = rounds(roles)
        assert len(history) == 2, said
        same_to_the_bit(simulated(roles, SUMS, 3, 2), roles)
        samples = sum(roles.fed.sizes)
        assert [record["evaluated_samples"] for record in history] == [samples, samples]  # one sum of counts
        assert all(0 <= float(str(record["test_accuracy"])) <= 1 for record in history)
        assert seeds_at(roles) == 0
        a_contract_is_kept(clients[0], aggregator)


def a_contract_is_kept(client: ShuffledClient, aggregator: Aggregator) -> None:
    """An announcement that would get at a single vector is not heeded: rows for sums, a second sum in a round."""
    own = aggregator.transport
    message = next(own.method.round(own.task, aggregator.server.state.state, 1, range(3)))
    assert not isinstance(message, dict)
    own._names = [f"client-{i}" for i in range(3)]
    for exchange, numbers, why in ((0, 0, "does not ask for a secure sum"), (1, None, "a second sum")):
        key = BatchKey(5, exchange)
        batch = own.batch(key, range(3), own.schema(message))  # type: ignore[arg-type]
        batch = batch if numbers is None else replace(batch, numbers=numbers)
        asked = Announcement("exchange", key, batch, message, own.opener.public)  # type: ignore[arg-type]
        with pytest.raises(TrustError, match=why):
            client.heed(asked.sign(own.signer, own.federation, own.run))


def test_terms_without_a_shuffler_are_refused_on_the_services(tmp_path: Path) -> None:
    with Roles(tmp_path, method={"name": "fedavg"}) as roles, pytest.raises(ConfigError, match="shuffle or secure_sum"):
        Aggregator(roles.folder / "aggregator", roles.out)


@pytest.mark.long
def test_a_client_that_vanishes_is_wholly_out(tmp_path: Path) -> None:
    """The sum is that of the others, after the deadline; nothing has to be recovered."""
    settings: dict[str, Any] = {"evaluators": 0, "seed": SEED, "rounds": 2, "method": FEDAVG, "clients_per_round": 4}
    with Roles(tmp_path, **settings, round_seconds=6.0) as roles:
        roles.key_server()
        roles.shuffler()
        participant(roles, 3).hello()  # and never answers
        for number in range(3):
            roles.client(number, seed=SEED)
        aggregator = roles.aggregator()
        assert wait(aggregator) == 0, aggregator.output()
        history = rounds(roles)
        assert [record["summed_clients"] for record in history] == [3, 3]
