"""Secure sums whose masks lie with the shuffler and the key server, as processes on loopback with TLS."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ntkfl.crypto.mask_format import SEED_BYTES
from ntkfl.crypto.row_frames import BatchKey, pack_rows
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.client import ShuffledClient
from ntkfl.errors import Refused, TrustError
from ntkfl.services.announcement import Announcement
from tests.deployment.roles import Roles
from tests.deployment.test_deployment import rounds, until, wait
from tests.deployment.test_secure_sum import participant, same_to_the_bit, seeds_at, simulated

pytestmark = pytest.mark.timeout(600)
SUMS: dict[str, Any] = {"name": "sum-ntk-fl", "secure_sum": True, "mask_holders": 2}
FEDAVG: dict[str, Any] = {"name": "fedavg", "secure_sum": True, "local_steps": 2, "mask_holders": 2}
SEED = 7


def second_seeds(roles: Roles) -> int:
    """In the key server's file."""
    with closing(sqlite3.connect(f"file:{roles.folder / 'key-server' / 'state.sqlite'}?mode=ro", uri=True)) as db:
        found = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'second_seeds'").fetchone()
        return int(db.execute("SELECT COUNT(*) FROM second_seeds").fetchone()[0]) if found else 0


def test_both_holders_die_and_the_sums_are_the_simulations_to_the_bit(tmp_path: Path) -> None:
    """Key server and shuffler are killed (SIGKILL) with two clients' seeds in each; a third client answers then."""
    with Roles(tmp_path, clients=3, evaluators=0, seed=SEED, rounds=1, method=SUMS) as roles:
        services = [roles.key_server(), roles.shuffler()]
        clients = [participant(roles, number) for number in range(3)]
        for client in clients:
            client.hello()
        said: list[str] = []
        aggregator = Aggregator(roles.folder / "aggregator", roles.out, said.append)
        runs = (aggregator.run, clients[0].run, clients[1].run)
        threads = [threading.Thread(target=run, daemon=True) for run in runs]
        for thread in threads:
            thread.start()
        until(lambda: seeds_at(roles) == 2)
        assert second_seeds(roles) == 2
        for service in services:
            service.kill()
        services = [roles.key_server(), roles.shuffler()]
        threads.append(threading.Thread(target=clients[2].run, daemon=True))
        threads[-1].start()
        for thread in threads:
            thread.join(60)
        assert len(rounds(roles)) == 1, said
        same_to_the_bit(simulated(roles, SUMS, 3, 1), roles)
        assert (seeds_at(roles), second_seeds(roles)) == (0, 0)
        the_contract_and_both_holders_refuse(clients[0], aggregator)


def the_contract_and_both_holders_refuse(client: ShuffledClient, aggregator: Aggregator) -> None:
    own = aggregator.transport
    message = next(own.method.round(own.task, aggregator.server.state.state, 1, range(3)))
    own._names, key = [f"client-{i}" for i in range(3)], BatchKey(5, 0)
    batch = own.batch(key, range(3), own.schema(message))  # type: ignore[arg-type]

    def signed(holders: int) -> bytes:
        asked = Announcement("exchange", key, replace(batch, holders=holders), message, own.opener.public)  # type: ignore[arg-type]
        return asked.sign(own.signer, own.federation, own.run)

    with pytest.raises(TrustError, match="held by 1, the contract by 2"):  # it would need one holder less
        client.heed(signed(1))
    own.shuffler.publish(signed(2))
    said = client.heed(signed(2))
    assert said is not None
    assert said.announced is not None
    assert said.sealing_key is not None
    masked = client._masked(said, (said.sealing_key, own.federation, own.run, said.announced))
    forged = masked[:SEED_BYTES] + bytes(80) + masked[SEED_BYTES + 80 :]
    with pytest.raises(Refused, match="no ticket of the key server's"):
        client._send("ticketed/sums", said.announced, forged)
    with pytest.raises(Refused, match="wants tickets"):
        client._send("sums", said.announced, masked[:SEED_BYTES] + masked[SEED_BYTES + 80 :])
    with pytest.raises(Refused, match="the shuffler signed"):  # the aggregator cannot make up a set
        own.key_server.ask("POST", f"/v1/runs/{own.run}/masks/release", bytes(64) + pack_rows(said.announced, [b"x"]))


@pytest.mark.long
@pytest.mark.parametrize("victim", ["key-server", "client"])
def test_kills_between_the_two_submissions(tmp_path: Path, victim: str) -> None:
    """Three rounds as processes; a holder, or a client that may have reached one of both, dies on the way. Whoever is
    in a sum is in both: sums of other sets would be beyond all limits, and the round refused.
    """
    settings: dict[str, Any] = {"clients": 3, "evaluators": 0, "seed": SEED, "method": FEDAVG, "retries": 3}
    with Roles(tmp_path, **settings, round_seconds=15.0) as roles:
        running = {"key-server": roles.key_server(), "client": None}
        roles.shuffler()
        aggregator = roles.aggregator()
        running["client"] = roles.client(0, seed=SEED)
        for number in (1, 2):
            roles.client(number, seed=SEED)
        until(lambda: second_seeds(roles) >= 1)
        process = running[victim]
        assert process is not None
        process.kill()
        again = {"key-server": roles.key_server, "client": lambda: roles.client(0, seed=SEED)}
        again[victim]()
        assert wait(aggregator) == 0, aggregator.output()
        history = rounds(roles)
        assert [record["round"] for record in history] == [1, 2, 3]
        assert [record["attempt"] for record in history] == [0, 0, 0]
        assert all(int(str(record["summed_clients"])) >= 2 for record in history)
        assert (seeds_at(roles), second_seeds(roles)) == (0, 0)
