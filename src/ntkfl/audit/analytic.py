"""Inputs in closed form out of the first layer's derivatives.

Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, 2018, saw it for gradients: for
out = W x + b, ∂f/∂W = g ⊗ x and ∂f/∂b = g, so a row of one over an entry of the other *is* x. A sample-wise Jacobian
has d2·n_out such rows, all of one x. Factored uploads hold x as it is. Sparsified ones hold some entries: each is a
vote for one coordinate, weighted by g², and a bias that was left out is had from the public weights (two layers: g is
the second's, for units that are on) or from the other coordinates of its row (the block is rank one). What no entry
tells is small, since it was left out, and is bounded: |x_j| < τ/max|g|, with τ the least value sent. Within that bound
the next layer's derivatives, this layer's outputs, give one linear equation a unit, and public inputs a prior.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ntkfl.privacy.projection import Projection
from ntkfl.tangent.blocks import FactoredBlock
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.parameters import column_slices, trainable

Prior = tuple[Tensor, Tensor]  # mean [d1] and covariance [d1, d1], float64
_SWEEPS = 12
_AT_ONCE = 4  # rows that are dense at a time
_ENOUGH = 20  # coordinates that two rows must both tell before they are compared


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer's place in the flat weights: ∂f/∂W [d2, n_out, n_in] at `weight`, ∂f/∂b [d2, n_out] at `bias`."""

    module: nn.Linear
    weight: slice
    bias: slice | None


def linear_layers(model: nn.Module) -> list[LinearLayer]:
    """The linear layers at the front of a perceptron: [flatten,] linear[, ReLU, linear]; [] for other networks. One
    that the network holds twice, or whose weights are tied, is none of them: its derivative is a sum over its uses.
    """
    slices = column_slices(trainable(model))
    held = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
    leaves = [(name, m) for name, m in leaves if not isinstance(m, nn.Flatten | nn.Identity | nn.Dropout)]
    layers: list[LinearLayer] = []
    for name, module in leaves[:3]:
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.Linear) and f"{prefix}weight" in slices and held[id(module.weight)] == 1:
            layers.append(LinearLayer(module, slices[f"{prefix}weight"], slices.get(f"{prefix}bias")))
        elif not (isinstance(module, nn.ReLU) and layers):
            break
    return layers


@dataclass(frozen=True)
class Recovery:
    """Inputs x [n, d1] of the first layer; `known` [n, d1] are coordinates read off entries that were sent, `bound` [n]
    how large the others can be (0 where all are known).
    """

    x: Tensor
    known: Tensor
    bound: Tensor

    @staticmethod
    def whole(x: Tensor) -> Recovery:
        """Inputs of which every coordinate is known."""
        return Recovery(x, torch.ones_like(x, dtype=torch.bool), x.new_zeros(len(x)))


