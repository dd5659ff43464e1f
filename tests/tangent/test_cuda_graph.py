"""A recorded step does what the step does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ntkfl.methods.base import ClientRound, Task
from ntkfl.methods.local_sgd import train_locally
from ntkfl.methods.stateful_sgd import Adjustment
from ntkfl.tangent.cuda_graph import WORTH, recordable, repeated, replayed
from tests.methods.rounds import DIMENSIONS, small_clients

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


class OwnLinear(nn.Linear):
    """The same arithmetic in a class that is not PyTorch's, and so is never recorded."""


@pytest.mark.parametrize("times", [1, WORTH, 50])
@pytest.mark.parametrize("device", DEVICES)
def test_every_call_is_one_step(device: str, times: int) -> None:
    x, before = torch.zeros(3, device=device), torch.zeros(3, device=device)

    def step() -> None:
        before.copy_(x)
        x.mul_(2).add_(1)

    take = repeated(step, times, x.device)
    for i in range(times):
        if i == 4:
            x.fill_(0)  # what is changed between calls is seen by the next
        take()
    expected = 0
    for i in range(times):
        last = 0 if i == 4 else expected
        expected = 2 * last + 1
    assert x.tolist() == pytest.approx([expected] * 3, rel=1e-6)
    assert before.tolist() == pytest.approx([last] * 3, rel=1e-6)


def test_without_a_device_nothing_is_recorded() -> None:
    def step() -> None:
        raise AssertionError

    assert repeated(step, 100, torch.device("cpu")) is step


def test_only_known_layers_are_recorded() -> None:
    assert recordable(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU()))
    assert not recordable(nn.Sequential(OwnLinear(4, 3)))


@needs_cuda
@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize(
    ("sizes", "steps", "batch"),
    [((12, 12), 20, 50), ((20, 3, 31), 20, 8), ((20, 9, 31), (7, 20, 2), 4), ((5, 9), (0, 30), 100)],
)
def test_training_is_the_same_recorded_or_not(
    sizes: tuple[int, ...], steps: int | tuple[int, ...], batch: int, adjusted: bool
) -> None:
    """Twice in a row, since the second recording takes over the memory of the first."""
    found = []
    for own in (False, True):
        linear = OwnLinear if own else nn.Linear
        torch.manual_seed(0)
        model = nn.Sequential(linear(DIMENSIONS[0], 7), nn.Tanh(), linear(7, DIMENSIONS[1])).cuda()
        task, clients = Task(model, DIMENSIONS[1], "ce"), small_clients(*sizes, dtype=torch.float32)
        there = [ClientRound(c.id, c.x.cuda(), c.y.cuda(), c.randomness) for c in clients]
        start = task.like
        adjust: Adjustment | None = (lambda g, w, start=start: g + 0.1 * (w - start)) if adjusted else None
        found += [train_locally(task, start, there, steps, 0.3, batch, adjust) for _ in range(2)]
    assert recordable(task.model) is False
    for other in found[1:]:
        assert torch.equal(found[0].weights, other.weights)
        assert torch.equal(found[0].losses, other.losses)


@pytest.mark.parametrize("device", DEVICES)
def test_a_function_that_is_replayed_is_itself(device: str) -> None:
    first, second = (torch.arange(6.0, device=device).view(2, 3) + i for i in (0, 1))
    function = replayed(lambda a, b: (a @ b.T).exp(), first, second)
    for i in range(3):
        assert torch.equal(function(first / 9 + i, second / 9), ((first / 9 + i) @ (second / 9).T).exp())
    one = function(first, second)
    function(first + 1, second)
    assert torch.equal(one, (first @ second.T).exp())  # a result is the caller's own
    assert torch.equal(replayed(lambda a: a * float(a.sum()), first)(first), first * float(first.sum()))
