"""Rounds of NTK-FL with the bounds on: honest ones are what they were, and what is bounded is noted."""

from __future__ import annotations

from typing import Any

import torch

from ntkfl.methods import NTKFL, ClientRound, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from tests.federation.rounds import play_round
from tests.methods.rounds import play, small_clients, small_task


def test_verified_rounds_are_the_same_rounds() -> None:
    task, clients = small_task(), small_clients(8, 5)
    plain, _ = play(NTKFL(), task, clients)
    checked, _ = play(NTKFL(verify=True), task, clients)
    assert torch.equal(plain.state["weights"], checked.state["weights"])
    assert "made_up_rows" not in checked.diagnostics


def test_a_round_with_every_defence_learns_from_honest_clients() -> None:
    task = small_task()
    client = ClientRound(0, torch.randn(60, 5).double(), torch.arange(60) % 3, Randomness.simulated(0))
    client.x[:, :3] += 3 * torch.eye(3).double()[client.y]
    outcome, _ = play(NTKFL(row_clip=1.5, trim=0.1, verify=True), task, [client])
    assert not {"made_up_rows", "trimmed_rows"} & set(outcome.diagnostics)
    f = task.predict(outcome.state["weights"], client.x)
    assert float((f.argmax(1) == client.y).double().mean()) > 0.9


def test_rows_are_computed_again_without_being_asked_to() -> None:
    task, clients = small_task(), small_clients(8, 5, 6)
    plain, _ = play(NTKFL(verify=False), task, clients)
    checked, _ = play(NTKFL(), task, clients)
    assert torch.equal(plain.state["weights"], checked.state["weights"])

    def turned(method: Any, task: Task, message: Message, clients: Any) -> list[Message]:
        replies = method.answer(task, message, clients)
        if message.kind == "weights":
            arrays = {n: -a if n.endswith(".g") else a for n, a in replies[0].arrays.items()}
            replies[0] = Message("upload", message.round, arrays)
        return list(replies)

    method = NTKFL()
    outcome, _ = play_round(task, method, method.start(task, task.like), 1, clients, respond=turned)
    assert outcome.diagnostics["made_up_rows"] == 8


def test_a_client_with_far_more_rows_than_the_others_counts_for_one_and_a_half() -> None:
    task, clients = small_task(), small_clients(8, 8, 8, 200)
    outcome, _ = play(NTKFL(), task, clients)
    assert outcome.diagnostics["samples"] == 8 + 8 + 8 + 12
    assert outcome.diagnostics["surplus_rows"] == 188


def test_a_round_costs_no_more_than_a_few_recent_ones() -> None:
    """What the budget does not reach is no candidate: as where the flow fails otherwise."""
    task, clients = small_task(), small_clients(8, 5)
    method = NTKFL()
    free, _ = play(method, task, clients)
    cost = int(free.diagnostics["kernel_products"])
    assert free.state["products"].tolist() == [0, 0, 0, 0, cost]
    tight = method.start(task, task.like) | {"products": torch.tensor([0, 0, 3, 4, 5])}
    outcome, _ = play(method, task, clients, tight)
    assert "reached only time" in str(outcome.diagnostics["solver_fallback"])
    assert int(outcome.diagnostics["kernel_products"]) < cost
    assert outcome.state["products"][:-1].tolist() == [0, 3, 4, 5]
    same, _ = play(method, task, clients, free.state | {"weights": task.like})
    assert torch.equal(same.state["weights"], free.state["weights"])
