"""NTK-FL from sums through the aggregator's rounds: one sealed row per client, and the weights of one process."""

from __future__ import annotations

from pathlib import Path

import tomli_w
import torch

from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.demo_setup import DemoSetup, init
from ntkfl.methods import ClientRound
from tests.deployment.test_aggregator import SETTINGS, Here
from tests.federation.rounds import play_round


def test_sums_arrive_as_one_row_per_client(tmp_path: Path) -> None:
    method = {"name": "sum-ntk-fl", "shuffle": True}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(SETTINGS | {"rounds": 3, "method": method}))
    init(tmp_path / "demo", tmp_path / "run.toml", DemoSetup(clients=3, evaluators=0))
    aggregator = Aggregator(tmp_path / "demo" / "aggregator", tmp_path / "run", lambda line: None)
    here = Here(aggregator)
    aggregator.transport.shuffler = here  # type: ignore[assignment]
    state = aggregator.server.state.state
    records = aggregator.run().history
    assert [record["dropped_rows"] for record in records] == [0, 0, 0]
    assert [record["samples"] for record in records] == [18, 18, 18]
    assert min(record["uplink_bytes"] for record in records[:2]) > records[2]["uplink_bytes"]  # A_1 in two rounds

    clients = [ClientRound(c.id, c.x, c.y, c.randomness) for c in here.people]
    for number in (1, 2, 3):
        state = play_round(aggregator.server.task, aggregator.server.method, state, number, clients)[0].state
    assert torch.allclose(aggregator.server.state.state["weights"], state["weights"], rtol=1e-9, atol=1e-12)
