"""What sums give away, on sums made by hand: one input, a span, leverages, rows of Q, class counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntkfl.audit.analytic import LinearLayer, linear_layers
from ntkfl.audit.unmixing import (
    counts_by_logits,
    counts_by_public,
    layer_gradient,
    leverage,
    outside,
    ratios,
    single,
    unmix,
    whole,
)
from ntkfl.tangent.parameters import flatten

IN, HIDDEN, OUT = 20, 30, 4
FINE = 2.0**-45  # float64 that was added up


def scene(samples: int, seed: int = 0) -> tuple[list[LinearLayer], Tensor, Tensor, Tensor, Tensor]:
    """(layers, x in 0..1, y, the sum of gradients [d], Σ v vᵀ) of a network of two layers in float64."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT)).double()
    x, y = torch.rand(samples, IN).double().round(decimals=3), torch.randint(OUT, (samples,))
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert gradient.shape == flatten(model).shape
    v = with_one(x)
    return linear_layers(model.requires_grad_(True)), x, y, gradient, v.T @ v


def with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)


def test_one_sample_is_divided_out() -> None:
    layers, x, _, gradient, _ = scene(1)
    torch.testing.assert_close(single(layers[0], gradient), x)
    torch.testing.assert_close(ratios(layers[0], gradient), x.expand(len(ratios(layers[0], gradient)), -1))


def test_leverages_of_the_samples_are_at_most_one_and_add_up_to_the_rank() -> None:
    for samples in (5, 60):
        _, x, _, _, A = scene(samples)
        own = leverage(A, with_one(x), FINE)
        assert float(own.max()) <= 1 + 1e-9
        assert float(own.sum()) == pytest.approx(min(samples, IN + 1), rel=1e-3)
        others = leverage(A, with_one(torch.rand(500, IN).double()), FINE)
        assert float(others.mean()) > float(own.mean()) * (1e6 if samples == 5 else 1.2)


def test_inputs_lie_in_the_row_space_of_the_gradient_and_others_do_not() -> None:
    layers, x, _, gradient, _ = scene(6)
    first = layer_gradient(layers[0], gradient)
    assert float(outside(first, with_one(x), FINE).abs().max()) < 1e-9
    assert float(outside(first, with_one(torch.rand(50, IN).double()), FINE).min()) > 1e-3
    coarse = outside(first.half().double(), with_one(x), 2.0**-11)  # as it travels
    assert float(coarse.max()) < 0.05


def test_rows_of_q_are_found_one_by_one() -> None:
    layers, x, _, gradient, A = scene(5)
    for layer in layers:
        layer.module.float()

    def excess(inputs: Tensor) -> Tensor:
        return ((-inputs).relu() + (inputs - 1).relu()).square().sum(1)

    found = unmix(*layers, A, gradient, 5, 2.0**-24, torch.eye(OUT), excess, starts=80, steps=150, seed=0)  # type: ignore[arg-type]
    assert found.shape == (5, IN)
    apart = torch.cdist(x.float(), found).amin(1) / x.float().norm(dim=1)
    usual = (x - x.mean(0)).norm(dim=1) / x.norm(dim=1)  # of the mean input, which A alone tells
    assert float(apart.median()) < 0.02
    assert float((apart < 0.1).double().mean()) >= 0.8
    assert float(usual.min()) > 0.2


def test_the_last_bias_counts_labels() -> None:
    layers, x, y, gradient, _ = scene(1)
    model = nn.Sequential(layers[0].module, nn.ReLU(), layers[1].module)
    bias = gradient[layers[1].bias]
    assert layers[1].bias is not None
    flat = torch.zeros(OUT, OUT).double()
    counts = counts_by_logits(bias, (model(x)[0].detach(), flat), 1, 0.0)
    torch.testing.assert_close(counts, nn.functional.one_hot(y[0], OUT).double(), atol=1e-9, rtol=0)
    smoothed = nn.functional.one_hot(y[0], OUT).double() * 0.9 + 0.1 / OUT
    p = model(x)[0].detach().softmax(0)
    counts = counts_by_logits(p - smoothed, (model(x)[0].detach(), flat), 1, 0.1)
    torch.testing.assert_close(counts, nn.functional.one_hot(y[0], OUT).double(), atol=1e-9, rtol=0)


def test_counts_are_those_of_the_public_mix_that_fits() -> None:
    typical = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)).double()
    truth = torch.tensor([3.0, 0.0, 5.0, 2.0]).double()
    torch.testing.assert_close(counts_by_public(truth @ typical, typical, 10), truth, atol=1e-8, rtol=0)
    # Nothing but their number told: whatever comes, it adds up.
    assert float(counts_by_public(torch.zeros(6).double(), typical * 0 + 1e-9, 10).sum()) == pytest.approx(10, rel=0.01)


def test_whole_counts_add_up() -> None:
    assert whole(torch.tensor([1.6, 1.6, 0.8]), 4).tolist() == [2, 1, 1]
    assert int(whole(torch.rand(10), 1000).sum()) == 1000
