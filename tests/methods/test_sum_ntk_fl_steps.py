"""NTK-FL from sums: how far a step goes, which steps stand, and what happens after one that does not."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from torch import Tensor, nn

from ntkfl.federation.server import ServerState
from ntkfl.methods import ClientRound, Outcome, State, SumNTKFL, Task
from ntkfl.methods.replies import Reply
from ntkfl.methods.sums.curvature_reply import trimmed_losses
from ntkfl.methods.sums.sum_ntk_fl import BACK, RELAX, bounded_gradient
from ntkfl.tangent import Flow, Sums
from ntkfl.wire import Message
from tests.methods.rounds import convolutional, play, play_rounds, pooled, small_clients, small_task
from tests.methods.test_sum_ntk_fl import Unlimited, mean_loss, step_by_dense_algebra, sums_at

CONSTANT = "0-35+35-42/constant"  # of 5-7-3, whose inputs are the samples


def sums_seen(task: Task, w: Tensor, clients: list[ClientRound], seen: list[ClientRound]) -> Sums:
    """The clients' sums at w, with the mean of the first layer's input factor over `seen` clients."""
    sums, inputs = sums_at(task, w, clients), pooled(seen)[0]
    a = torch.cat([inputs, torch.ones(len(inputs), 1).to(inputs)], 1)
    i, j = torch.triu_indices(6, 6)
    n = float(sums.arrays["samples"])
    return Sums({**sums.arrays, CONSTANT: (a.T @ a)[i, j].unsqueeze(0) * n / len(inputs)})


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
            self.server.tentative = True
        outcome, self.log = play(self.method, self.task, clients, self.server.state, self.number)
        self.server.advance(outcome)
        return outcome


def relu_task(dtype: torch.dtype) -> Task:
    """With far-off weights its outputs overflow."""
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).to(dtype), 3, "ce", label_smoothing=0.1)


@pytest.mark.parametrize(
    ("far", "values"),
    [(30.0, "float32"), (30.0, "float16"), (1e5, "float32"), (1e5, "float16"), (1e160, "float32")],
)
def test_a_step_that_raised_the_loss_is_taken_back(far: float, values: str) -> None:
    """The next one is that of the sums taken at the accepted weights, with μ and δ four times as large, and its loss
    theirs on the cohort that refused. Sums of weights too far to compute with are zeros, and count for nothing.
    """
    task, clients = relu_task(torch.float64), small_clients(30, 12, 21, 17)
    first, second = clients[:2], clients[2:]
    method = Unlimited(values=values)
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
    sums = sums_seen(task, w, first, first if overflow else clients)
    change, _ = step_by_dense_algebra(sums, method, min(L, 1), BACK)
    assert float((two.state["weights"] - w - change).norm()) <= 2 * close * float(change.norm())
    assert torch.equal(two.state["accepted"], w)
    assert two.diagnostics["mu"] == BACK * method.mu
    assert torch.equal(run.server.settled, w)  # the start: no round's weights have been accepted
    assert run.server.count == 0

    # A second time in a row: sixteen times as large, from the same sums. What clients did not send, they send later.
    three = run.play(second, bad)
    assert three.diagnostics["mu"] == BACK**2 * method.mu
    change, _ = step_by_dense_algebra(sums, method, min(L, 1), BACK**2)
    assert float((three.state["weights"] - w - change).norm()) <= 2 * close * float(change.norm())


def test_a_client_whose_derivatives_overflow_sends_its_constant_factors_later() -> None:
    task, (client,) = relu_task(torch.float32), small_clients(12, dtype=torch.float32)
    method = SumNTKFL(fisher="exact", values="float32")
    asks = {"asks": torch.tensor(1, dtype=torch.uint8)}

    def told(number: int, w: Tensor) -> Reply:
        question = Message("weights", number, {"weights": w, "accepted": task.like} | asks)
        reply = method.answer(task, question, client)
        reply.check(task)
        return reply

    lost, later, again = told(1, 1e30 * task.like), told(2, task.like), told(3, task.like)
    assert [int(m.take("fresh")) for m in (lost, later, again)] == [0, 12, 0]
    assert [bool(m.take(CONSTANT).any()) for m in (lost, later, again)] == [False, True, False]
    assert float(lost.take("losses")[0]) == 1e300
    assert torch.equal(lost.take("losses")[1:], later.take("losses")[1:])


def test_weights_that_were_taken_back_never_count_in_the_average() -> None:
    """Neither do those that nobody has accepted yet, once others take their place."""
    task, clients = small_task(), small_clients(30, 12, 21, 17)
    run = Rounds(task, SumNTKFL(fisher="exact", values="float32"))
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
        torch.testing.assert_close(run.server.settled, expected, rtol=0, atol=0)
        e = min(0.9, count / (count + 5))
        reported = e * expected + (1 - e) * outcome.state["weights"]
        torch.testing.assert_close(run.server.averaged, reported, rtol=0, atol=0)
        assert float(run.server.averaged.abs().max()) < 10
    assert count == 4
    restored = ServerState(task, run.method)
    restored.restore(run.server.checkpoint())
    assert torch.equal(restored.averaged, run.server.averaged)


def test_steps_that_stand_relax_mu_and_delta_as_far_as_the_options() -> None:
    task, clients = small_task(), small_clients(30, 12, 21)
    run = Rounds(task, Unlimited(values="float32"))
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
    method = SumNTKFL(fisher="exact", mu=0.01, delta=1e-6, values="float32")
    plain = task.like
    for _ in range(10):
        plain = plain + Flow(sums_at(task, plain, clients)).change(method.time, method.mu, method.delta)
    w = play_rounds(method, task, clients, 10)["accepted"]  # the last that a cohort accepted
    before, after, without = (float(task.losses(task.predict(v, x), y).mean()) for v in (task.like, w, plain))
    assert after < 0.9 * before
    assert without > 2 * before


def test_a_step_taken_back_is_measured_anew_only_at_other_weights() -> None:
    task, clients = convolutional()
    run = Rounds(task, SumNTKFL(fisher="exact", values="float32"))
    one = run.play(clients)
    assert {s.kind for s in run.log} == {"weights", "candidates", "sums"}
    two = run.play(clients, off(one.state["weights"], 20))
    assert two.diagnostics["taken_back"] == 1
    assert {s.kind for s in run.log} == {"weights", "sums"}
    assert two.diagnostics["mu"] == pytest.approx(BACK * float(one.diagnostics["mu"]))


# -- A minority that lies about its losses -----------------------------------------------------------------------------

LIES = [(0.0, 1e300), (1e300, 0.0), (1e300, 1e300), (0.0, 0.0), (9e299, 1e300), (1e-30, 1e-30)]


def round_with_a_liar(task: Task, clients: list[ClientRound], state: State, lie: tuple[float, float]) -> Outcome:
    method = SumNTKFL(fisher="exact", values="float32")
    conversation = method.round(task, state, 2, range(5))
    question = next(conversation)
    assert isinstance(question, Message)
    replies = [method.answer(task, question, client) for client in clients]
    replies[-1].arrays["losses"] = torch.tensor(lie, dtype=torch.float64)
    replies[-1].check(task)
    with pytest.raises(StopIteration) as end:
        conversation.send(replies)
    outcome: Outcome = end.value.value
    return outcome


@pytest.mark.parametrize("lie", LIES)
def test_one_of_five_neither_takes_a_good_step_back_nor_saves_a_bad_one(lie: tuple[float, float]) -> None:
    task, clients = small_task(), small_clients(20, 20, 20, 20, 20)
    good = play(SumNTKFL(fisher="exact", values="float32"), task, clients)[0].state
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
        n = torch.tensor(samples, dtype=torch.float64)
        return trimmed_losses(n.unsqueeze(1) * torch.tensor(pairs, dtype=torch.float64), n).tolist()

    # Growths 2, 0.5, 1, 3 and 0.1: the last two are out.
    pairs = ((2.0, 1.0), (1.0, 2.0), (3.0, 3.0), (9.0, 3.0), (0.1, 1.0))
    assert means(*pairs) == pytest.approx([(2 + 1 + 3) / 3, (1 + 2 + 3) / 3])
    assert means(*pairs, samples=(10, 30, 20, 5, 5)) == pytest.approx([(20 + 30 + 60) / 60, (10 + 60 + 60) / 60])
    assert means((2.0, 1.0), (1.0, 2.0), samples=(10, 30)) == pytest.approx([(20 + 30) / 40, (10 + 60) / 40])
    # (1e300, 1e300) is in the middle; it counts as (20, 20), ten medians.
    many = (2.0, 1.0), (1.0, 2.0), (1e300, 1e300), (9.0, 3.0), (0.1, 1.0)
    assert means(*many) == pytest.approx([(2 + 1 + 20) / 3, (1 + 2 + 20) / 3])


# -- A minority whose gradient moves the weights far -------------------------------------------------------------------

HOW = (200.0, 12.0, 0.003)  # t, μ, δ


def five_parts(task: Task) -> tuple[Flow, list[Tensor], Tensor]:
    """The flow of five clients of 20 samples, the gradients they add to it, and their samples."""
    parts = [sums_at(task, task.like, [client]) for client in small_clients(20, 20, 20, 20, 20)]
    whole = functools.reduce(operator.add, parts)
    samples = torch.stack([part.arrays["samples"] for part in parts])
    return Flow(whole), [part.arrays["gradient"] for part in parts], samples


def own_steps(flow: Flow, gradients: list[Tensor], samples: Tensor) -> Tensor:
    return torch.stack([flow.driven_by(g / n).change(*HOW) for g, n in zip(gradients, samples, strict=True)])


def test_longer_steps_are_cut_to_the_median_and_others_are_not_touched() -> None:
    flow, gradients, samples = five_parts(small_task())
    mean, clipped = bounded_gradient(flow, gradients, samples, 1e6, *HOW)
    assert torch.allclose(mean, torch.stack(gradients).sum(0) / 100, rtol=1e-12, atol=1e-15)
    assert clipped == 0
    gradients[3] = -40 * gradients[3]
    steps = own_steps(flow, gradients, samples)
    lengths = steps.norm(dim=1)
    assert torch.allclose(flow.step_lengths([g / 20 for g in gradients], *HOW), lengths, rtol=1e-12)
    most = 1.5 * lengths.sort().values[2]
    expected = (steps * (most / lengths).clamp(max=1).unsqueeze(1)).mean(0)
    limited, clipped = bounded_gradient(flow, gradients, samples, 1.5, *HOW)
    assert clipped == int((lengths > most).sum()) >= 1
    assert float((flow.driven_by(limited).change(*HOW) - expected).norm()) <= 1e-12 * float(expected.norm())
    assert (
        bounded_gradient(flow, gradients[2:4], samples[2:4], 1.5, *HOW)[1] == 0
    )  # of two clients none is the majority


def test_samples_count_for_no_more_than_the_limit() -> None:
    flow, gradients, samples = five_parts(small_task())
    gradients[0], samples[0] = 10 * gradients[0], 10 * samples[0]  # the same ten times over
    limited, clipped = bounded_gradient(flow, gradients, samples, 1.5, *HOW)
    steps = own_steps(flow, gradients, samples)
    factors = (1.5 * steps.norm(dim=1).sort().values[2] / steps.norm(dim=1)).clamp(max=1)
    counted = torch.tensor([30.0, 20, 20, 20, 20], dtype=torch.float64)
    expected = ((counted * factors).unsqueeze(1) * steps).sum(0) / counted.sum()
    assert clipped >= 1
    assert float((flow.driven_by(limited).change(*HOW) - expected).norm()) <= 1e-12 * float(expected.norm())


@pytest.mark.parametrize("kind", ["sign-flip", "random"])
def test_one_of_five_decides_without_a_limit_and_not_with_one(kind: str) -> None:
    def step(method: SumNTKFL, scale: float) -> tuple[Tensor, dict[str, float | str]]:
        """A round's change of the weights, where the last of five clients is Byzantine."""
        task, clients = small_task(), small_clients(20, 20, 20, 20, 20)
        conversation = method.round(task, method.start(task, task.like), 1, range(5))
        question = next(conversation)
        assert isinstance(question, Message)
        replies = [method.answer(task, question, client) for client in clients]
        true = replies[4].vector("gradient", task.like)
        noise = torch.randn(true.shape, generator=torch.Generator().manual_seed(0)).to(true)
        false = -true if kind == "sign-flip" else true.norm() / noise.norm() * noise
        with pytest.raises(StopIteration) as end:
            conversation.send([*replies[:4], replies[4].with_vectors({"gradient": scale * false})])
        return end.value.value.state["weights"] - task.like, end.value.value.diagnostics

    flow, gradients, samples = five_parts(small_task())
    # Four of five are honest, so the median step is at most their longest: a mean of five that are each within 1.5
    # medians is too.
    most = 1.5 * float(own_steps(flow, gradients[:4], samples[:4]).norm(dim=1).max())
    honest = float(step(Unlimited(), 1e-9)[0].norm())
    # The bound on what a step's model promises shortens it, too.
    assert float(step(Unlimited(), 100.0)[0].norm()) > max(most, 5 * honest)
    kept, told = step(SumNTKFL(fisher="exact"), 100.0)
    assert float(kept.norm()) <= most * (1 + 1e-3)
    assert int(told["clipped_clients"]) >= 1
