"""NTK-FL from sums: how far a step goes, which steps stand, and what happens after one that does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ntkfl.federation.server_state import ServerState
from ntkfl.methods import ClientRound, Outcome, State, SumNTKFL, Task
from ntkfl.methods.robust_sums import ClientSums, trimmed_losses
from ntkfl.methods.sum_ntk_fl import BACK, RELAX
from ntkfl.tangent import Flow, Sums, curvature_sums
from ntkfl.tangent.curvature import step_curvature
from ntkfl.tangent.losses import per_sample
from ntkfl.wire import Message
from tests.methods.rounds import convolutional, play, play_rounds, pooled, small_clients, small_task
from tests.tangent.test_curvature import blocks

CONSTANT = "0-35+35-42/constant"  # of 5-7-3, whose inputs are the samples


def sums_at(task: Task, w: Tensor, clients: list[ClientRound], seen: list[ClientRound] | None = None) -> Sums:
    """The clients' sums at w; with the mean of the first layer's input factor over `seen` clients."""
    x, y = pooled(clients)
    sums = curvature_sums(task.at(w), x, task.training_targets(y), task.loss, task.plan(x))
    if seen is None:
        return sums
    inputs = pooled(seen)[0]
    a = torch.cat([inputs, torch.ones(len(inputs), 1).to(inputs)], 1)
    i, j = torch.triu_indices(6, 6)
    return Sums({**sums.arrays, CONSTANT: (a.T @ a)[i, j].unsqueeze(0) * len(x) / len(inputs)})


def dense(sums: Sums) -> tuple[Tensor, Tensor]:
    """The mean gradient [d], and A ⊗ G of all layers as one matrix [d, d]."""
    g = sums.arrays["gradient"] / sums.arrays["samples"]
    C = torch.zeros(len(g), len(g)).to(g)
    for shaped in sums.layers():
        for columns, kronecker in blocks(sums, shaped):
            C[columns.unsqueeze(1), columns] = kronecker.to(g)
    return g, C


def step_by_dense_algebra(sums: Sums, method: SumNTKFL, unit: float, times: float = 1.0) -> tuple[Tensor, float]:
    """(−s φ(t(μC + δ)) g with μ ΔᵀCΔ ≤ 2 `unit`, s), with `times` μ and δ and a bound as much smaller."""
    g, C = dense(sums)
    mu, delta = times * method.mu, times * method.delta
    values, vectors = torch.linalg.eigh(mu * C + delta * torch.eye(len(g)).to(g))
    assert method.time is not None
    phi = -torch.expm1(-method.time * values) / values
    change = -vectors @ (phi * (vectors.T @ g))
    s = min(1.0, math.sqrt(2 * unit / times / float(mu * change @ C @ change)))
    return s * change, s


def mean_loss(task: Task, w: Tensor, clients: list[ClientRound]) -> float:
    x, y = pooled(clients)
    return float(per_sample(task.loss, task.predict(w, x), task.training_targets(y)).mean())


@pytest.mark.parametrize(
    ("loss", "larger", "mu", "short"),
    [
        ("ce", 1.0, 12.0, False),
        ("ce", 1.0, 0.02, True),
        ("ce", 30.0, 0.02, True),  # a loss far above 1 nat, and the bound stays at that
        ("mse", 1.0, 12.0, False),
        ("mse", 1.0, 0.05, True),
        ("mse", 30.0, 0.05, True),  # and here there is no unit: twice the loss, however large
    ],
)
def test_a_step_is_shortened_until_its_model_promises_no_loss_below_zero(
    loss: str, larger: float, mu: float, short: bool
) -> None:
    task, clients = small_task(loss), small_clients(30, 12, 21)
    method = SumNTKFL(loss=loss, mu=mu, delta=1e-4, label_smoothing=0, values="float32", step_limit=0)
    w = larger * task.like
    L = mean_loss(task, w, clients)
    assert larger == 1 or L > 2
    change, s = step_by_dense_algebra(sums_at(task, w, clients), method, L if loss == "mse" else min(L, 1))
    assert (s < 0.95) == short
    assert s == 1 or short
    outcome, _ = play(method, task, clients, method.start(task, w))
    assert float((outcome.state["weights"] - w - change).norm()) <= 1e-8 * float(change.norm())
    assert outcome.train_loss == pytest.approx(L, rel=1e-12)
    assert "taken_back" not in outcome.diagnostics


# -- Taken back ------------------------------------------------------------------------------------------------------


def off(w: Tensor, by: float) -> Tensor:
    return w + by * torch.randn(len(w), generator=torch.Generator().manual_seed(1)).to(w)


class Rounds:
    """A method played round by round, with the running average that a server reports."""

    def __init__(self, task: Task, method: SumNTKFL) -> None:
        self.task, self.method, self.server, self.number = task, method, ServerState(task, method), 0

    def play(self, clients: list[ClientRound], proposed: Tensor | None = None) -> Outcome:
        """A round; with other weights than those that the last one proposed."""
        self.number += 1
        if proposed is not None:
            self.server.state = {**self.server.state, "weights": proposed}
            self.server.average.tentative = proposed
        outcome, self.log = play(self.method, self.task, clients, self.server.state, self.number)
        self.server.advance(outcome)
        return outcome


def relu_task(dtype: torch.dtype) -> Task:
    """With far-off weights its outputs overflow."""
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).to(dtype), 3, "ce", label_smoothing=0.1)


@pytest.mark.parametrize("values", ["float32", "float16"])
@pytest.mark.parametrize("far", [30.0, 1e5, 1e160], ids=["far", "very far", "overflow"])
def test_a_step_that_raised_the_loss_is_taken_back(far: float, values: str) -> None:
    """The next one is that of the sums taken at the accepted weights, with μ and δ four times as large, and its loss
    theirs on the cohort that refused. Sums of weights too far to compute with are zeros, and count for nothing.
    """
    task, clients = relu_task(torch.float64), small_clients(30, 12, 21, 17)
    first, second = clients[:2], clients[2:]
    method = SumNTKFL(values=values, step_limit=0)
    run = Rounds(task, method)
    one = run.play(first)
    w, proposed = task.like, one.state["weights"]
    assert torch.equal(one.state["accepted"], w)
    bad = off(w, far * float((proposed - w).norm()))
    two = run.play(second, bad)
    assert two.diagnostics["taken_back"] == 1
    overflow = far > 1e100
    losses = torch.stack([s.message.take("losses") for s in run.log if s.way == "up"])
    assert bool((losses[:, 0] == 1e300).all()) == overflow
    told = [s.message for s in run.log if s.way == "up"]
    for name in told[0].arrays:
        if overflow and ("/" in name or name == "gradient"):
            assert not any(bool(message.take(name).any()) for message in told)
    assert [int(m.take("fresh")) for m in told] == [0 if overflow else len(c) for c in second]
    # Halves round the weights at which sums are taken by 2⁻¹², and the sums too.
    close = 1e-6 if values == "float32" else 1e-2
    L = mean_loss(task, w, second)
    assert two.train_loss == pytest.approx(L, rel=close)
    sums = sums_at(task, w, first, first if overflow else clients)
    change, _ = step_by_dense_algebra(sums, method, min(L, 1), BACK)
    assert float((two.state["weights"] - w - change).norm()) <= 2 * close * float(change.norm())
    assert torch.equal(two.state["accepted"], w)
    assert two.diagnostics["mu"] == BACK * method.mu
    assert torch.equal(run.server.average.settled, w)  # the start: no round's weights have been accepted
    assert run.server.average.count == 0

    # A second time in a row: sixteen times as large, from the same sums. What clients did not send, they send later.
    three = run.play(second, bad)
    assert three.diagnostics["mu"] == BACK**2 * method.mu
    change, _ = step_by_dense_algebra(sums, method, min(L, 1), BACK**2)
    assert float((three.state["weights"] - w - change).norm()) <= 2 * close * float(change.norm())


def test_a_client_whose_derivatives_overflow_sends_its_constant_factors_later() -> None:
    task, (client,) = relu_task(torch.float32), small_clients(12, dtype=torch.float32)
    method = SumNTKFL(values="float32")
    asks = {"asks": torch.tensor(1, dtype=torch.uint8)}

    def told(number: int, w: Tensor) -> Message:
        (reply,) = method.answer(
            task, Message("weights", number, {"weights": w, "accepted": task.like} | asks), [client]
        )
        method.check(task, reply)
        return reply

    lost, later, again = told(1, 1e30 * task.like), told(2, task.like), told(3, task.like)
    assert [int(m.take("fresh")) for m in (lost, later, again)] == [0, 12, 0]
    assert [bool(m.take(CONSTANT).any()) for m in (lost, later, again)] == [False, True, False]
    assert float(lost.take("losses")[0]) == 1e300
    assert torch.equal(lost.take("losses")[1:], later.take("losses")[1:])


def test_weights_that_were_taken_back_never_count_in_the_average() -> None:
    """Neither do those that nobody has accepted yet, once others take their place."""
    task, clients = small_task(), small_clients(30, 12, 21, 17)
    run = Rounds(task, SumNTKFL(values="float32"))
    accepted, expected, count = list[Tensor](), task.like, 0
    for number in range(1, 9):
        bad = None if number not in (3, 4, 7) else off(run.server.state["weights"], 20)
        before = run.server.state["weights"]
        outcome = run.play(clients[:3] if number % 2 else clients[1:], bad)
        assert ("taken_back" in outcome.diagnostics) == (bad is not None)
        if bad is None and number > 1:
            accepted.append(before)
            e = min(0.9, count / (count + 5))
            expected, count = e * expected + (1 - e) * before, count + 1
        torch.testing.assert_close(run.server.average.settled, expected, rtol=0, atol=0)
        e = min(0.9, count / (count + 5))
        reported = e * expected + (1 - e) * outcome.state["weights"]
        torch.testing.assert_close(run.server.average.value, reported, rtol=0, atol=0)
        assert float(run.server.average.value.abs().max()) < 10
    assert count == 4
    restored = ServerState(task, run.method)
    restored.restore(run.server.checkpoint())
    assert torch.equal(restored.average.value, run.server.average.value)


def test_steps_that_stand_relax_mu_and_delta_as_far_as_the_options() -> None:
    task, clients = small_task(), small_clients(30, 12, 21)
    run = Rounds(task, SumNTKFL(values="float32", step_limit=0))
    run.play(clients)
    found = [run.play(clients, off(task.like, 20)).diagnostics["mu"]]
    for _ in range(5):
        outcome = run.play(clients)
        assert "taken_back" not in outcome.diagnostics
        found.append(outcome.diagnostics["mu"])
    assert found == pytest.approx([12 * max(1.0, BACK / RELAX**k) for k in range(6)])
    sums = sums_at(task, run.server.state["accepted"], clients)
    change, _ = step_by_dense_algebra(sums, run.method, min(1, mean_loss(task, run.server.state["accepted"], clients)))
    moved = run.server.state["weights"] - run.server.state["accepted"]
    assert float((moved - change).norm()) <= 1e-6 * float(change.norm())  # δ is the option's again as well


def test_without_step_control_training_would_diverge() -> None:
    """μ and δ a thousand times too small: the bound and taking back make up for it."""
    task, clients = small_task(), small_clients(30, 12, 21)
    x, y = pooled(clients)
    method = SumNTKFL(mu=0.01, delta=1e-6, values="float32")
    plain = task.like
    for _ in range(10):
        plain = plain + Flow(sums_at(task, plain, clients)).change(method.time, method.mu, method.delta)
    w = play_rounds(method, task, clients, 10)["accepted"]  # the last that a cohort accepted
    before, after, without = (float(task.losses(task.predict(v, x), y).mean()) for v in (task.like, w, plain))
    assert after < 0.9 * before
    assert without > 2 * before


# -- A minority that lies about its losses -----------------------------------------------------------------------------

LIES = [(0.0, 1e300), (1e300, 0.0), (1e300, 1e300), (0.0, 0.0), (9e299, 1e300), (1e-30, 1e-30)]


def round_with_a_liar(task: Task, clients: list[ClientRound], state: State, lie: tuple[float, float]) -> Outcome:
    method = SumNTKFL(values="float32")
    conversation = method.round(task, state, 2, range(5))
    asked = next(conversation)
    assert isinstance(asked, Message)
    replies = method.answer(task, asked, clients)
    lying = {**replies[-1].arrays, "losses": torch.tensor(lie, dtype=torch.float64)}
    replies[-1] = Message("update", 2, lying)
    method.check(task, replies[-1])
    with pytest.raises(StopIteration) as end:
        conversation.send(replies)
    outcome: Outcome = end.value.value
    return outcome


@pytest.mark.parametrize("lie", LIES)
def test_one_of_five_neither_takes_a_good_step_back_nor_saves_a_bad_one(lie: tuple[float, float]) -> None:
    task, clients = small_task(), small_clients(20, 20, 20, 20, 20)
    method = SumNTKFL(values="float32")
    good = play(method, task, clients)[0].state
    bad = {**good, "weights": off(good["weights"], 20)}
    honest = max(mean_loss(task, task.like, [c]) for c in clients)
    kept = round_with_a_liar(task, clients, good, lie)
    assert "taken_back" not in kept.diagnostics
    assert kept.train_loss is not None
    assert 0 <= kept.train_loss <= 10 * honest
    assert round_with_a_liar(task, clients, bad, lie).diagnostics["taken_back"] == 1


def test_losses_are_compared_without_the_clients_at_either_end() -> None:
    """By how much a client's loss grew, and weighed by samples; one that drowns all others is bounded."""

    def means(*pairs: tuple[float, float], samples: tuple[int, ...] = (10, 10, 10, 10, 10)) -> list[float]:
        clients = [
            ClientSums(torch.zeros(1), torch.tensor(float(n)), n * torch.tensor(pair, dtype=torch.float64))
            for n, pair in zip(samples, pairs, strict=True)
        ]
        return trimmed_losses(clients).tolist()

    # Growths 2, 0.5, 1, 3 and 0.1: the last two are out.
    pairs = ((2.0, 1.0), (1.0, 2.0), (3.0, 3.0), (9.0, 3.0), (0.1, 1.0))
    assert means(*pairs) == pytest.approx([(2 + 1 + 3) / 3, (1 + 2 + 3) / 3])
    assert means(*pairs, samples=(10, 30, 20, 5, 5)) == pytest.approx([(20 + 30 + 60) / 60, (10 + 60 + 60) / 60])
    assert means((2.0, 1.0), (1.0, 2.0), samples=(10, 30)) == pytest.approx([(20 + 30) / 40, (10 + 60) / 40])
    # (1e300, 1e300) is in the middle; it counts as (20, 20), ten medians.
    many = (2.0, 1.0), (1.0, 2.0), (1e300, 1e300), (9.0, 3.0), (0.1, 1.0)
    assert means(*many) == pytest.approx([(2 + 1 + 20) / 3, (1 + 2 + 20) / 3])


