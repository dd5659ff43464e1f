"""Dummies converge to the inputs where the target determines them; the optimisers minimise what has a known minimum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ntkfl
from ntkfl.audit.deep_leakage import Settings, match_jacobian, match_update, reconstruct
from ntkfl.audit.descent import lbfgs
from ntkfl.audit.measures import ssim
from ntkfl.data import load
from ntkfl.methods import ClientRound, FedAvg, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sparsify import sparsify


def test_every_row_finds_its_own_minimum() -> None:
    scale = torch.tensor([1.0, 10.0, 100.0])
    centre = torch.arange(6.0).view(2, 3)
    x, loss = lbfgs(lambda x: ((x - centre).square() * scale).sum(1), torch.zeros(2, 3), 300)
    torch.testing.assert_close(x, centre, atol=0.05, rtol=0)
    assert bool((loss < 0.2).all())


def test_a_row_does_not_depend_on_the_others() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:  # Rosenbrock's valley
        return (1 - x[:, 0]).square() + 100 * (x[:, 1] - x[:, 0].square()).square()

    start = torch.tensor([[-1.2, 1.0], [0.3, -0.5], [2.0, 2.0]], dtype=torch.float64)
    together, _ = lbfgs(loss, start, 12)
    for i in range(3):
        alone, _ = lbfgs(loss, start[i : i + 1], 12)
        torch.testing.assert_close(together[i : i + 1], alone)


def test_a_layer_held_twice_stays_what_it_is() -> None:
    torch.manual_seed(0)
    twice = torch.nn.Conv1d(1, 1, 3, padding=1)
    model = torch.nn.Sequential(twice, torch.nn.Tanh(), twice, torch.nn.Flatten(), torch.nn.Linear(6, 3))
    before, x = [id(p) for p in model.parameters()], torch.randn(1, 1, 6)
    loss = match_jacobian(model, (1, 6), ntkfl.jacobian(model, x).dense())(x.flatten(1))
    assert [id(p) for p in model.parameters()] == before
    assert float(loss.sum()) < 1e-8  # the inputs themselves match


@pytest.mark.parametrize("match", ["sent", "zeros"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_the_loss_is_the_distance_of_jacobians(kind: str, match: str) -> None:
    x = torch.randn(2, 1, 10, 10, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = ntkfl.models.mlp(100, 6, 3) if kind == "mlp" else ntkfl.models.cnn((1, 10, 10), 3, (2, 2), 4)
    J = sparsify(ntkfl.jacobian(model, x), 0.6).dense()
    dummies = torch.randn(6, 100, generator=torch.Generator().manual_seed(1))  # three restarts of two
    own = ntkfl.jacobian(model, dummies.view(6, 1, 10, 10)).dense()
    error = (own - J.repeat(3, 1, 1)).square()
    if match == "sent":
        error = error * J.repeat(3, 1, 1).ne(0)
    expected = error.sum((1, 2)) / J.square().sum((1, 2)).repeat(3)
    torch.testing.assert_close(match_jacobian(model, (1, 10, 10), J, match)(dummies), expected, rtol=1e-4, atol=1e-5)


class _Tied(nn.Module):
    """A weight in two layers, and in a product that no layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.two(torch.tanh(self.one(x)))) + x @ self.last.weight.T @ self.last.weight)  # type: ignore[no-any-return]


def _twice() -> nn.Module:
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(4, 3))


def _without_some() -> nn.Module:
    """No bias, a frozen layer, a frozen weight, a frozen bias; and an activation in place."""
    layers = nn.Linear(4, 5), nn.Linear(5, 6, bias=False), nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 3)
    layers[0].requires_grad_(False)
    layers[2].weight.requires_grad_(False)
    layers[3].bias.requires_grad_(False)
    return nn.Sequential(*(module for layer in layers[:-1] for module in (layer, nn.ELU(inplace=True))), layers[-1])


def _at_positions() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3))


def _recurrent() -> nn.Module:
    class Last(nn.Module):
        def forward(self, outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return outputs[0][:, -1]

    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.GRU(2, 3, batch_first=True), Last())


@pytest.mark.parametrize("match", ["sent", "zeros"])
@pytest.mark.parametrize("make", [_twice, _Tied, _without_some, _at_positions, _recurrent])
def test_the_loss_is_that_distance_however_a_layer_is_used(make: Callable[[], nn.Module], match: str) -> None:
    torch.manual_seed(0)
    model, dummies, x = make().double(), torch.randn(6, 4).double(), torch.randn(2, 4).double()
    J = _by_autograd(model, x)
    J = torch.where(J.abs() > J.abs().median(), J, 0.0).repeat(3, 1, 1)
    error = (_by_autograd(model, dummies) - J).square() * (J.ne(0) if match == "sent" else 1)
    expected = error.sum((1, 2)) / J.square().sum((1, 2))
    torch.testing.assert_close(match_jacobian(model, (4,), J[:2], match)(dummies), expected, rtol=1e-10, atol=0)


def _by_autograd(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """∂f/∂w [N, d2, d], one plain backward pass per entry of f."""
    weights = [p for p in model.parameters() if p.requires_grad]
    passes = [[torch.autograd.grad(f, weights, retain_graph=True) for f in model(row[None])[0]] for row in x]
    return torch.stack([torch.stack([torch.cat([p.flatten() for p in g]) for g in each]) for each in passes])


def test_a_dense_jacobian_gives_the_pictures_back() -> None:
    dataset = load("digits")
    x, _ = dataset.rows.take(torch.arange(3))
    torch.manual_seed(0)
    model = ntkfl.models.mlp(64, 32, 10)
    J = ntkfl.jacobian(model, x).dense()
    found, match = reconstruct(match_jacobian(model, x.shape[1:], J), 3, 64, Settings(steps=60, restarts=2))
    mean, std = dataset.rows.mean[0], dataset.rows.std[0]
    likeness = ssim(x * std + mean, found.view_as(x) * std + mean)
    assert float(likeness.min()) > 0.9
    assert float(match.max()) < 1e-2


def test_unrolled_local_training_is_what_a_client_does() -> None:
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(5))
    y = torch.tensor([0, 2, 1, 2])
    torch.manual_seed(0)
    task = Task(ntkfl.models.mlp(12, 6, 3), 3, "ce")
    end = (
        FedAvg(lr=0.2, local_steps=3).train(task, task.like, [ClientRound(0, x, y, Randomness.simulated(0))]).weights[0]
    )
    loss = match_update(task.at(task.like), (12,), end - task.like, 4, 3, "ce", 0.2, 3)
    certain = 50 * torch.nn.functional.one_hot(y, 3).float()
    assert float(loss(torch.cat([x.flatten(), certain.flatten()])[None])) < 1e-9
    assert float(loss(torch.cat([x.flatten() + 0.3, certain.flatten()])[None])) > 1e-3
