"""A private run with real processes on loopback: secure sums, noise that its ε counts, and whoever is killed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ntkfl.data.npz import read_client
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.client import ShuffledClient
from ntkfl.federation.build import build_method
from ntkfl.federation.client import SeededRandomness
from ntkfl.federation.run_folder import RunFolder
from ntkfl.methods.inspection import Participation
from tests.deployment.roles import Roles
from tests.deployment.test_deployment import rounds, until, wait
from tests.deployment.test_secure_sum import participant, same_to_the_bit, seeds_at, simulated

pytestmark = pytest.mark.timeout(600)
SEED = 7
# ε is for two rounds and one that fails; the noise of three of four clients is counted on.
PRIVATE: dict[str, Any] = {
    "name": "private-sums", "secure_sum": True, "budget_rounds": 4, "noise_clients": 3, "epsilon": 3.0,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "min_clients": 3, "clients_per_round": 4, "evaluators": 1, "seed": SEED, "rounds": 2, "retries": 2,
    "method": PRIVATE,
}  # fmt: skip


def evaluator(roles: Roles) -> ShuffledClient:
    folder, draws = roles.folder / "clients" / "evaluator-0", SeededRandomness(SEED, 99)
    test = read_client(roles.data / "test.npz")
    return ShuffledClient(folder, *test, randomness=draws, patience=30, say=lambda line: None)


def test_a_private_run_across_processes_is_the_simulations_to_the_bit(tmp_path: Path) -> None:
    """Key server and shuffler as processes; the shuffler dies (SIGKILL) with three clients' seeds in its file."""
    with Roles(tmp_path, **SETTINGS) as roles:
        roles.key_server()
        shuffler = roles.shuffler()
        clients = [participant(roles, number) for number in range(4)]
        said: list[str] = []
        aggregator = Aggregator(roles.folder / "aggregator", roles.out, said.append)
        clients[3].hello()
        runs = [aggregator.run, evaluator(roles).run, *(client.run for client in clients[:3])]
        threads = [threading.Thread(target=run, daemon=True) for run in runs]
        for thread in threads:
            thread.start()
        until(lambda: seeds_at(roles) == 3)
        shuffler.kill()
        roles.shuffler()
        threads.append(threading.Thread(target=clients[3].run, daemon=True))
        threads[-1].start()
        for thread in threads:
            thread.join(60)
        history = rounds(roles)
        assert len(history) == 2, said
        run = simulated(roles, PRIVATE, 4, 2)
        same_to_the_bit(run, roles)
        assert seeds_at(roles) == 0
        # The record says what was promised and what is spent; the settings on what it rests.
        assert [record["epsilon"] for record in history] == [record["epsilon"] for record in run.history]
        assert 0 < float(str(history[0]["epsilon"])) < float(str(history[1]["epsilon"])) < 3
        assert {(record["delta"], record["unit"]) for record in history} == {(1e-5, "record")}
        stated = RunFolder(roles.out).config()["privacy"]
        (guarantee,) = stated["guarantees"]
        assert guarantee["epsilon"] == pytest.approx(3.0, rel=1e-3)  # of all four round numbers
        assert (guarantee["delta"], guarantee["unit"], guarantee["simulated"]) == (1e-5, "record", False)
        assert any("at least 3 clients of each round are honest" in line for line in guarantee["assumptions"])
        assert (stated["secure_sum"], stated["floor"]) == (True, 3)
        assert "of a single client nothing" in stated["sees"]["aggregator"]
        assert stated["sees"]["aggregator"].endswith("of evaluations each evaluator's counts, without its name")


@pytest.mark.long
@pytest.mark.parametrize("victim", ["shuffler", "aggregator", "client"])
def test_kills_of_a_private_run(tmp_path: Path, victim: str) -> None:
    """Whoever dies (SIGKILL) after the first round and comes back: no sum is released twice, each with the noise that
    ε counts on, and ε counts every round number, also of one that failed.
    """
    with Roles(tmp_path, **SETTINGS | {"round_seconds": 15.0 if victim == "client" else 200.0}) as roles:
        roles.key_server()
        start = {"shuffler": roles.shuffler, "aggregator": roles.aggregator, "client": lambda: roles.client(0, SEED)}
        running = {name: begin() for name, begin in start.items()}
        for number in (1, 2):
            roles.client(number, SEED)
        participant(roles, 3).hello()
        roles.evaluator()
        until(lambda: seeds_at(roles) == 3)  # of the first round: a client is still missing
        if victim == "shuffler":
            running[victim].kill()
            running[victim] = start[victim]()
        late = roles.client(3, SEED)
        until(lambda: len(rounds(roles)) >= 1)
        if victim != "shuffler":
            running[victim].kill()
            running[victim] = start[victim]()
        assert wait(running["aggregator"]) == 0, running["aggregator"].output()
        assert wait(late, 60) == 0, late.output()
        history = rounds(roles)
        assert [record["round"] for record in history] == [1, 2]
        numbers = [int(str(record["protocol_round"])) for record in history]
        assert numbers[0] == 1
        assert numbers[1] in (2, 3)
        assert all(int(str(record["summed_clients"])) >= 3 for record in history)
        method = build_method(PRIVATE)
        for record, number in zip(history, numbers, strict=True):
            (spent,) = method.guarantees(Participation(number, 4, 4, number, simulated=False))
            assert float(str(record["epsilon"])) == pytest.approx(spent.epsilon, rel=1e-3)
        if numbers == [1, 2] and [record["summed_clients"] for record in history] == [4, 4]:
            for name, tensor in simulated(roles, PRIVATE, 4, 2).model.state_dict().items():
                assert torch.equal(tensor, roles.weights()[name])
        assert seeds_at(roles) == 0
