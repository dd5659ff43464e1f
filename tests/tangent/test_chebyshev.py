"""Steps of the stabilised method: its order, its stability, and the same on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ntkfl.tangent.chebyshev import GraphStepper, Stepper, stepper


def circle(y: Tensor) -> Tensor:
    """A field that is neither linear nor symmetric."""
    return torch.stack([-y[1] - 0.1 * y[0] ** 3, y[0] - y[1] ** 2])


def advance(own: Stepper, y: Tensor, h: float, steps: int, stages: int) -> Tensor:
    for _ in range(steps):
        y = own.step(y, own.evaluate(y), h, stages)
    return y


@pytest.mark.parametrize("stages", [2, 3, 7, 20])
def test_second_order(stages: int) -> None:
    start = torch.tensor([0.4, -0.2], dtype=torch.float64)
    own = Stepper(circle)
    exact = advance(own, start, 1 / 2048, 2048, 4)
    errors = [float((advance(own, start, 1 / n, n, stages) - exact).norm()) for n in (16, 32)]
    assert 1.8 < math.log2(errors[0] / errors[1]) < 2.3


@pytest.mark.parametrize("stages", [3, 10, 60])
def test_stable_up_to_the_bound_it_promises(stages: int) -> None:
    """Along the whole negative axis up to (s² − 1)/1.54 nothing grows; well beyond it something does."""
    rates = torch.linspace(0, (stages**2 - 1) / 1.54, 500, dtype=torch.float64)
    y = torch.ones_like(rates)
    own = Stepper(lambda v: -rates * v)
    after = own.step(y, own.evaluate(y), 1.0, stages)
    assert after.abs().max() <= 1 + 1e-9
    far = Stepper(lambda v: -1.4 * rates * v)
    assert far.step(y, far.evaluate(y), 1.0, stages).abs().max() > 1.5


def test_evaluations_are_counted() -> None:
    own = stepper(circle, torch.zeros(2, dtype=torch.float64))
    own.step(torch.ones(2, dtype=torch.float64), own.evaluate(torch.ones(2, dtype=torch.float64)), 0.1, 9)
    assert own.evaluations == 1 + 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("stages", [2, 3, 8])
def test_a_graph_gives_the_same(stages: int) -> None:
    start = torch.tensor([0.4, -0.2], dtype=torch.float64, device="cuda")
    graph = stepper(circle, start)
    assert isinstance(graph, GraphStepper)
    plain = Stepper(circle)
    assert (advance(graph, start, 0.1, 5, stages) - advance(plain, start, 0.1, 5, stages)).abs().max() < 1e-14
    assert graph.evaluations == plain.evaluations


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_field_that_no_graph_holds_runs_plainly() -> None:
    start = torch.ones(2, dtype=torch.float64, device="cuda")
    own = stepper(lambda y: y * float(y.sum()), start)
    assert type(own) is Stepper
    assert torch.equal(own.evaluate(start), 2 * start)


def devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Called:
    """In place of a graph, where there is no GPU: what would be replayed is called."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


@pytest.mark.parametrize("device", [*devices(), "graphs that are called"])
def test_an_attempt_is_a_step_and_the_norms_of_its_estimate(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = torch.tensor([0.4, -0.2], dtype=torch.float64, device="cuda" if device == "cuda" else "cpu")
    own, plain, h = stepper(circle, start), Stepper(circle), 0.3
    if device == "graphs that are called":
        monkeypatch.setattr("ntkfl.tangent.chebyshev.capture", lambda device, *work: [Called(piece) for piece in work])
        own = GraphStepper(circle, start)
    for stages in (2, 3, 8):  # once more than once: a graph's tables are used again
        slope = plain.evaluate(start)
        made = own.attempt(start, slope, h, stages)
        state = plain.step(start, slope, h, stages)
        after = plain.evaluate(state)
        assert (made.state - state).abs().max() < 1e-14
        assert (made.slope - after).abs().max() < 1e-14
        assert (own.step(start, slope, 2 * h, stages) - plain.step(start, slope, 2 * h, stages)).abs().max() < 1e-14
        estimate = 0.8 * (start - state) + 0.4 * h * (slope + after)
        wanted = [float(v.norm()) for v in (estimate, start, state, slope, after)]
        assert list(made[2:]) == pytest.approx(wanted, rel=1e-9)
        start = made.state
    assert own.evaluations == plain.evaluations - 3  # the slopes that were given