# -- μ is measured where factors are rough -----------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [1.0, 1e-3, 1e4])
def test_mu_is_measured_where_positions_share_weights(mu: float) -> None:
    """μ is what the step's own curvature is to that of the factored form, with one more exchange of one number."""
    task, clients = convolutional()
    method = SumNTKFL(values="float32", mu=mu, step_limit=0)
    outcome, log = play(method, task, clients)
    assert [s.kind for s in log if s.client == 0] == ["weights", "update", "candidates", "losses"]
    assert all(s.size < 100 for s in log if s.kind == "losses")
    d = task.like.numel()
    assert all(s.size < 8 * 2 * d + 200 for s in log if s.kind == "candidates")
    x, y = pooled(clients)
    sums = curvature_sums(task.at(task.like), x, task.training_targets(y), "ce", task.plan(x))
    change = next(s.message for s in log if s.kind == "candidates").take("change")
    L = min(1.0, mean_loss(task, task.like, clients))
    expected, s = step_by_dense_algebra(sums, method, L)
    assert float((change - expected).norm()) <= 1e-7 * float(change.norm())
    assert (s < 1) == (mu < 1)
    _, C = dense(sums)
    met = float(step_curvature(task.at(task.like), x, task.training_targets(y), change, "ce", task.plan(x)))
    ratio = met / len(x) / float(change @ C @ change)
    assert outcome.diagnostics["mu"] == pytest.approx(max(mu, ratio), rel=1e-7)
    assert (ratio > 2 * mu) == (mu <= 1)  # what a fixed one lacks here
    again = method.model_copy(update={"mu": max(mu, ratio)})
    expected, _ = step_by_dense_algebra(sums, again, L)
    moved = outcome.state["weights"] - task.like
    assert float((moved - expected).norm()) <= 1e-6 * float(moved.norm())
    assert float(outcome.state["mu"]) == outcome.diagnostics["mu"]  # from which the next round starts


def test_mu_is_not_measured_where_factors_are_whole_and_positions_share_nothing() -> None:
    def kinds(**options: Any) -> list[str]:
        _, log = play(SumNTKFL(**options), small_task(), small_clients(9))
        return [s.kind for s in log if s.way == "up"]

    assert kinds() == ["update"]
    assert kinds(largest=5) == ["update", "losses"]  # sketches lose curvature, too


def test_a_step_taken_back_is_measured_anew_only_at_other_weights() -> None:
    task, clients = convolutional()
    run = Rounds(task, SumNTKFL(values="float32"))
    one = run.play(clients)
    two = run.play(clients, off(one.state["weights"], 20))
    assert two.diagnostics["taken_back"] == 1
    assert {s.kind for s in run.log} == {"weights", "update"}
    assert two.diagnostics["mu"] == pytest.approx(BACK * float(one.diagnostics["mu"]))
