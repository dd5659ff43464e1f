"""Candidates' losses as a secure sum beside shuffled rows: the cohort's choice of t, and nobody's own losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.federation.secure_sum import SumSchema
from ntkfl.federation.shuffled import Mixed, ShuffledTransport
from ntkfl.federation.simulation import Simulation
from ntkfl.methods import CPNTKFL, NTKFL, Task
from ntkfl.methods.additive import LARGEST_LOSS
from ntkfl.wire import Message

STEPS = (50.0, 200.0, 800.0)


@pytest.fixture(scope="module")
def digits() -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=8, alpha=0.5), seed=0)


def trained(digits: ntkfl.data.Federated, **options: Any) -> ntkfl.Run:
    torch.manual_seed(0)
    method = CPNTKFL(projected_dim=20, sparsity=0.5, steps=STEPS, trim_losses=0.0, **options)
    return Simulation(ntkfl.models.mlp(20, 8, 10).double(), digits, method, clients_per_round=4).run(2, callbacks=[])


def test_the_sum_chooses_what_single_losses_choose(digits: ntkfl.data.Federated) -> None:
    """The mean of means is the same up to the rounding of a sum of four clients, and so is the model that it takes."""
    one, two = trained(digits), trained(digits, sum_losses=True)
    for apart, summed in zip(one.history, two.history, strict=True):
        assert summed["steps"] == apart["steps"]
        assert summed["train_loss"] == pytest.approx(apart["train_loss"], abs=4 / 2**20)  # 4 · 100 · 2^21 < 2^31
        assert summed["summed_clients"] == 4
        assert summed["uplink"]["losses"] != apart["uplink"]["losses"]  # masked: four bytes per candidate, and a seed
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_server_sees_one_masked_sum(digits: ntkfl.data.Federated, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mixed] = []
    total = ShuffledTransport.open_total
    monkeypatch.setattr(ShuffledTransport, "open_total", lambda self, mixed: seen.append(mixed) or total(self, mixed))
    trained(digits, sum_losses=True)
    assert len(seen) == 2  # one of each round; rows are none
    for mixed in seen:
        assert isinstance(mixed.schema, SumSchema)
        assert (mixed.schema.kind, mixed.schema.numbers, len(mixed.rows)) == ("losses", 1 + len(STEPS), 4)
        assert any(mixed.masks)


def test_a_client_has_one_vote_of_bounded_size() -> None:
    method, task = NTKFL(shuffle=True, sum_losses=True), Task(ntkfl.models.mlp(4, 3, 2), 2, "ce")
    asked = Message("candidates", 1, {"weights": task.like.expand(2, -1)})
    votes = [torch.tensor([[0.5, 1.0]]), torch.tensor([[1e30, 0.0]])]
    summands = [method.summand(task, asked, Message("losses", 1, {"losses": vote})) for vote in votes]
    assert summands[1]["losses"].values.tolist() == [[LARGEST_LOSS, 0.0]]
    total = {"losses": summands[0]["losses"].values + summands[1]["losses"].values}
    reply = method.from_total(task, asked, total, 2)
    assert reply.take("losses", (1, 2)).tolist() == [[(LARGEST_LOSS + 0.5) / 2, 0.5]]
    assert method.summed("candidates")
    assert not method.summed("weights")  # rows are shuffled as ever
