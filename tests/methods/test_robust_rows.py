"""Bounds on rows: each by hand, and rounds with them on, where honest rows stay and what is bounded is noted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ntkfl
from ntkfl.methods import NTKFL, ClientRound, Outcome, Task
from ntkfl.methods.robust import Robust, median
from ntkfl.methods.rows.robust_rows import (
    budget,
    clip_rows,
    holds_inputs,
    no_costs,
    opposed,
    surplus_left_out,
    true_rows,
    with_cost,
    without_outliers,
)
from ntkfl.privacy.settings import Privacy
from tests.methods.rounds import ask, play, small_clients, small_task

ON = Robust.on(["rows"])


def test_long_rows_are_scaled_to_the_bound() -> None:
    task, (client,) = small_task(), small_clients(9)
    J = task.jacobian(task.like, client.x)
    long = J.scaled(torch.tensor([1.0] * 8 + [50.0]))
    clipped, count = clip_rows(long, 2.0)
    assert count == 1
    norms = clipped.dense().flatten(1).norm(dim=1)
    assert float(norms[8]) == pytest.approx(2 * float(median(long.dense().flatten(1).norm(dim=1))))
    assert torch.allclose(clipped.dense()[8] / norms[8], J.dense()[8] / J.dense()[8].norm())
    assert clip_rows(J, 100.0) == (J, 0)


def test_surplus_rows_are_drawn_by_the_number_of_the_round() -> None:
    drawn = surplus_left_out(1000, 107, round=3)
    assert len(drawn.unique()) == 107
    assert bool((drawn.diff() > 0).all())
    assert torch.equal(drawn, surplus_left_out(1000, 107, round=3))
    assert not torch.equal(drawn, surplus_left_out(1000, 107, round=4))


def test_a_budget_is_five_times_the_median_of_the_last_five_rounds() -> None:
    costs = no_costs()
    assert budget(costs) is None
    costs = with_cost(costs, 900)
    assert budget(costs) == 4500
    for cost in (100, 110, 120, 5000, 130):
        costs = with_cost(costs, cost)
    assert costs.tolist() == [100, 110, 120, 5000, 130]
    assert budget(costs) == 600


def two_classes(wrong: list[int]) -> tuple[ntkfl.Evolution, Tensor]:
    """Forty rows of two clear classes, and their labels; some have the other's."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2).double()
    y = torch.arange(40) % 2
    x = torch.randn(40, 2).double() * 0.2 + torch.where(y == 0, -2.0, 2.0).unsqueeze(1)
    y[wrong] = 1 - y[wrong]
    return ntkfl.evolve(ntkfl.jacobian(model, x), model(x).detach(), y, steps=(1e3, 4e3, 2e4)), y


def test_a_client_at_odds_with_the_others_is_left_out_whole() -> None:
    senders = torch.arange(40) // 8
    evolution, y = two_classes(list(range(8, 16)))  # all of client 1
    kept = without_outliers(evolution, y, 0.2, senders)
    assert torch.equal(senders[kept].unique(), torch.tensor([0, 2, 3, 4]))
    assert len(kept) == 32
    assert len(without_outliers(evolution, y, 0.1, senders)) == 40  # a tenth of five is nobody
    assert len(without_outliers(*two_classes([]), 0.2, senders)) == 40


def test_rows_of_a_label_that_nobody_else_has_stay() -> None:
    """Four clients have label 0 and one has label 1 alone, as where every client has one label: its rows, which the
    others' pull against, stay, though not where a second client has label 1. A label of one row saves that row only.
    """
    evolution, _ = two_classes(list(range(8, 16)))
    senders = torch.arange(40) // 8  # the second resists most, as the test above has it
    alone, shared = (torch.isin(senders, torch.tensor(of)).long() for of in ([1], [1, 3]))
    assert len(without_outliers(evolution, alone, 0.2, senders)) == 40
    one = (torch.arange(40) == 11).long()
    assert without_outliers(evolution, one, 0.2, senders).tolist() == [*range(8), 11, *range(16, 40)]
    assert senders[without_outliers(evolution, shared, 0.2, senders)].unique().tolist() == [0, 2, 3, 4]


def test_rows_turned_round_are_against_their_own_label_however_long_they_are() -> None:
    task, (client,) = small_task(), small_clients(60)
    client.x[:, :3] += 3 * torch.eye(3).double()[client.y]
    J = task.jacobian(task.like, client.x)
    assert not bool(opposed(J, client.y).any())
    turned = torch.zeros(60, dtype=torch.bool)
    turned[[3, 17, 44]] = True
    for scale in (0.1, 1.0, 1.5):
        assert torch.equal(opposed(J.scaled(torch.where(turned, -scale, 1.0)), client.y), turned)
    half = torch.where(torch.arange(60) % 2 == 0, -1.0, 1.0)
    assert not bool(opposed(J.scaled(half), client.y).any())  # nobody can say which half is corrupted


