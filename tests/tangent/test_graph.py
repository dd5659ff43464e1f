"""Gradients through a Jacobian, parameters given by name, and J as SciPy's operator: against `torch.func`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import ntkfl
from ntkfl.errors import ConfigError, ModelError
from ntkfl.tangent import plan_jacobian
from tests.tangent.networks import build

EXACT = 1e-10
Values = dict[str, Tensor]


class Own(nn.Module):
    """A parameter that no known layer has, beside layers of every kind of block."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.position, self.norm = nn.Parameter(torch.randn(4, 3)), norm or nn.Linear(3, 3)
        self.conv, self.head = nn.Conv1d(3, 2, 2), nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(x + self.position))
        out: Tensor = self.head(torch.tanh(self.conv(hidden.mT)).mean(2))
        return out


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(1, 2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    found = {
        "convolution": (convolution, torch.randn(3, 1, 4, 4, dtype=torch.float64)),
        "own parameter": (Own(), torch.randn(3, 4, 3, dtype=torch.float64)),
    }
    return found | {name: build(name) for name in ("deep tanh", "tied weight", "sequence")}


NETWORKS = networks()


def reference(model: nn.Module, values: Values, x: Tensor) -> Tensor:
    """J [N, d2, d] by `torch.func`, to be differentiated again by autograd."""

    def f(values: Values, sample: Tensor) -> Tensor:
        out: Tensor = functional_call(model, values, sample.unsqueeze(0))
        return out.squeeze(0)

    derivatives = vmap(jacrev(f), in_dims=(None, 0))(values, x)
    return torch.cat([derivatives[name].flatten(2) for name in values], dim=2)


def trainable(model: nn.Module) -> Values:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


# What is made of a Jacobian, and the same of its dense tensor [N, d2, d].
USES: dict[
    str, tuple[Callable[[ntkfl.Jacobian, Tensor, Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]
] = {
    "dense": (lambda J, v, R: J.dense(), lambda D, v, R: D),
    "kernel": (lambda J, v, R: J.kernel(), lambda D, v, R: torch.einsum("ajd,bjd->ab", D, D) / D.shape[1]),
    "jvp": (lambda J, v, R: J.jvp(v), lambda D, v, R: D @ v),
    "vjp": (lambda J, v, R: J.vjp(R), lambda D, v, R: torch.einsum("njd,nj->d", D, R)),
    "product": (lambda J, v, R: J.product(R), lambda D, v, R: D @ torch.einsum("njd,nj->d", D, R)),
}


@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_flow_through_every_product(name: str, use: str, form: str) -> None:
    """To parameters that are given, and to x, in every form."""
    model, x = NETWORKS[name]
    ours, plain = USES[use]
    values = trainable(model)
    D = reference(model, values, x)
    v, R = torch.randn(D.shape[2], dtype=D.dtype), torch.randn(D.shape[:2], dtype=D.dtype)
    weight = torch.randn_like(plain(D, v, R))

    leaves = {key: value.requires_grad_() for key, value in values.items()}
    at = x.clone().requires_grad_()
    J = ntkfl.jacobian(model, at, form, params=leaves, create_graph=True)
    assert (J.dense() - D).abs().max() < EXACT
    D = reference(model, leaves, at)
    found, expected = (
        torch.autograd.grad((made * weight).sum(), [*leaves.values(), at], materialize_grads=True)
        for made in (ours(J, v, R), plain(D, v, R))
    )
    for gradient, truth in zip(found, expected, strict=True):
        assert (gradient - truth).abs().max() <= EXACT * max(1.0, float(truth.abs().max()))


@pytest.mark.parametrize("form", ["auto", "dense"])
def test_gradients_through_a_normalisation_are_those_of_finite_differences(form: str) -> None:
    """`torch.func` is no reference here: what it gives for a LayerNorm is wrong when differentiated again (2.13)."""
    torch.manual_seed(0)
    model, x = Own(nn.LayerNorm(3)), torch.randn(3, 4, 3, dtype=torch.float64)
    values = trainable(model)
    name, change = "position", torch.randn(4, 3, dtype=torch.float64)
    leaf = values[name].clone().requires_grad_()
    whole = ntkfl.jacobian(model, x, form, params=values | {name: leaf}, create_graph=True).dense()
    (found,) = torch.autograd.grad(whole.square().sum(), leaf)
    ends = [ntkfl.jacobian(model, x, params=values | {name: leaf.detach() + h * change}) for h in (-1e-6, 1e-6)]
    before, after = (J.dense().square().sum() for J in ends)
    slope = float((after - before) / 2e-6)
    assert abs(float((found * change).sum()) - slope) < 1e-6 * abs(slope)


def test_gradients_reach_the_models_own_parameters() -> None:
    model, x = build("deep tanh")
    parameters = dict(model.named_parameters())
    kernel = ntkfl.jacobian(model, x, create_graph=True).kernel()
    D = reference(model, parameters, x)
    expected = torch.einsum("ajd,bjd->", D, D) / D.shape[1]
    both = [torch.autograd.grad(f, [*parameters.values()], materialize_grads=True) for f in (kernel.sum(), expected)]
    for gradient, truth in zip(*both, strict=True):
        assert (gradient - truth).abs().max() < 1e-9
    assert not ntkfl.jacobian(model, x).kernel().requires_grad


@pytest.mark.parametrize("form", ["auto", "dense"])
@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_by_name_take_the_place_of_the_models(name: str, form: str) -> None:
    """All of them, and one alone; also with a plan, in chunks; the model keeps its own."""
    model, x = NETWORKS[name]
    before, plan = trainable(model), plan_jacobian(model, x, form)
    moved = {key: value + torch.randn_like(value) for key, value in before.items()}
    one = next(iter(moved))
    for params in (moved, {one: moved[one]}):
        truth = reference(model, before | params, x)
        for how in ({"form": form}, {"plan": plan, "chunk": 2}):
            J = ntkfl.jacobian(model, x, params=params, **how)  # type: ignore[arg-type]
            assert (J.dense() - truth).abs().max() < EXACT
    assert all(torch.equal(value, before[key]) for key, value in trainable(model).items())


def test_parameters_that_do_not_fit_are_refused() -> None:
    model, x = build("deep tanh")
    name, value = next(iter(trainable(model).items()))
    with pytest.raises(ConfigError, match="unknown trainable parameter in params 'weigth'"):
        ntkfl.jacobian(model, x, params={"weigth": value})
    with pytest.raises(ModelError, match=r"must have shape \[\d+, \d+\], got \[1\]"):
        ntkfl.jacobian(model, x, params={name: torch.zeros(1)})
    fixed = {name: value.detach() for name, value in trainable(model).items()}
    with pytest.raises(ModelError, match="create_graph=True needs"):
        ntkfl.jacobian(model, x, params=fixed, create_graph=True)


@pytest.mark.parametrize("form", ["auto", "dense"])
def test_scipy_solves_with_it(form: str) -> None:
    linalg = pytest.importorskip("scipy.sparse.linalg")
    model, x = build("deep tanh")
    J = ntkfl.jacobian(model, x, form)
    dense, A = J.dense().flatten(0, 1).numpy(), J.to_scipy()
    assert A.shape == dense.shape
    assert A.dtype == np.float64
    b, B = np.random.default_rng(0).normal(size=(dense.shape[0],)), np.random.default_rng(1).normal(size=dense.T.shape)
    for found, truth in [
        (A @ B[:, 0], dense @ B[:, 0]), (A @ B, dense @ B), (A @ B[:, :1], dense @ B[:, :1]),
        (A.H @ b, dense.T @ b), (A.H @ b[:, None], dense.T @ b[:, None]), (A.T @ dense, dense.T @ dense),
    ]:  # fmt: skip
        assert found.shape == truth.shape
        assert np.abs(found - truth).max() < 1e-11
    assert abs(linalg.svds(A, k=1, return_singular_vectors=False)[0] - np.linalg.norm(dense, 2)) < 1e-9
