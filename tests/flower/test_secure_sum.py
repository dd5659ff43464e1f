"""Secure sums on Flower, with the key server and the shuffler as processes: seeds and masked vectors go past Flower."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from ntkfl.errors import ConfigError
from ntkfl.flower.apps import client_app
from ntkfl.flower.records import payload_of
from ntkfl.flower.server import FlowerRun, FlowerServer
from tests.deployment.roles import Roles
from tests.deployment.test_secure_sum import FEDAVG, participant, simulated
from tests.flower.test_shuffled import NODES, Listening, aggregator


@pytest.mark.long
def test_receipts_through_flower_and_the_sums_of_the_simulation(tmp_path: Path) -> None:
    said: list[str] = []
    with Roles(tmp_path, evaluators=0, seed=7, rounds=2, method=FEDAVG) as roles:
        roles.key_server()
        roles.shuffler()
        members = {NODES[f"client-{i}"]: participant(roles, i) for i in range(4)}
        for member in members.values():
            member.hello()
        grid = Listening({node: client_app(member) for node, member in members.items()})
        history = aggregator(roles, roles.out, grid, said).run().history
        run = simulated(roles, FEDAVG, 3, 2)
        deployed = load_file(roles.out / "model.safetensors")
        for name, tensor in run.model.state_dict().items():
            assert (tensor - deployed[name]).abs().max() < 1e-6
        assert [record["summed_clients"] for record in history] == [3, 3]
        assert [record["uplink_bytes"] for record in history] == [record["uplink_bytes"] for record in run.history]
        receipts = [payload_of(reply) for reply in grid.replies]
        assert {len(receipt) for receipt in receipts} == {64}  # nothing else of clients came through Flower
        assert len(receipts) == 2 * 2 * 3  # two rounds of a sum and of counts, three clients each


def test_without_a_shuffler_there_is_no_secure_sum(tmp_path: Path) -> None:
    run = FlowerRun(inputs=(4,), outputs=2, clients=2, clients_per_round=2, method=FEDAVG)
    with pytest.raises(ConfigError, match="needs a key server and a shuffler"):
        FlowerServer(Listening({}), NODES, run, tmp_path)
