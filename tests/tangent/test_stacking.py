"""Jacobians put together piece by piece."""

from __future__ import annotations

import weakref

import torch
from torch import nn

import ntkfl
from ntkfl.tangent import Stack, plan_jacobian


def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.randn(9, 6, dtype=torch.float64)


def test_a_stack_equals_the_whole_and_holds_no_piece() -> None:
    model, x = net()
    whole, stack = ntkfl.jacobian(model, x), Stack(9)
    held = []
    for part in torch.split(x, [4, 3, 2]):
        J = ntkfl.jacobian(model, part)
        storages = [t.untyped_storage() for t in J.tensors()]
        held += [weakref.ref(s) for s in storages if s.data_ptr() != x.untyped_storage().data_ptr()]  # x is ours
        stack.add(J)
        del J, storages
    assert held
    assert not any(ref() is not None for ref in held)
    J = stack.whole()
    R = torch.randn(9, 3, dtype=torch.float64)
    for ours, expected in [
        (J.dense(), whole.dense()),
        (J.kernel(), whole.kernel()),
        (J.vjp(R), whole.vjp(R)),
        (J.product(R), whole.jvp(whole.vjp(R))),
        (J[2:7].product(R[2:7]), whole[2:7].jvp(whole[2:7].vjp(R[2:7]))),
    ]:
        assert (ours - expected).abs().max() < 1e-12


def test_a_plan_serves_other_weights_and_rows() -> None:
    model, x = net()
    plan = plan_jacobian(model, x[:2])
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    assert torch.equal(ntkfl.jacobian(model, x, plan=plan).dense(), ntkfl.jacobian(model, x).dense())
