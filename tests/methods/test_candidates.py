"""NTK-FL's candidates and rows: bytes, that coding them hardly moves the choice, who chooses, what bounds do."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

import ntkfl
from ntkfl.errors import MessageError
from ntkfl.methods import CPNTKFL, NTKFL, ClientRound, FedAvg, Method, Robust, SumNTKFL, Task
from ntkfl.methods.ntk_fl import (
    MOST_CANDIDATES,
    CandidateLosses,
    TangentRows,
    candidates_question,
    choose,
    gather,
    residual_left,
    unpack_candidates,
)
from ntkfl.methods.robust import median, trimmed_mean
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.settings import Privacy
from ntkfl.wire.message import Message
from tests.methods.rounds import Whole, ask, one_weight, play, scalar_client, small_clients, small_task


@pytest.fixture(scope="module")
def digits() -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=40, alpha=0.3), seed=10)


class Exact(Whole):
    tolerance: ClassVar[float] = NTKFL.tolerance


def run(fed: ntkfl.data.Federated, method: Method, **options: Any) -> ntkfl.Run:
    torch.manual_seed(0)
    inputs = options["privacy"].projected_dim if "privacy" in options else 64
    return ntkfl.train(ntkfl.models.mlp(inputs, 32, 10), fed, method, clients_per_round=8, callbacks=[], **options)


# What candidates cost, and what coding them changes.


@pytest.mark.parametrize(
    ("method", "privacy", "times"),
    [
        (NTKFL(), {}, 3.6),
        (CPNTKFL(), {"privacy": Privacy(projected_dim=40, projection="gaussian")}, 3.6),
        (SumNTKFL(), {}, 2),
        (SumNTKFL(largest=50), {}, 2),
    ],
    ids=["ntk-fl", "cp-ntk-fl", "sum-ntk-fl", "measured"],
)
def test_a_round_sends_clients_a_few_times_what_fedavg_does(
    digits: ntkfl.data.Federated, method: Method, privacy: dict[str, Any], times: float
) -> None:
    """Counted off encoded messages. Candidates are ten bytes a weight beside the four of w; sums send the accepted
    weights from the second round on, and a step to measure.
    """
    ours = run(digits, method, rounds=2, **privacy).history[-1]
    averaging = run(digits, FedAvg(local_steps=1), rounds=1, **privacy).history[-1]
    assert ours["downlink_bytes"] <= times * averaging["downlink_bytes"]


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
    exact, sent = asked[0].take("weights", None, task.like), unpack_candidates(asked[1], task.like)
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    losses, approximate = (task.candidate_losses(some, x, y).mean(1) for some in (exact, sent))
    assert float((approximate / losses - 1).abs().max()) < 0.02
    assert coded[0].steps == whole[0].steps
    torch.testing.assert_close(coded[0].state["weights"], whole[0].state["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 3, 15])
def test_beyond_four_directions_the_smallest_are_lost(count: int) -> None:
    """In four directions only float16 is: half a unit of the eleventh binary digit of the largest number."""
    draws = torch.Generator().manual_seed(0)
    scales = 3.0 ** -torch.arange(count).double()
    around = (torch.randn(count, count, generator=draws).double() * scales) @ torch.randn(
        count, 500, generator=draws
    ).double()
    candidates = torch.randn(500, generator=draws).double() + around
    got = unpack_candidates(Message.decode(candidates_question(1, candidates).encode()), candidates[0])
    lost = torch.linalg.svdvals(candidates - candidates[-1])[4:].square().sum().sqrt()
    rounding = 2.0**-11 * float(candidates.abs().max() + (candidates - candidates[-1]).norm(dim=1).max())
    assert float((got - candidates).norm()) <= float(lost) + rounding * candidates.numel() ** 0.5


def test_candidates_that_are_refused() -> None:
    question = candidates_question(1, torch.randn(6, 100))
    for changed, why in (
        ({"directions": torch.zeros(5, 100), "coordinates": torch.zeros(6, 5)}, "more than can be sent"),
        ({"directions": torch.zeros(4, 101)}, "directions"),
        ({"coordinates": torch.zeros(MOST_CANDIDATES + 1, 4)}, "more than can be sent"),
        ({"coordinates": torch.zeros(0, 4)}, "more than can be sent"),
        ({"coordinates": torch.full((6, 4), float("nan"))}, "not finite"),
        ({"last": torch.zeros(99)}, "last"),
    ):
        with pytest.raises(MessageError, match=why):
            unpack_candidates(Message("candidates", 1, dict(question.arrays) | changed), torch.zeros(100))


# Who chooses.


def reports(*losses: list[float], shuffled: bool = False) -> list[CandidateLosses]:
    """What clients of one sample report, as the server parses it."""
    task = small_task(privacy=Privacy(shuffle=shuffled))
    counted = {} if shuffled else {"samples": torch.tensor(1)}
    rows = [{"losses": torch.tensor([row]).double()} | counted for row in losses]
    return [CandidateLosses.parse(Message("rows", 1, one), task) for one in rows]


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


@pytest.mark.parametrize("samples", [0, -1, 2**31, 1e30, None])
def test_losses_of_no_samples_or_too_many_are_refused(samples: float | None) -> None:
    """A count may come as any type: one beyond int64 must not end the round with an error of its own."""
    counted = {} if samples is None else {"samples": torch.tensor(samples)}
    with pytest.raises(MessageError, match="samples"):
        CandidateLosses.parse(Message("rows", 1, {"losses": torch.ones(1, 2)} | counted), small_task())


def test_through_a_shuffler_nobody_counts_for_many_samples() -> None:
    reply = {"losses": torch.ones(1, 2), "samples": torch.tensor(9)}
    with pytest.raises(MessageError, match="samples"):
        CandidateLosses.parse(Message("rows", 1, reply), small_task(privacy=Privacy(shuffle=True)))


@pytest.mark.parametrize("losses", [[-1.0, 1.0], [1.0, 1e31]])
def test_losses_that_no_sample_can_have_are_refused(losses: list[float]) -> None:
    with pytest.raises(MessageError, match="a loss below zero, or above"):
        reports(losses, shuffled=True)


# Times that are too short.


def test_too_short_times_are_warned_of(digits: ntkfl.data.Federated) -> None:
    fixed = run(digits, NTKFL(steps=(0.5, 1.0)), rounds=2).history
    assert [r["steps"] for r in fixed] == [1, 1]
    assert all("the longest candidate, t = 1, was chosen" in r["warning"] for r in fixed)
    assert not any("warning" in r for r in run(digits, NTKFL(), rounds=2).history)


def test_the_residual_left_is_that_of_a_linear_flow() -> None:
    """One sample of f = w x with mse: r(t) = r(0) e^(−ηx²t), whose mean up to t is r(0) (1 − e^(−ηx²t)) / (ηx²t)."""
    method = Whole(loss="mse", lr=0.1)
    task, client = one_weight(0.3), scalar_client(0, 2.0, 1.0)
    rows = gather(task, [ask(method, task, client)], 1)
    for t in (5.0, 20.0):
        left = residual_left(method.evolve(task, rows, (1e-3, t)))
        assert left == pytest.approx(-math.expm1(-0.4 * t) / (0.4 * t), rel=1e-3)


# Bounds on rows.


def uploads(task: Task, *sizes: int) -> list[TangentRows]:
    return [ask(NTKFL(), task, client) for client in small_clients(*sizes)]  # type: ignore[misc]


def test_long_rows_are_scaled_to_the_bound() -> None:
    task = small_task(robust=Robust(row_clip=2.0))
    (upload,) = uploads(task, 9)
    J = upload.J.dense()
    upload.J = upload.J.scaled(torch.tensor([1.0] * 8 + [50.0]))
    middle = float(median(upload.J.norms()))
    found = gather(task, [upload], 1)
    assert found.bounded["clipped_rows"] == 1
    norms = found.J.dense().flatten(1).norm(dim=1)
    assert float(norms[8]) == pytest.approx(2 * middle)
    assert torch.allclose(found.J.dense()[8] / norms[8], J[8] / J[8].norm())
    assert gather(small_task(robust=Robust(row_clip=100.0)), uploads(task, 9), 1).bounded == {}


def test_a_client_with_far_more_rows_than_the_others_counts_for_one_and_a_half() -> None:
    task = small_task(robust=Robust(row_clip=100.0))
    rows, same, other = (gather(task, uploads(task, 8, 8, 8, 200), number) for number in (3, 3, 4))
    assert len(rows.y) == 8 + 8 + 8 + 12
    assert rows.bounded["surplus_rows"] == 188
    assert torch.equal(rows.f0, same.f0)  # drawn by the number of the round
    assert not torch.equal(rows.f0, other.f0)
    assert len(gather(small_task(), uploads(task, 8, 8, 8, 200), 1).y) == 8 + 8 + 8 + 200
