"""The network of the analysis: values by hand, autograd as oracle, what its kernels must not depend on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ntkfl_experiments.theory.two_layer import TwoLayer, draw, in_span, limit_kernel, sampled_kernel, unit

import ntkfl
from ntkfl.errors import DataError

DOUBLE = torch.float64


def inputs(samples: int, size: int, seed: int = 0) -> torch.Tensor:
    return unit(torch.randn(samples, size, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE))


def covariance(size: int, seed: int = 0) -> torch.Tensor:
    root = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    return root @ root.T / size + 0.1 * torch.eye(size, dtype=DOUBLE)


def test_outputs_and_kernel_by_hand() -> None:
    v = torch.tensor([[1.0, 0.0], [0.0, -1.0], [1.0, 1.0]], dtype=DOUBLE)
    network = TwoLayer(v, torch.tensor([1.0, -1.0, -1.0], dtype=DOUBLE))
    x = torch.tensor([[0.6, 0.8], [0.6, -0.8]], dtype=DOUBLE)
    # Before the activation: 0.6, −0.8, 1.4 and 0.6, 0.8, −0.2.
    assert network.outputs(x).tolist() == pytest.approx([(0.6 - 1.4) / math.sqrt(3), (0.6 - 0.8) / math.sqrt(3)])
    product = 0.36 - 0.64
    assert network.kernel(x).flatten().tolist() == pytest.approx([2 / 3, product / 3, product / 3, 2 / 3])


def test_kernel_and_pull_back_are_those_of_autograd_and_of_the_package() -> None:
    network, x = draw(17, 5, seed=1), inputs(6, 5)
    v = network.v.clone().requires_grad_()
    rows = [torch.autograd.grad(TwoLayer(v, network.c).outputs(x)[i], v)[0].flatten() for i in range(6)]
    J = torch.stack(rows)
    torch.testing.assert_close(network.kernel(x), J @ J.T)
    r = torch.randn(6, dtype=DOUBLE)
    torch.testing.assert_close(network.pull_back(x, r).flatten(), J.T @ r)
    torch.testing.assert_close(ntkfl.jacobian(network.module(), x).kernel(), network.kernel(x))
    torch.testing.assert_close(network.module()(x).squeeze(1), network.outputs(x))


def test_limit_kernel_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, math.sqrt(0.75)], [-1.0, 0.0]], dtype=DOUBLE)
    H = limit_kernel(x)
    assert H.diagonal().tolist() == pytest.approx([0.5] * 4)
    assert float(H[0, 1]) == pytest.approx(0.0, abs=1e-15)  # orthogonal
    assert float(H[0, 2]) == pytest.approx(0.5 * (math.pi - math.pi / 3) / (2 * math.pi))  # 60°
    assert float(H[0, 3]) == pytest.approx(0.0, abs=1e-15)  # opposite: never active together


@pytest.mark.parametrize("shaped", [False, True])
def test_limit_kernel_is_the_expectation(shaped: bool) -> None:
    x, sigma = inputs(5, 4), covariance(4) if shaped else None
    samples = 200_000
    error = (sampled_kernel(x, samples, seed=3, covariance=sigma) - limit_kernel(x, sigma)).abs().max()
    assert float(error) < 5 * 0.5 / math.sqrt(samples)
    if shaped:  # and the covariance matters: the isotropic one is much further away
        assert float((limit_kernel(x, sigma) - limit_kernel(x)).abs().max()) > 20 * 0.5 / math.sqrt(samples)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), samples=st.integers(1, 8), size=st.integers(2, 6), scale=st.floats(0.01, 100))
def test_what_the_limit_does_not_depend_on(seed: int, samples: int, size: int, scale: float) -> None:
    x, sigma = inputs(samples, size, seed), covariance(size, seed)
    H = limit_kernel(x, sigma)
    torch.testing.assert_close(H, H.T)
    assert float(torch.linalg.eigvalsh(H)[0]) > -1e-9
    torch.testing.assert_close(limit_kernel(x, scale * sigma), H)  # how large the weights are
    turn = torch.linalg.qr(covariance(size, seed + 1)).Q
    torch.testing.assert_close(limit_kernel(x @ turn, turn.T @ sigma @ turn), H)  # turning inputs and weights
    torch.testing.assert_close(limit_kernel(x, torch.eye(size, dtype=DOUBLE)), limit_kernel(x))


def test_the_span_is_all_that_counts() -> None:
    x, network = inputs(4, 30), draw(50, 30, seed=0)
    z, basis = in_span(x), torch.linalg.qr(x.T).Q
    assert z.shape == (4, 4)
    inside = TwoLayer(network.v @ basis, network.c)
    torch.testing.assert_close(inside.outputs(z), network.outputs(x))
    torch.testing.assert_close(inside.kernel(z), network.kernel(x))
    r = torch.randn(4, dtype=DOUBLE)
    torch.testing.assert_close(inside.pull_back(z, r) @ basis.T, network.pull_back(x, r))
    torch.testing.assert_close(limit_kernel(z), limit_kernel(x))


def test_draws_have_the_covariance_asked_for() -> None:
    sigma = covariance(3)
    v = draw(100_000, 3, seed=0, covariance=sigma).v
    torch.testing.assert_close(v.T @ v / len(v), sigma, atol=0.02, rtol=0)
    singular = torch.diag(torch.tensor([1.0, 0.0], dtype=DOUBLE))
    assert draw(10, 2, seed=0, covariance=singular).v[:, 1].abs().max() == 0
    assert set(draw(50, 2, seed=0).c.tolist()) == {-1.0, 1.0}


def test_inputs_are_of_unit_length_or_refused() -> None:
    x = unit(torch.tensor([[[3.0, 4.0]]]))
    assert x.tolist() == [[0.6, 0.8]]
    with pytest.raises(DataError, match="length 0"):
        unit(torch.zeros(1, 2))
    with pytest.raises(DataError, match="length 1"):
        limit_kernel(torch.full((1, 2), 2.0))
