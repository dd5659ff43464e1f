"""Full-batch local training with the first layer in the span of the client's rows: exact, with far fewer products.

Every gradient of a first dense layer is a combination of the client's rows, so after any number of full-batch steps
W = W_0 + AᵀX with A [n, n_out]. Its outputs are then X Wᵀ = X W_0ᵀ + (X Xᵀ) A: a step costs n² n_out, with the Gram
matrix made once, instead of twice n n_in n_out, and W itself is made at the end.

Precision. Local training often runs where η times the largest curvature λ of the loss exceeds 2 for many steps. Such a
step multiplies the rounding errors of those before it by |1 - ηλ| > 1 along that direction. In the problem of
`test_float32_stays_as_close_as_the_loop_does` ηλ reaches 3.2, and the Jacobian of its 40 steps has a norm of 363: where
an error of 6e-8 ends, between 1e-7 and 3e-5, is decided by the order in which a processor adds. Over 80 such problems
the error of Gram-space steps in float32 had a median of 1.05 times the plain loop's, and was between a hundredth of it
and 78 times it. No other order of float32 operations mends that: with only the layers behind in float32 and everything
else in float64, the error was still eight times the loop's. So everything here is float64: what remains is that norm
times 1e-16, and the rounding of the result to the weights' precision. Rows far from zero then need no centring either.
A float64 product takes twice the time of a float32 one, which `pays` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from ntkfl.tangent.parameters import call_with

Stacked = dict[str, Tensor]  # parameters of M clients by name, [M, *shape]


class FirstLayer(NamedTuple):
    """A model's first dense layer by name, and the model behind it."""

    name: str
    linear: nn.Linear
    rest: nn.Sequential
    rest_names: dict[str, str]  # the rest's own parameter names -> the model's


def first_layer(model: nn.Module) -> FirstLayer | None:
    """The layer, where the model is a plain sequence that begins with it and it is used once and trained whole.

    The layers behind must be PyTorch's own: others may hold constants in float32, which float64 rows do not multiply.
    """
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
    if any(not type(m).__module__.startswith("torch.nn.") for m in rest.modules()):
        return None
    known = {id(p): full for full, p in model.named_parameters() if p.requires_grad}
    return FirstLayer(name, linear, rest, {k: known[id(p)] for k, p in rest.named_parameters() if p.requires_grad})


def pays(layer: FirstLayer, n: int, steps: int) -> bool:
    """Whether the products saved outweigh the Gram matrix, the making of W, and float64 throughout.

    On a CPU alone: elsewhere float64 takes from twice to 64 times as long as float32, or does not exist.
    """
    weight = layer.linear.weight
    if weight.device.type != "cpu":
        return False
    (n_out, n_in), behind = weight.shape, sum(p.numel() for p in layer.rest.parameters())
    twice = 1 if weight.dtype == torch.float64 else 2
    ours = n * n * n_in + 2 * n * n_in * n_out + steps * (n * n * n_out + 3 * n * behind)
    return twice * ours < steps * (2 * n * n_in * n_out + 3 * n * behind)


def train_in_span(
    layer: FirstLayer,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    stacked: Stacked,
    x: Tensor,
    Y: Tensor,
    mask: Tensor,
    rates: Sequence[float | Tensor],
) -> Tensor:
    """Steps of size rates[step] (a number, or one per client) on `stacked`, in place, each on all rows x [M, n, ...].

    Computed in float64, rounded to the precision of `stacked` at the end. Returns the loss at each step and client,
    [steps, M].
    """
    weight, bias = stacked[f"{layer.name}.weight"], stacked[f"{layer.name}.bias"]
    x, W, b = x.flatten(2).double(), weight.double(), bias.double()
    Y, mask = Y.double(), mask.double()
    behind = {k: stacked[full].double() for k, full in layer.rest_names.items()}
    others = [*layer.rest.named_parameters(), *layer.rest.named_buffers()]  # each once, unlike in a state_dict
    fixed = {k: t.detach().double() for k, t in others if k not in behind and t.is_floating_point()}
    z = torch.baddbmm(b.unsqueeze(1), x, W.mT)  # the layer's outputs, [M, n, n_out]
    gram = torch.bmm(x, x.mT).add_(1)  # [M, n, n]; the 1 is the bias

    def loss_behind(parameters: Stacked, z: Tensor, Y: Tensor, mask: Tensor) -> Tensor:
        return loss(call_with(layer.rest, {**fixed, **parameters}, z), Y, mask)

    gradient = vmap(grad_and_value(loss_behind, argnums=(0, 1)), randomness="different")
    A = torch.zeros_like(z)
    met = []
    for rate in rates:
        (g, slope), losses = gradient(behind, z, Y, mask)
        for name, p in behind.items():
            p.sub_(g[name] * shaped(rate, p))
        d = slope.mul_(shaped(rate, slope))
        A.sub_(d)
        z.baddbmm_(gram, d, alpha=-1)
        met.append(losses)
    weight.copy_(torch.baddbmm(W, A.mT, x))
    bias.copy_(b + A.sum(1))
    for name, full in layer.rest_names.items():
        stacked[full].copy_(behind[name])
    return torch.stack(met).to(weight.dtype)


def shaped(rate: float | Tensor, like: Tensor) -> float | Tensor:
    """A rate per client, [M], made to multiply [M, ...]; one for all as it is."""
    return rate.view(-1, *[1] * (like.ndim - 1)) if isinstance(rate, Tensor) else rate
