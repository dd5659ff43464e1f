"""Clipped gradients and input moments against explicit gradients of each sample, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ntkfl.models
from ntkfl.errors import MessageError
from ntkfl.tangent import plan_jacobian
from ntkfl.tangent.clipping import clipped_gradient, input_moments, lengths, whitened
from ntkfl.tangent.parameters import flatten
from ntkfl.tangent.sums import Layer

torch.manual_seed(0)


class Tokens(nn.Module):
    """An embedding, a linear layer at each token, and their mean: several positions of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.embed(x)).tanh()).mean(1)
        return out


class Bare(nn.Module):
    """A weight that no layer holds: a dense block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.randn(5)), nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x * self.scale)
        return out


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (5,)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 2, 2, groups=2), nn.Flatten(), nn.Linear(16, 3)
        ),
        (2, 4, 4),
    ),
    "tokens": (Tokens, (6,)),
    "bare": (Bare, (5,)),
}


def data(shape: tuple[int, ...], name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, *shape, generator=generator, dtype=torch.float64)
    if name == "tokens":
        x = torch.randint(7, (9, *shape), generator=generator)
    return x, torch.randn(9, 3, generator=generator, dtype=torch.float64).softmax(1)


def each(model: nn.Module, x: Tensor, Y: Tensor) -> Tensor:
    """Every sample's gradient, by a backward pass of its own, [N, d]."""
    rows = []
    for one, y in zip(x, Y, strict=True):
        loss = -(y * model(one.unsqueeze(0)).log_softmax(1)).sum()
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0])
def test_each_sample_is_clipped_as_its_own_gradient_would_be(name: str, quantile: float) -> None:
    build, shape = NETWORKS[name]
    model = build().double()
    x, Y = data(shape, name)
    rows = each(model, x, Y)
    clip = float(rows.norm(dim=1).quantile(quantile))
    expected = (rows * (clip / rows.norm(dim=1).clamp_min(clip)).unsqueeze(1)).sum(0)
    found = clipped_gradient(model, x, Y, "ce", plan_jacobian(model, x), clip, {})
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("positions", [1, 4])
def test_a_whitened_layer_is_clipped_in_its_own_weights(positions: int) -> None:
    """The norm that is clipped is that of the gradient in V, W = V P, bias included."""
    if positions == 1:
        model, layer, (x, Y) = NETWORKS["mlp"][0]().double(), Layer((0, 30), (30, 36), False), data((5,), "mlp")
    else:
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()
        layer, (x, Y) = Layer((0, 72), (72, 76), False), data((2, 4, 4), "convolution")
    (w, b), gradients = (layer.weight[1], layer.bias[1]), each(model, x, Y)  # type: ignore[index]
    m = w // (b - w) + 1
    root = torch.randn(m, m, dtype=torch.float64)
    P = root @ root.T / m
    rows = torch.stack([whitened(row, {layer: P}) for row in gradients])
    as_matrix = torch.cat([gradients[0, :w].view(b - w, m - 1), gradients[0, w:b, None]], dim=1) @ P
    assert torch.allclose(torch.cat([as_matrix[:, :-1].reshape(-1), as_matrix[:, -1], gradients[0, b:]]), rows[0])
    clip = float(rows.norm(dim=1).median())
    expected = (rows * (clip / rows.norm(dim=1).clamp_min(clip)).unsqueeze(1)).sum(0)
    found = clipped_gradient(model, x, Y, "ce", plan_jacobian(model, x), clip, {layer: P})
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_one_sample_changes_a_clipped_sum_by_at_most_the_clip() -> None:
    model = NETWORKS["convolution"][0]()
    assert flatten(model).dtype == torch.float32
    x, Y = data((2, 4, 4), "convolution")
    x, Y = 1e3 * x.float(), Y.float()
    plan = plan_jacobian(model, x)
    whole = clipped_gradient(model, x, Y, "ce", plan, 0.1, {})
    less = clipped_gradient(model, x[1:], Y[1:], "ce", plan, 0.1, {})
    assert 0 < float((whole - less).norm()) <= 0.1 * (1 + 1e-4)


