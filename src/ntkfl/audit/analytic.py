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
    """A linear layer out = W x + b [n_out], and the columns that W and b take of the network's weights [d]."""

    module: nn.Linear
    weight: slice
    bias: slice

    def matrices(self, vectors: Tensor) -> Tensor:
        """Its columns of vectors [..., d] as the derivatives by [W, b], [..., n_out, n_in + 1]."""
        W = vectors[..., self.weight].view(*vectors.shape[:-1], self.module.out_features, -1)
        return torch.cat([W, vectors[..., self.bias].unsqueeze(-1)], -1)


def linear_layers(model: nn.Module) -> list[LinearLayer]:
    """The linear layers with a bias at the front of a perceptron: [flatten,] linear[, ReLU, linear]; [] for other
    networks. One that the network holds twice, or whose weights are tied, is none of them: its derivative is a sum over
    its uses.
    """
    slices = column_slices(trainable(model))
    held = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
    leaves = [(name, m) for name, m in leaves if not isinstance(m, nn.Flatten | nn.Identity | nn.Dropout)]
    layers: list[LinearLayer] = []
    for name, module in leaves[:3]:
        weight, bias = (slices.get(f"{name}.{part}".lstrip(".")) for part in ("weight", "bias"))
        if isinstance(module, nn.Linear) and weight and bias and held[id(module.weight)] == 1:
            layers.append(LinearLayer(module, weight, bias))
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
    if isinstance(first, FactoredBlock) and first.weight and first.weight.start == 0 and first.a.is_floating_point():
        x = first.a[:, 0] if first.a.shape[1] == 1 else first.a
        return Recovery.whole(x.flatten(1))
    layers = linear_layers(model)
    if not layers:
        return None
    parts = [_from_entries(layers, J[i : i + _AT_ONCE].dense(), prior) for i in range(0, len(J), _AT_ONCE)]
    return Recovery(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _from_entries(layers: list[LinearLayer], J: Tensor, prior: Prior | None) -> tuple[Tensor, Tensor, Tensor]:
    """(x, known, bound) from J [n, d2, d], in which entries that were not sent are zero."""
    if len(layers) < 2:
        x, known, g = vote(layers[0], J)
        return x, known, _bound(J, known, g)
    first, second = layers
    hidden, seen, _ = vote(second, J)
    readout = second.module.weight.detach() if second.module.out_features == J.shape[1] else None
    sensitivities = None
    if readout is not None:
        # ∂f/∂(unit) is the readout's weight, which is public, for units that are on: those of which anything came.
        on = first.matrices(J).ne(0).any(3).any(1) | (hidden > 0)
        sensitivities = (readout * on.unsqueeze(1)).flatten(1).to(J)
    x, known, g = vote(first, J, sensitivities)
    bound = _bound(J, known, g)
    rows = zip(x, known, bound, hidden, seen, strict=True)
    return torch.stack([_refine(first, *row, prior) for row in rows]), known, bound


def _bound(J: Tensor, known: Tensor, g: Tensor) -> Tensor:
    """|x_j| < τ/max|g| of what was not sent, τ being the least value sent of the row: [n]; 0 where all is known."""
    threshold = J.abs().masked_fill(J == 0, float("inf")).amin((1, 2))
    strongest = g.abs().amax(1).clamp_min(torch.finfo(g.dtype).tiny)
    return torch.where(known.all(1), 0.0, threshold / strongest)


def vote(layer: LinearLayer, J: Tensor, sensitivities: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A linear layer's inputs a [n, n_in], which of them any entry tells, and g [n, d2·n_out], by least squares on the
    entries that are there: ∂f/∂[W, b] = g ⊗ [a, 1], with the last factor pinned. `sensitivities` are g where the
    weights give them. A row whose biases were all left out and whose g is not given has no scale: nothing is claimed.
    """
    entries = layer.matrices(J).flatten(1, 2)  # [n, d2·n_out, n_in + 1]
    there, tiny = (entries != 0).to(J), torch.finfo(J.dtype).tiny
    g = entries[:, :, -1] if sensitivities is None else sensitivities
    for _ in range(_SWEEPS):
        weight = torch.einsum("nu,nui->ni", g.square(), there)  # Σ g² over the entries of a coordinate
        a = torch.einsum("nu,nui->ni", g, entries) / weight.clamp_min(tiny)
        a[:, -1] = 1
        if sensitivities is not None or bool((g.ne(0) | (there.sum(2) == 0)).all()):
            break  # every row that was sent has its g: nothing left to complete
        square, product = (torch.einsum("nui,ni->nu", m, v) for m, v in ((there, a.square()), (entries, a)))
        g = torch.where(square > 0, product / square.clamp_min(tiny), 0.0)
    return a[:, :-1], weight[:, :-1] > 0, g


def _refine(
    layer: LinearLayer, x: Tensor, known: Tensor, bound: Tensor, hidden: Tensor, seen: Tensor, prior: Prior | None
) -> Tensor:
    """Unknown coordinates [n_in] from the equations W_h x + b_h = hidden_h of units that are on.

    The posterior mean of a Gaussian: that of public inputs given the known coordinates, or, without, one of the
    variance of a uniform within ±bound. What it says beyond the bound is cut off.
    """
    on, limit = seen & (hidden > 0), float(bound)
    if limit == 0:
        return x
    given = _given(prior, x, known, limit)
    W, b = layer.module.weight.detach()[on].double(), layer.module.bias.detach()[on].double()
    rest = hidden[on].double() - b - W[:, known] @ x[known].double()
    # Values may have been rounded, by a hundredth at most: so much of the equation's terms is noise.
    noise = (0.01 * hidden[on].double()).square() + (W[:, known] * (0.005 * x[known])).square().sum(1)
    out = x.clone()
    out[~known] = _posterior(given, W[:, ~known], rest.unsqueeze(0), noise + 1e-12)[0].clamp(-limit, limit).to(x)
    return out


def _posterior(prior: Prior, A: Tensor, y: Tensor, noise: Tensor) -> Tensor:
    """E[x | A x + N(0, diag(noise)) = y] with x from the prior: [n, d1] for A [k, d1], y [n, k] and noise [k]."""
    mean, covariance = prior
    gain = covariance @ A.T
    found: Tensor = mean + torch.linalg.solve(A @ gain + torch.diag(noise), (y - mean @ A.T).T).T @ gain.T
    return found


def _given(prior: Prior | None, x: Tensor, known: Tensor, limit: float) -> Prior:
    """Mean and covariance of the unknown coordinates, given the known ones."""
    if prior is None:
        mean = torch.zeros(int((~known).sum()), dtype=torch.float64)
        return mean, min(limit, 1e3) ** 2 / 3 * torch.eye(len(mean), dtype=torch.float64)
    mean, covariance = prior
    across = covariance[known][:, ~known]
    inner = covariance[known][:, known] + 1e-4 * torch.eye(len(across), dtype=torch.float64)
    gain = torch.linalg.solve(inner, across).T
    return mean[~known] + gain @ (x[known].double() - mean[known]), covariance[~known][:, ~known] - gain @ across


def gaussian_prior(public: Tensor) -> Prior:
    """Mean and covariance (a little above singular) of public inputs [n, ...], in float64."""
    flat = public.flatten(1).double()
    covariance = torch.cov(flat.T)
    return flat.mean(0), covariance + 1e-3 * covariance.diagonal().mean() * torch.eye(len(covariance)).double()


def lift(z: Tensor, projection: Projection, public: Tensor, noise: float = 1e-4) -> Tensor:
    """x [n, d1] behind z = scale·x P given P: the posterior mean under the Gaussian of public inputs, which is
    ridge regression with their covariance.
    """
    A, prior = (projection.matrix.double() * projection.scale).T, gaussian_prior(public)
    variances = ((A @ prior[1]) * A).sum(1)
    return _posterior(prior, A, z.double(), noise * variances.mean().expand(len(A))).to(public)
