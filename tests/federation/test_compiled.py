"""Networks that are compiled, under autocast or of half precision: trained as plain ones, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import ModelError
from ntkfl.methods import NTKFL, FedAvg, Method
from ntkfl.tangent.parameters import flatten

METHODS = [FedAvg(local_steps=2), NTKFL(steps=(50, 100))]


def network() -> nn.Module:
    torch.manual_seed(0)
    return ntkfl.models.mlp(64, 8, 10)


def compiled(model: nn.Module) -> nn.Module:
    made = torch.compile(model, backend="eager")
    assert isinstance(made, nn.Module)
    return made


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def in_part(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    model[-1] = compiled(model[-1])
    return model


HOW = [compiled, in_place, in_part]


def trained(model: nn.Module, digits: ntkfl.data.Federated, method: Method, out: Path | None = None) -> ntkfl.Run:
    return ntkfl.train(model, digits, method, rounds=2, clients_per_round=3, callbacks=[], out=out)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("how", HOW)
def test_a_compiled_network_trains_as_a_plain_one(
    how: Callable[[nn.Module], nn.Module], method: Method, digits: ntkfl.data.Federated, tmp_path: Path
) -> None:
    plain = trained(network(), digits, method, tmp_path / "plain")
    model = how(network())
    torch.compiler.reset()
    found = trained(model, digits, method, tmp_path / "compiled")
    assert found.history == plain.history
    assert type(found.model) is type(model)
    for file in ("config.toml", "model.safetensors", "checkpoint/state.safetensors"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "compiled" / file).read_bytes()
    loaded = ntkfl.Run.load(tmp_path / "plain", how(network()))
    assert torch.equal(flatten(loaded.model), flatten(plain.model))


@pytest.mark.parametrize("how", HOW)
def test_the_jacobian_of_a_compiled_network(how: Callable[[nn.Module], nn.Module]) -> None:
    x = torch.randn(7, 64)
    plain, model = ntkfl.jacobian(network(), x), how(network())
    plan = ntkfl.tangent.plan_jacobian(model, x)
    for J in (ntkfl.jacobian(model, x), ntkfl.jacobian(model, x, plan=plan)):
        assert torch.equal(J.dense(), plain.dense())
    assert torch.equal(model(x), network()(x))  # it is as it was, compiled still
    assert model._compiled_call_impl is not None or any(type(m).__name__ == "OptimizedModule" for m in model.modules())


class Mixed(nn.Module):
    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.network, self.cast = network(), cast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            f: Tensor = self.network(x)
        return f.float() if self.cast else f


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_half_precision_is_refused_in_the_network_and_has_no_effect_around_it(
    method: Method, digits: ntkfl.data.Federated
) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = trained(network(), digits, method)
    assert mixed.history == trained(network(), digits, method).history
    for cast in (False, True):
        with pytest.raises(ModelError, match=r"under torch.autocast in its forward: take that out"):
            trained(Mixed(cast), digits, method)
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ModelError, match=r"weights are (b?float16), in which steps get lost: train it in float32"):
            trained(network().to(dtype), digits, method)
