"""Chains of layers against plain autograd: every geometry, activation and frozen part, and what no chain is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ntkfl
from ntkfl.tangent import chain, plan_jacobian
from ntkfl.tangent.chain import ELEMENTWISE
from tests.tangent.test_jacobian import autograd

EXACT = 1e-9


def chained(model: nn.Module, x: Tensor, form: str = "auto") -> bool:
    """Whether the Jacobian came from a chain; either way it is autograd's."""
    plan = plan_jacobian(model, x, form)
    truth = autograd(model, x)
    J = ntkfl.jacobian(model, x, form=form, chunk=2, plan=plan)
    assert (J.dense() - truth).abs().max() <= EXACT * max(1.0, float(truth.abs().max()))
    return plan.chain is not None


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_geometry(data: st.DataObject) -> None:
    D = data.draw(st.integers(1, 3))
    kernel, stride, padding, size = (
        tuple(data.draw(st.integers(low, high)) for _ in range(D)) for low, high in [(1, 4), (1, 3), (0, 4), (5, 6)]
    )
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[D - 1]
    torch.manual_seed(0)
    conv = kind(3, 2, kernel, stride, padding, bias=data.draw(st.booleans()))  # type: ignore[arg-type]
    front = nn.Sequential(kind(2, 3, 3, padding=1), nn.Tanh(), conv, nn.ReLU(), nn.Flatten())
    width = front(torch.zeros(1, 2, *size)).shape[1]
    model = nn.Sequential(front, nn.Linear(width, 2)).double()
    assert chained(
        model, torch.randn(3, 2, *size, dtype=torch.float64), data.draw(st.sampled_from(["auto", "factored"]))
    )


@pytest.mark.parametrize("kind", [*ELEMENTWISE, *chain.IDENTITIES])
def test_layers_without_weights(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    layer = kind()
    model = nn.Sequential(nn.Conv2d(2, 3, 2), layer, nn.Flatten(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 2, 4, 2, dtype=torch.float64)
    assert chained(model.double().eval(), x)
    model.insert(5, nn.LayerNorm(4).double())
    assert not chained(model, x)  # the same through autograd


def test_in_place_and_after_the_last_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.ELU(inplace=True)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    before = x.clone()
    assert chained(model, x)
    assert chained(nn.Sequential(nn.Tanh(), nn.Hardtanh(inplace=True), model), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "0.", "2.weight", "2.bias", "2.", "5.weight", "5."])
def test_frozen_parts(frozen: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.GELU(), nn.Flatten(), nn.Linear(12, 2))
    model.double()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    for form in ("auto", "factored"):
        assert chained(model, torch.randn(3, 1, 4, 4, dtype=torch.float64), form)


def test_a_layer_held_twice_and_tied_weights_stay_what_they_are() -> None:
    """`torch.func.functional_call` alone would leave a plain tensor where the parameter was."""
    torch.manual_seed(0)
    twice = nn.Linear(4, 4)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    for model in (nn.Sequential(twice, nn.Tanh(), twice), tied):
        model.double()
        before = [id(p) for p in model.parameters()]
        assert not chained(model, torch.randn(3, 4, dtype=torch.float64))
        assert [id(p) for p in model.parameters()] == before


class Odd(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) ** 2


class Still(nn.Conv2d):
    """A subclass that trains nothing, and does more than its base."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).abs()


def test_what_is_no_chain() -> None:
    torch.manual_seed(0)
    images, rows = torch.randn(3, 2, 4, 4).double(), torch.randn(3, 4).double()
    hooked = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    hooked[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    for model, x in [
        (nn.Sequential(Odd(4, 2)), rows),
        (nn.Sequential(Still(2, 2, 3).requires_grad_(False), nn.Flatten(), nn.Linear(8, 2)), images),
        (nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(8, 2)), images),
        (nn.Sequential(nn.Conv2d(2, 2, 2, dilation=2), nn.Flatten(), nn.Linear(8, 2)), images),
        (nn.Sequential(nn.Conv2d(2, 2, 2, padding="same"), nn.Flatten(), nn.Linear(32, 2)), images),
        (nn.Sequential(nn.Conv2d(2, 2, 3, padding_mode="circular", padding=1), nn.Flatten(), nn.Linear(32, 2)), images),
        (nn.Sequential(nn.Conv2d(2, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2)), images),
        (nn.Sequential(nn.Flatten(2), nn.Linear(16, 3), nn.Flatten(), nn.Linear(6, 2)), images),
        (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).eval(), rows),
        (hooked, rows),
    ]:
        assert not chained(model.double(), x)
