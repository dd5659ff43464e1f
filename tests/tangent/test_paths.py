"""Samples that take different paths through a network, plans used for what they were not made for, inputs reused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import ModelError
from ntkfl.tangent import plan_jacobian
from tests.tangent.test_jacobian import EXACT, autograd


class Experts(nn.Module):
    """Each sample is given to the expert that a gate likes best."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(6, experts)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        p, chosen = self.gate(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            own = chosen == i
            if own.any():
                out[own] = p[own, None] * expert(x[own])
        return out


class Exit(nn.Module):
    """A batch leaves early where all its samples are sure."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more, self.scale = nn.Linear(6, 3), nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        late = x[:, :1] > 0
        return torch.where(late, self.more(out) * self.scale, out) if late.any() else out


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("experts", [2, 3, 5])
def test_every_expert_has_its_derivatives(experts: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Experts(experts).double(), torch.randn(12, 6, dtype=torch.float64)
    assert (ntkfl.jacobian(model, x).dense() - autograd(model, x)).abs().max() < EXACT


@pytest.mark.parametrize("early", [2, 5])
def test_weights_that_the_first_samples_do_not_use_have_their_derivatives(early: int) -> None:
    torch.manual_seed(0)
    model, x = Exit().double(), torch.randn(6, 6, dtype=torch.float64)
    x[:early, 0], x[early:, 0] = -1, 1
    for chunk in (None, 1, 3):
        assert (ntkfl.jacobian(model, x, chunk=chunk).dense() - autograd(model, x)).abs().max() < EXACT


def test_factors_that_some_samples_do_not_have_are_refused() -> None:
    torch.manual_seed(0)
    model, x = Experts(3).double(), torch.randn(12, 6, dtype=torch.float64)
    same = x[model.gate(x).argmax(1) == model.gate(x[:1]).argmax()]
    plan = plan_jacobian(model, same)
    with pytest.raises(ModelError, match=r"samples take different paths.*form='dense'"):
        ntkfl.jacobian(model, x, plan=plan)
    assert (ntkfl.jacobian(model, same, plan=plan).dense() - autograd(model, same)).abs().max() < EXACT


def test_a_layer_that_nothing_uses_costs_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(6, 3)).double(), torch.randn(4, 6, dtype=torch.float64)
    model[0].spare = nn.Linear(50, 50).double()
    J = ntkfl.jacobian(model, x)
    assert J.nbytes < 8 * 4 * (6 + 9 + 1)
    assert (J.dense() - autograd(model, x)).abs().max() < EXACT


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def replaced(model: nn.Sequential) -> nn.Module:
    model[2] = nn.Linear(5, 3)
    return model


def frozen(model: nn.Sequential) -> nn.Module:
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("change", "why"),
    [(copy.deepcopy, "another model"), (replaced, "another model"), (frozen, "other parameters")],
)
def test_a_plan_is_of_one_model(change: Callable[[nn.Sequential], nn.Module], why: str) -> None:
    model, x = chain(), torch.randn(4, 6)
    plan = plan_jacobian(model, x)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert torch.equal(ntkfl.jacobian(model, x, plan=plan).dense(), ntkfl.jacobian(model, x).dense())
    with pytest.raises(ModelError, match=why):
        ntkfl.jacobian(change(model), x, plan=plan)


@pytest.mark.parametrize("chunk", [None, 2])
def test_inputs_may_be_written_to_afterwards(chunk: int | None) -> None:
    model, x = chain(), torch.randn(4, 6, requires_grad=True)
    J = ntkfl.jacobian(model, x, chunk=chunk)
    H = J.kernel()
    assert not H.requires_grad
    with torch.no_grad():
        x.zero_()
    assert torch.equal(J.kernel(), H)


class Loose(nn.Module):
    """Parameters that no layer has, used in every way there is beside the samples x [N, T, 4]."""

    def __init__(self, T: int) -> None:
        super().__init__()
        self.added, self.first = nn.Parameter(torch.randn(T, 4)), nn.Parameter(torch.randn(1, 1, 4))
        self.sliced, self.taken = nn.Parameter(torch.randn(T, 4)), nn.Parameter(torch.randn(T, 4))
        self.scale, self.mixed, self.out = (
            nn.Parameter(torch.randn(4)),
            nn.Parameter(torch.randn(4, 4)),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        h = torch.tanh(x + self.added) + self.sliced[:T] + self.taken[torch.arange(T)]
        h = torch.cat([self.first.expand(len(x), -1, -1), h * self.scale], 1)
        return self.out(torch.tanh(h @ self.mixed).mean(1))


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 8])
def test_loose_parameters_however_many_samples_there_are(T: int, chunk: int | None) -> None:
    """A copy for every sample where it broadcasts with them; `sliced[:T]` takes samples where it means positions, but
    only where there are more samples than positions.
    """
    torch.manual_seed(0)
    model = Loose(T).double()
    plan = plan_jacobian(model, torch.randn(2, T, 4, dtype=torch.float64))
    assert {"first", "mixed", *(["added"] if T > 1 else [])} <= {*plan.copied}  # [1, 4] could be a row of samples
    assert "scale" in plan.left
    layouts = set()
    for N in (1, 2, 3, 4, 5, 8):
        x = torch.randn(N, T, 4, dtype=torch.float64)
        J = ntkfl.jacobian(model, x, plan=plan, chunk=chunk)
        assert (J.dense() - autograd(model, x)).abs().max() < EXACT
        layouts.add(J.layout)
    assert len(layouts) == 1