def distances(a: Recovery, b: Recovery) -> Tensor:
    """‖x − x'‖/‖x‖ over the coordinates both tell, [n, m]; infinite where those are few."""
    x, y = a.x.double() * a.known, b.x.double() * b.known
    mine, theirs = a.known.double(), b.known.double()
    size = x.square() @ theirs.T
    square = size - 2 * x @ y.T + mine @ y.square().T
    few = mine @ theirs.T < min(_ENOUGH, (a.x.shape[1] + 1) // 2)  # of a short input, half
    ratio = (square.clamp_min(0) / size.clamp_min(1e-12)).sqrt()
    return ratio.masked_fill(few, float("inf"))


def invert(model: nn.Module, J: Jacobian, prior: Prior | None = None) -> Recovery | None:
    """The first layer's inputs behind the rows of J, taken at the model's present weights. None where there are none:
    a first layer that is neither linear nor sent in factors. (A convolution's derivative is a sum over positions, not
    of rank one; its factored upload holds the picture itself.) `prior` is of public inputs, where inputs are not
    projected.
    """
    first = J.blocks[0]
    layers = linear_layers(model)
    if isinstance(first, FactoredBlock) and first.a.is_floating_point():
        x = first.a[:, 0] if first.a.shape[1] == 1 else first.a
        return Recovery.whole(x.flatten(1))
    if not layers or layers[0].bias is None:
        return None
    parts = [_from_entries(layers, J[i : i + _AT_ONCE].dense(), prior) for i in range(0, len(J), _AT_ONCE)]
    return Recovery(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _from_entries(layers: list[LinearLayer], J: Tensor, prior: Prior | None) -> tuple[Tensor, Tensor, Tensor]:
    """(x, known, bound) from J [n, d2, d], in which entries that were not sent are zero."""
    hidden, seen = None, None
    if len(layers) > 1 and layers[1].bias is not None:
        hidden, seen, _ = vote(layers[1], J, None)
    x, known, g = vote(layers[0], J, _sensitivities(layers, J, hidden))
    threshold = J.abs().masked_fill(J == 0, float("inf")).amin((1, 2))
    strongest = g.abs().amax(1)
    bound = torch.where(known.all(1), 0.0, threshold / strongest.clamp_min(torch.finfo(g.dtype).tiny))
    if hidden is not None and seen is not None and not bool(known.all()):
        rows = zip(x, known, bound, hidden, seen, strict=True)
        x = torch.stack([_refine(layers[0], *row, prior) for row in rows])
    return x, known, bound


def vote(layer: LinearLayer, J: Tensor, sensitivities: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A linear layer's inputs a [n, n_in], which of them any entry tells, and g [n, d2·n_out], by least squares on the
    entries that are there: ∂f/∂[W, b] = g ⊗ [a, 1], with the last factor pinned. `sensitivities` are g where the
    weights give them. A row whose biases were all left out and whose g is not given has no scale: nothing is claimed.
    """
    n, d2 = J.shape[:2]
    many, inputs = layer.module.out_features, layer.module.in_features
    W = J[:, :, layer.weight].reshape(n, d2 * many, inputs)
    b = J[:, :, layer.bias].reshape(n, d2 * many)
    there, pinned = (W != 0).to(W), (b != 0).to(b)
    g = b if sensitivities is None else sensitivities
    tiny = torch.finfo(W.dtype).tiny
    for _ in range(_SWEEPS):
        weight = torch.bmm(g.square().unsqueeze(1), there).squeeze(1)  # Σ g² over the entries of a coordinate
        a = torch.bmm(g.unsqueeze(1), W).squeeze(1) / weight.clamp_min(tiny)
        if sensitivities is not None or bool((g.ne(0) | (there.sum(2) == 0)).all()):
            break  # every row that was sent has its g: nothing left to complete
        square = pinned + torch.bmm(there, a.square().unsqueeze(2)).squeeze(2)
        product = b + torch.bmm(W, a.unsqueeze(2)).squeeze(2)
        g = torch.where(square > 0, product / square.clamp_min(tiny), 0.0)
    return a, weight > 0, g


def _sensitivities(layers: list[LinearLayer], J: Tensor, hidden: Tensor | None) -> Tensor | None:
    """g of the first of two layers, [n, d2·n_out]: the second's weights, for units that are on. The weights are public,
    and a unit of which anything but zero came is on.
    """
    n, d2 = J.shape[:2]
    if len(layers) < 2 or hidden is None or layers[1].module.out_features != d2:
        return None
    many = layers[0].module.out_features
    came = J[:, :, layers[0].weight].reshape(n, d2, many, -1).ne(0).any(3).any(1) | (hidden > 0)
    if layers[0].bias is not None:
        came |= J[:, :, layers[0].bias].ne(0).any(1)
    readout = layers[1].module.weight.detach()  # [d2, n_out]
    return (readout.unsqueeze(0) * came.unsqueeze(1).to(J)).reshape(n, d2 * many)


def _refine(
    layer: LinearLayer, x: Tensor, known: Tensor, bound: Tensor, hidden: Tensor, seen: Tensor, prior: Prior | None
) -> Tensor:
    """Unknown coordinates [n_in] from the equations W_h x + b_h = hidden_h of units that are on.

    The posterior mean of a Gaussian: that of public inputs given the known coordinates, or, without, one of the
    variance of a uniform within ±bound. What it says beyond the bound is cut off.
    """
    on = seen & (hidden > 0)
    limit = float(bound)
    if bool(known.all()) or limit == 0:
        return x
    mean, covariance = _given(prior, x, known, limit)
    W, b = layer.module.weight.detach()[on].double(), layer.module.bias.detach()[on].double()
    A = W[:, ~known]
    rest = hidden[on].double() - b - W[:, known] @ x[known].double() - A @ mean
    # Values may have been rounded, by a hundredth at most: so much of the equation's terms is noise.
    noise = (0.01 * hidden[on].double()).square() + (W[:, known] * (0.005 * x[known])).square().sum(1)
    gain = covariance @ A.T
    found = mean + gain @ torch.linalg.solve(A @ gain + torch.diag(noise + 1e-12), rest)
    out = x.clone()
    out[~known] = found.clamp(-limit, limit).to(x)
    return out


def _given(prior: Prior | None, x: Tensor, known: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the unknown coordinates, given the known ones."""
    unknown = ~known
    count = int(unknown.sum())
    if prior is None:
        variance = min(limit, 1e3) ** 2 / 3
        return torch.zeros(count, dtype=torch.float64), variance * torch.eye(count, dtype=torch.float64)
    mean, covariance = prior
    if not bool(known.any()):
        return mean, covariance
    inner = covariance[known][:, known] + 1e-4 * torch.eye(int(known.sum()), dtype=torch.float64)
    gain = torch.linalg.solve(inner, covariance[known][:, unknown]).T
    given = mean[unknown] + gain @ (x[known].double() - mean[known])
    return given, covariance[unknown][:, unknown] - gain @ covariance[known][:, unknown]


def gaussian_prior(public: Tensor) -> Prior:
    """Mean and covariance (a little above singular) of public inputs [n, ...], in float64."""
    flat = public.flatten(1).double()
    covariance = torch.cov(flat.T)
    return flat.mean(0), covariance + 1e-3 * covariance.diagonal().mean() * torch.eye(len(covariance)).double()


def lift(z: Tensor, projection: Projection, public: Tensor, noise: float = 1e-4) -> Tensor:
    """x [n, d1] behind z = scale·x P given P: the posterior mean under the Gaussian of public inputs, which is
    ridge regression with their covariance.
    """
    P = projection.matrix.double() * projection.scale
    mean, covariance = gaussian_prior(public)
    z = z.double()
    gain = covariance @ P
    inner = P.T @ gain
    inner = inner + noise * inner.diagonal().mean() * torch.eye(len(inner), dtype=torch.float64)
    x: Tensor = mean + torch.linalg.solve(inner, (z - mean @ P).T).T @ gain.T
    return x.to(public)
