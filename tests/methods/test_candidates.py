"""Candidates: what they cost, that coding them hardly moves the choice, who chooses, and how their times grow."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

import ntkfl
from ntkfl.errors import MessageError
from ntkfl.methods import CPNTKFL, NTKFL, ClientRound, FedAvg, Method, SumNTKFL, Task
from ntkfl.methods.robust import trimmed_mean
from ntkfl.methods.rows.candidates import CandidateLosses, choose
from ntkfl.methods.rows.ntk_fl import residual_left
from ntkfl.methods.rows.robust_rows import gather
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.settings import Privacy
from ntkfl.wire.message import Message
from ntkfl.wire.span import unpack_span
from tests.methods.rounds import Whole, ask, one_weight, play, scalar_client, small_clients, small_task


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


def run(fed: ntkfl.data.Federated, method: Method, **options: Any) -> ntkfl.Run:
    torch.manual_seed(0)
    inputs = options["privacy"].projected_dim if "privacy" in options else 64
    return ntkfl.train(ntkfl.models.mlp(inputs, 32, 10), fed, method, clients_per_round=8, callbacks=[], **options)


# What they cost, and what coding them changes.


@pytest.mark.parametrize(
    ("method", "privacy"),
    [
        (NTKFL(), {}),
        (CPNTKFL(), {"privacy": Privacy(projected_dim=40, projection="gaussian")}),
        (SumNTKFL(), {}),
        (SumNTKFL(largest=50), {}),
    ],
    ids=["ntk-fl", "cp-ntk-fl", "sum-ntk-fl", "measured"],
)
def test_a_round_sends_clients_at_most_twice_what_fedavg_does(
    digits: ntkfl.data.Federated, method: Method, privacy: dict[str, Any]
) -> None:
    """Counted off encoded messages; sums send the accepted weights from the second round on, and a step to measure."""
    ours = run(digits, method, rounds=2, **privacy).history[-1]
    averaging = run(digits, FedAvg(local_steps=1), rounds=1, **privacy).history[-1]
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
    whole, coded = (play(method, task, clients) for method in (Exact(), NTKFL()))
    asked = [next(s.message for s in log if s.kind == "candidates") for _, log in (whole, coded)]
    exact, sent = asked[0].take("weights", None, task.like), unpack_span(asked[1], task.like)
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    losses, approximate = (task.candidate_losses(some, x, y).mean(1) for some in (exact, sent))
    assert float((approximate / losses - 1).abs().max()) < 0.02
    assert coded[0].steps == whole[0].steps
    torch.testing.assert_close(coded[0].state["weights"], whole[0].state["weights"], rtol=0, atol=0)


# Who chooses.


def reports(*losses: list[float], shuffled: bool = False) -> list[CandidateLosses]:
    """What clients of one sample report, as the server parses it."""
    task = small_task(privacy=Privacy(shuffle=shuffled))
    found = []
    for row in losses:
        values = torch.tensor(row).double()
        one = {"losses": values.unsqueeze(0)} if shuffled else {"sums": values, "samples": torch.tensor(1)}
        found.append(CandidateLosses.parse(Message("rows", 1, one), task))
    return found


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_byzantine_client_has_a_veto_in_a_mean_and_none_in_a_trimmed_one(shuffled: bool) -> None:
    rows = [3.0, 1.0, 2.0], [3.0, 1.0, 2.5], [4.0, 1.5, 2.0], [2.0, 1.0, 2.0], [1e30, 1e30, 0.0]
    said = reports(*rows, shuffled=shuffled)
    assert choose(said, 0.0)[0] == 2
    best, loss = choose(said, 0.2)
    assert best == 1
    assert loss == pytest.approx((1.0 + 1.0 + 1.5) / 3)  # without the least and the greatest


@pytest.mark.parametrize("favourite", [0, 4])
def test_byzantine_clients_cannot_name_the_candidate_by_the_level_of_their_losses(favourite: int) -> None:
    """Clients whose losses lie far apart, and who lose the same by each candidate: a trimmed mean of the losses as they
    are is led astray by eight Byzantine clients of twenty, or four, and one of what they lose is not.
    """
    levels, shape = torch.linspace(0.0, 2.0, 12).double(), torch.tensor([0.1, 0.05, 0.0, 0.05, 0.1]).double()
    honest = levels.unsqueeze(1) + 0.01 + shape
    false = torch.full((8, 5), 1e30).double()
    false[:, favourite] = 0
    assert int(trimmed_mean(torch.cat([honest, false]), 0.4).argmin()) == favourite
    assert choose(reports(*honest.tolist(), *false.tolist()), 0.4)[0] == 2


def test_a_client_that_claims_many_samples_counts_once_where_losses_are_trimmed() -> None:
    said = reports([3.0, 1.0], [3.0, 1.0], [3.0, 1.0], [0.0, 9e6])
    said[-1].arrays["samples"] = torch.tensor(1_000_000)
    assert choose(said, 0.0)[0] == 0
    assert choose(said, 0.25)[0] == 1


@pytest.mark.parametrize("samples", [0, -1, 2**31, 1e30])
def test_losses_of_no_samples_or_too_many_are_refused(samples: float) -> None:
    """A count may come as any type: one beyond int64 must not end the round with an error of its own."""
    reply = {"sums": torch.tensor([1.0, 2.0]).double(), "samples": torch.tensor(samples)}
    with pytest.raises(MessageError, match="samples"):
        CandidateLosses.parse(Message("rows", 1, reply), small_task())


@pytest.mark.parametrize("losses", [[-1.0, 1.0], [1.0, 1e31]])
def test_losses_that_no_sample_can_have_are_refused(losses: list[float]) -> None:
    with pytest.raises(MessageError, match="a loss below zero, or above"):
        reports(losses, shuffled=True)


# How their times grow.


def test_times_double_while_the_longest_wins_and_within_the_bound(digits: ntkfl.data.Federated) -> None:
    """Times so short that the longest always wins, and that little is learned in them."""
    records = run(digits, Growing(steps=(0.5, 1.0)), rounds=6).history
    assert [r["steps"] for r in records] == [r["longest_steps"] for r in records] == [1, 2, 4, 8, 16, 16]
    assert ["warning" in r for r in records] == [False] * 4 + [True] * 2  # once no longer ones are allowed
    fixed = run(digits, NTKFL(steps=(0.5, 1.0)), rounds=2).history
    assert [r["steps"] for r in fixed] == [1, 1]
    assert all("the longest candidate, t = 1, was chosen" in r["warning"] for r in fixed)
    assert not any("warning" in r for r in run(digits, NTKFL(), rounds=2).history)


def test_the_residual_left_is_that_of_a_linear_flow() -> None:
    """One sample of f = w x with mse: r(t) = r(0) e^(−ηx²t), whose mean up to t is r(0) (1 − e^(−ηx²t)) / (ηx²t)."""
    method = NTKFL(loss="mse", lr=0.1, steps=(1e-3, 5.0, 20.0))
    task, client = one_weight(0.3), scalar_client(0, 2.0, 1.0)
    rows = gather(task, task.like, [ask(method, task, client)], 1)
    for t in (5.0, 20.0):
        left = residual_left(method.evolve(task, rows, (1e-3, t)))
        assert left == pytest.approx(-math.expm1(-0.4 * t) / (0.4 * t), rel=1e-3)


def test_times_stay_where_a_shorter_one_wins_or_the_longest_was_not_reached() -> None:
    method, state = Growing(steps=(1.0, 2.0)), {"extended_steps": torch.tensor(1)}
    task, clients = small_task(), small_clients(5, 5)
    rows = gather(task, task.like, [ask(method, task, client) for client in clients], 1)
    evolution = method.evolve(task, rows, method.times(state))
    assert evolution.steps == method.times(state) == (1, 2, 4)
    assert int(method.extended(state, evolution, 1)[0]["extended_steps"]) == 1
    assert int(method.extended(state, evolution, 2)[0]["extended_steps"]) == 2
    short = method.evolve(task, rows, (1.0, 2.0))  # as after a flow that could not be integrated further
    assert int(method.extended(state, short, 1)[0]["extended_steps"]) == 1
    assert method.extended({}, short, 0) == ({}, {})


def test_times_grow_by_default_where_nobody_chose_them() -> None:
    for method in (NTKFL(), CPNTKFL(), NTKFL(lr=0.1)):
        assert method.grows
        assert NTKFL(**method.model_dump()).grows  # as a resumed run reads it
    assert not NTKFL(steps=(100.0, 200.0)).grows
    assert not NTKFL(kernel="trace").grows