@pytest.mark.parametrize("name", ["mlp", "convolution"])
def test_moments_of_inputs_have_norm_one_per_sample(name: str) -> None:
    build, shape = NETWORKS[name]
    model = build().double()
    x, _ = data(shape, name)
    x[0] *= 1e6
    x[1] *= 0
    plan = plan_jacobian(model, x)
    (found,) = input_moments(model, x, plan).values()
    assert torch.allclose(found.trace(), torch.tensor(9.0, dtype=torch.float64))
    ones = [next(iter(input_moments(model, one.unsqueeze(0), plan).values())) for one in x]
    assert all(float(one.norm()) <= 1 + 1e-12 for one in ones)
    assert torch.allclose(sum(ones), found)
    if name == "mlp":
        rows = torch.cat([x / x.square().mean(1, keepdim=True).sqrt().clamp_min(1e-30), torch.ones(9, 1).double()], 1)
        rows = rows / rows.norm(dim=1, keepdim=True)
        assert torch.allclose(found, rows.T @ rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_a_sample_beyond_what_numbers_can_hold_adds_nothing(bad: float) -> None:
    """At extreme weights some samples overflow: they may not take the others, or the bound, with them, nor show."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, Y = torch.randn(6, 3), torch.eye(2)[torch.arange(6) % 2]
    plan = plan_jacobian(model, x)
    with torch.no_grad():
        model[0].weight.mul_(100)
    x[2] = bad
    found = clipped_gradient(model, x, Y, "ce", plan, 0.1, {})
    x[2] = 0
    without = clipped_gradient(model, x, Y, "ce", plan, 0.1, {}) - clipped_gradient(
        model, x[2:3], Y[2:3], "ce", plan, 0.1, {}
    )
    assert torch.allclose(found, without, rtol=0, atol=1e-12)
    x[2] = bad
    assert not clipped_gradient(model, x[2:3], Y[2:3], "ce", plan, 0.1, {}).any()


def test_weights_that_let_positions_cancel_get_no_more_than_a_clip_from_a_record() -> None:
    """Two readout weights M(1 + 2^-13) and -M behind equal patches: in the gradient of the second convolution they
    leave M 2^-13, and the norm made of pairs of positions in float32 loses that beside M. It let 850 clips pass.
    """
    model = ntkfl.models.cnn((1, 16, 16), 10, channels=(4, 8), width=16)
    first, second, hidden, readout = (layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear))
    x, Y = torch.ones(1, 1, 16, 16), torch.eye(10)[:1]
    plan = plan_jacobian(model, x)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        first.bias.fill_(1.0)
        second.bias.fill_(1e-3)
        readout.weight[:, 0] = torch.linspace(-0.05, 0.05, 10)
        for M in (1e5, 1e7, 1e8):
            hidden.weight[0, 0], hidden.weight[0, 1] = M * (1 + 2**-13), -M
            found = clipped_gradient(model, x, Y, "ce", plan, 1.0, {})
            assert 0.9 < float(found.norm()) <= 1.001


@pytest.mark.parametrize("layer", [Layer((0, 36), None, False), Layer((6, 36), (30, 36), False)])
def test_whitening_of_what_is_no_layer_is_refused(layer: Layer) -> None:
    """P would multiply columns whose norm was measured without it."""
    model = NETWORKS["mlp"][0]().double()
    x, Y = data((5,), "mlp")
    P = 4 * torch.eye(6, dtype=torch.float64)
    with pytest.raises(MessageError, match="no such layer"):
        clipped_gradient(model, x, Y, "ce", plan_jacobian(model, x), 1.0, {layer: P})


@pytest.mark.parametrize("size", [1e-200, 1e-42, 1.0, 1e30, 1e200])
def test_lengths_neither_overflow_nor_vanish(size: float) -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64) * size
    assert torch.allclose(lengths(rows), torch.tensor([5 * size, 0.0], dtype=torch.float64), rtol=1e-14, atol=0)
    assert not lengths(torch.tensor([[math.inf, 1.0], [math.nan, 0.0]])).isfinite().any()
