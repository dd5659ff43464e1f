"""Full-batch local training with the first layer in the span of the client's rows: exact, with far fewer products.

Every gradient of a first dense layer is a combination of the client's rows, so after any number of full-batch steps
W = W_0 + AᵀX with A [n, n_out]. Its outputs are then X Wᵀ = X W_0ᵀ + (X Xᵀ) A: a step costs n² n_out, with the Gram
matrix made once, instead of twice n n_in n_out, and W itself is made at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

Stacked = dict[str, Tensor]  # parameters of M clients by name, [M, *shape]


class FirstLayer(NamedTuple):
    """A model's first dense layer by name, and the model behind it."""

    name: str
    linear: nn.Linear
    rest: nn.Sequential
    rest_names: dict[str, str]  # the rest's own parameter names -> the model's


def first_layer(model: nn.Module) -> FirstLayer | None:
    """The layer, where the model is a plain sequence that begins with it and it is used once and trained whole."""
    if type(model) is not nn.Sequential or any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return None
    layers = [(name, m) for name, m in model._modules.items() if m is not None]  # a layer used twice is listed twice
    if layers and isinstance(layers[0][1], nn.Flatten) and (layers[0][1].start_dim, layers[0][1].end_dim) == (1, -1):
        layers = layers[1:]
    if len(layers) < 2 or type(layers[0][1]) is not nn.Linear:
        return None
    name, linear = layers[0]
    after = layers[1:]
    assert isinstance(linear, nn.Linear)
    rest = nn.Sequential(*(m for _, m in after))
    own = {id(p) for p in linear.parameters()}
    if linear.bias is None or any(not p.requires_grad for p in linear.parameters()):
        return None
    if any(id(p) in own for p in rest.parameters()):
        return None
    known = {id(p): full for full, p in model.named_parameters() if p.requires_grad}
    return FirstLayer(name, linear, rest, {k: known[id(p)] for k, p in rest.named_parameters() if p.requires_grad})


def pays(layer: FirstLayer, n: int, steps: int) -> bool:
    """Whether the products saved outweigh the Gram matrix and the making of W."""
    n_in, n_out = layer.linear.in_features, layer.linear.out_features
    return n * n * n_in + steps * n * n * n_out + 2 * n * n_in * n_out < steps * 2 * n * n_in * n_out


def train_in_span(
    layer: FirstLayer,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    stacked: Stacked,
    x: Tensor,
    Y: Tensor,
    mask: Tensor,
    rates: Sequence[float | Tensor],
) -> Tensor:
    """Steps of size rates[step] (a number, or one a client) on `stacked`, in place, each on all rows x [M, n, ...].

    Returns the loss at each step and client, [steps, M].
    """
    x = x.flatten(2)
    W, b = stacked[f"{layer.name}.weight"], stacked[f"{layer.name}.bias"]
    others = {k: stacked[full] for k, full in layer.rest_names.items()}
    z = torch.baddbmm(b.unsqueeze(1), x, W.mT)  # the layer's outputs, [M, n, n_out]
    # Rows are centred before their products, [x 1][x 1]ᵀ = CCᵀ + u1ᵀ + 1uᵀ + s11ᵀ: in float32 the mean's large share of
    # XXᵀ would otherwise cost digits of the rest, and samples near a ReLU's kink would fall on its other side.
    # Applied to d as one product: [CCᵀ u 1] [d; 1ᵀd; uᵀd + s1ᵀd].
    M, n, _ = x.shape
    mean = x.mean(1, keepdim=True)
    centred = x - mean
    u, ones = torch.bmm(centred, mean.mT), x.new_ones(M, n, 1)
    gram = torch.cat([torch.bmm(centred, centred.mT), u, ones], dim=2)  # [M, n, n + 2]
    sums = torch.cat([ones, u], dim=2).mT.contiguous()  # [M, 2, n]
    s = torch.bmm(mean, mean.mT).squeeze(1) + 1  # [M, 1]; the 1 is the bias

    def behind(parameters: Stacked, z: Tensor, Y: Tensor, mask: Tensor) -> Tensor:
        return loss(functional_call(layer.rest, parameters, (z,)), Y, mask)

    gradient = vmap(grad_and_value(behind, argnums=(0, 1)), randomness="different")
    A, d = torch.zeros_like(z), z.new_empty(M, n + 2, z.shape[2])
    met = []
    for rate in rates:
        (g, slope), losses = gradient(others, z, Y, mask)
        for name, p in others.items():
            p.sub_(g[name] * shaped(rate, p))
        rows = torch.mul(slope, shaped(rate, slope), out=d[:, :n])
        torch.bmm(sums, rows, out=d[:, n:])
        d[:, n + 1].addcmul_(s, d[:, n])
        A.sub_(rows)
        z = torch.baddbmm(z, gram, d, alpha=-1)
        met.append(losses)
    W.baddbmm_(A.mT, x)
    b.add_(A.sum(1))
    return torch.stack(met)


def shaped(rate: float | Tensor, like: Tensor) -> float | Tensor:
    """A rate a client, [M], made to multiply [M, ...]; one for all as it is."""
    return rate.view(-1, *[1] * (like.ndim - 1)) if isinstance(rate, Tensor) else rate