def test_rows_that_the_network_does_not_give_are_told_from_true_ones() -> None:
    task, (client,) = small_task(dtype=torch.float32), small_clients(8, dtype=torch.float32)
    J, f0 = task.jacobian(task.like, client.x), task.predict(task.like, client.x)
    assert bool(true_rows(task, task.like, J, f0).all())
    flipped = J.scaled(torch.tensor([1.0, -1.0] + [1.0] * 6))
    assert true_rows(task, task.like, flipped, f0).tolist() == [True, False] + [True] * 6
    other = f0.clone()
    other[5] += 0.1
    assert true_rows(task, task.like, J, other).tolist() == [True] * 5 + [False] + [True] * 2
    assert not bool(true_rows(task, task.like, task.jacobian(task.like, client.x, "dense"), f0).any())
    assert not bool(true_rows(task, task.like + 0.1, J, f0).any())  # of other weights than those sent


def test_whether_rows_hold_the_inputs_is_told_by_the_network() -> None:
    for model, shape, verdict in (
        (ntkfl.models.mlp(64, 8, 3), (64,), True),
        (ntkfl.models.mlp(64, 8, 3), (1, 8, 8), True),
        (torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(64, 3)), (64,), False),  # another function of the inputs
        (ntkfl.models.cnn((1, 9, 9), 3, (2, 2), 4), (1, 9, 9), False),
    ):
        task = Task(model, 3, "ce")
        task.example = torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64)
        assert holds_inputs(task, task.like) == verdict, (model, shape)
        assert not holds_inputs(task, task.like, "dense")
        task.privacy = Privacy(sparsity=0.5)
        assert not holds_inputs(task, task.like)


# Rounds.


def round_with(task: Task, clients: list[ClientRound], change: Any) -> Outcome:
    """A round in which the first client's upload is changed before it is sent; it judges candidates as all do."""

    class Cheating(NTKFL):
        def answer(self, task: Task, question: Any, client: ClientRound) -> Any:
            reply = super().answer(task, question, client)
            return change(reply) if client.id == 0 and question.kind == "weights" else reply

    return play(Cheating(), task, clients)[0]


def test_made_up_rows_are_left_out_whoever_comes_first() -> None:
    """Also where the first upload is of a form that holds no inputs: the network decides whether rows are verified."""

    def turned(reply: Any) -> Any:
        return type(reply)({n: -a if n.endswith(".g") else a for n, a in reply.arrays.items()})

    def dense(reply: Any) -> Any:
        return ask(NTKFL(form="dense"), small_task(), small_clients(8, 5, 6)[0])

    for change in (turned, dense):
        outcome = round_with(small_task(robust=Robust(verify=True)), small_clients(8, 5, 6), change)
        assert outcome.diagnostics["made_up_rows"] == 8


def test_a_client_with_far_more_rows_than_the_others_counts_for_one_and_a_half() -> None:
    clients = small_clients(8, 8, 8, 200)
    outcome, _ = play(NTKFL(), small_task(robust=Robust(row_clip=1.5)), clients)
    assert outcome.diagnostics["samples"] == 8 + 8 + 8 + 12
    assert outcome.diagnostics["surplus_rows"] == 188
    paper, _ = play(NTKFL(), small_task(), clients)
    assert paper.diagnostics["samples"] == 8 + 8 + 8 + 200


def test_a_round_costs_no_more_than_a_few_recent_ones() -> None:
    """What the budget does not reach is no candidate: as where the flow fails otherwise."""
    task, clients, method = small_task(robust=Robust(row_clip=100.0)), small_clients(8, 5), NTKFL()
    free, _ = play(method, task, clients)
    cost = int(free.diagnostics["kernel_products"])
    assert free.state["products"].tolist() == [0, 0, 0, 0, cost]
    tight = method.start(task, task.like) | {"products": torch.tensor([0, 0, 3, 4, 5])}
    outcome, _ = play(method, task, clients, tight)
    assert "reached only time" in str(outcome.diagnostics["solver_fallback"])
    assert int(outcome.diagnostics["kernel_products"]) < cost
    assert outcome.state["products"][:-1].tolist() == [0, 3, 4, 5]
    task.robust = Robust()
    same, _ = play(method, task, clients, tight)
    torch.testing.assert_close(same.state["weights"], free.state["weights"], rtol=0, atol=0)


def test_what_does_nothing_is_said() -> None:
    task = small_task(robust=Robust(verify=True, trim=0.2), privacy=Privacy(shuffle=True))
    NTKFL(form="dense").start(task, task.like)
    assert [line.split(" does nothing")[0] for line in task.notes] == ["robust verify", "robust trim"]
    quiet = small_task(robust=Robust(verify=True, trim=0.2))
    NTKFL().start(quiet, quiet.like)
    assert quiet.notes == []
