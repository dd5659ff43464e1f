"""Candidates: what they cost, that coding them hardly moves the choice, and how their times grow."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

import ntkfl
from ntkfl.methods import CPNTKFL, NTKFL, ClientRound, FedAvg, Method, SumNTKFL, Task
from ntkfl.methods.candidates import residual_left
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import Whole, one_weight, play, scalar_client, small_clients, small_task

PLAIN = {"row_clip": None, "drop_opposed": False, "trim": 0.0, "trim_losses": 0.0, "verify": False}


@pytest.fixture(scope="module")
def digits() -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=40, alpha=0.3), seed=10)


class Exact(Whole):
    tolerance: ClassVar[float] = NTKFL.tolerance


class Growing(NTKFL):
    """Also from times that were given."""

    @property
    def grows(self) -> bool:
        return True


@pytest.fixture
def _eightfold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkfl.methods.candidates.EXTEND", 8.0)


def run(fed: ntkfl.data.Federated, method: Method, **options: Any) -> ntkfl.Run:
    torch.manual_seed(0)
    inputs = method.projected_dim or 64
    return ntkfl.train(ntkfl.models.mlp(inputs, 32, 10), fed, method, clients_per_round=8, callbacks=[], **options)


@pytest.mark.parametrize(
    "method",
    [
        NTKFL(),
        CPNTKFL(projected_dim=40, projection="gaussian"),
        SumNTKFL(),
        SumNTKFL(largest=50),
    ],
    ids=["ntk-fl", "cp-ntk-fl", "sum-ntk-fl", "measured"],
)
def test_a_round_sends_clients_at_most_twice_what_fedavg_does(digits: ntkfl.data.Federated, method: Method) -> None:
    """Counted off encoded messages; sums send the accepted weights from the second round on, and a step to measure."""
    ours = run(digits, method, rounds=2).history[-1]
    averaging = run(digits, FedAvg(local_steps=1, projected_dim=method.projected_dim), rounds=1).history[-1]
    assert ours["downlink_bytes"] <= 2 * averaging["downlink_bytes"]


@pytest.mark.parametrize("seed", [10, 11, 12])
def test_coded_candidates_have_nearly_the_losses_of_exact_ones_and_the_exact_one_is_kept(seed: int) -> None:
    """Digits in float64, the first round, where candidates lie furthest apart: a mean loss moves by less than 2 %, the
    choice stays, and the exact weights go on.
    """
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=40, alpha=0.3), seed=seed)
    torch.manual_seed(seed)
    task = Task(ntkfl.models.mlp(64, 32, 10).double(), 10, "ce", label_smoothing=0.1)
    clients = [ClientRound(i, fed.client(i)[0].double(), fed.client(i)[1], Randomness.simulated(i)) for i in range(10)]
    methods = Exact(), NTKFL()
    whole, coded = (play(method, task, clients) for method in methods)
    exact, sent = (
        method.unpacked(next(s.message for s in log if s.kind == "candidates"), task.like)
        for method, (_, log) in zip(methods, (whole, coded), strict=True)
    )
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    losses, approximate = (task.candidate_losses(some, x, y).mean(1) for some in (exact, sent))
    assert float((approximate / losses - 1).abs().max()) < 0.02
    assert coded[0].steps == whole[0].steps
    torch.testing.assert_close(coded[0].state["weights"], whole[0].state["weights"], rtol=0, atol=0)


@pytest.mark.usefixtures("_eightfold")
def test_times_double_while_the_longest_wins_and_within_the_bound(digits: ntkfl.data.Federated) -> None:
    """Times so short that the longest always wins, and that little is learned in them."""
    records = run(digits, Growing(steps=(0.5, 1.0)), rounds=5).history
    assert [r["steps"] for r in records] == [r["longest_steps"] for r in records] == [1, 2, 4, 8, 8]
    assert ["warning" in r for r in records] == [False, False, False, True, True]  # once no longer ones are allowed
    fixed = run(digits, NTKFL(steps=(0.5, 1.0)), rounds=2).history
    assert [r["steps"] for r in fixed] == [1, 1]
    assert all("the longest candidate, t = 1, was chosen" in r["warning"] for r in fixed)
    assert not any("warning" in r for r in run(digits, NTKFL(), rounds=2).history)


def test_the_residual_left_is_that_of_a_linear_flow() -> None:
    """One sample of f = w x with mse: r(t) = r(0) e^(−ηx²t), whose mean up to t is r(0) (1 − e^(−ηx²t)) / (ηx²t)."""
    method = NTKFL(loss="mse", lr=0.1, steps=(1e-3, 5.0, 20.0), **PLAIN)
    task, client = one_weight(0.3), scalar_client(0, 2.0, 1.0)
    _, log = play(method, task, [client])
    rows = method.gather(task, task.like, [s.message for s in log if s.kind == "upload"], 1)
    for t in (5.0, 20.0):
        left = residual_left(method.evolve(task, rows, (1e-3, t)))
        assert left == pytest.approx(-math.expm1(-0.4 * t) / (0.4 * t), rel=1e-3)


@pytest.mark.usefixtures("_eightfold")
def test_times_stay_where_a_shorter_one_wins_or_the_longest_was_not_reached() -> None:
    method, state = Growing(steps=(1.0, 2.0)), {"extended_steps": torch.tensor(1)}
    task, clients = small_task(), small_clients(5, 5)
    rows = method.gather(task, task.like, [s.message for s in play(method, task, clients)[1] if s.kind == "upload"], 1)
    evolution = method.evolve(task, rows, method.times(state))
    assert evolution.steps == method.times(state) == (1, 2, 4)
    assert int(method.extended(state, evolution, 1)["extended_steps"]) == 1
    assert int(method.extended(state, evolution, 2)["extended_steps"]) == 2
    short = method.evolve(task, rows, (1.0, 2.0))  # as after a flow that could not be integrated further
    assert int(method.extended(state, short, 1)["extended_steps"]) == 1
    assert method.extended({}, short, 0) == {}


def test_times_grow_by_default_where_nobody_chose_them() -> None:
    for method in (NTKFL(), CPNTKFL(), NTKFL(lr=0.1)):
        assert method.grows
        assert NTKFL(**method.model_dump()).grows  # as a resumed run reads it
    assert not NTKFL(steps=(100.0, 200.0)).grows
    assert not NTKFL(kernel="trace").grows
