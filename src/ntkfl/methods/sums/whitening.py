"""Whitening of a layer's inputs from their second moments, and how it travels: few directions, not a matrix.

P = (A/mean λ + damping)^(−1/2) keeps the `rank` strongest eigenvectors U of A; of the other directions only the mean
eigenvalue counts. With s = (λ/mean λ + damping)^(−1/2), and r that of the others,

    P = r (I − U Uᵀ) + U diag(s) Uᵀ = r I − V Vᵀ,   V = U diag(√(r − s)),

so that V [m, rank] and r say all: 0.16 MB for 784 inputs and 50 directions, where P has 1.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.tangent.sums import Factor, Layer

WHITENING, REST = "whitening/", "rest/"


def triangle(square: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix [m, m] row by row, [m (m + 1) / 2]."""
    rows, columns = torch.triu_indices(*square.shape, device=square.device)
    return square[rows, columns]


def scaled_triangle(A: Tensor) -> Tensor:
    """The triangle of A [m, m], of the same 2-norm as all of A: beside the diagonal times √2."""
    return triangle(A) * _beside(len(A), A)


def unscaled(triangle: Tensor) -> Tensor:
    """A [m, m] of its scaled triangle."""
    m = Factor(triangle.unsqueeze(0)).size
    return Factor((triangle / _beside(m, triangle)).unsqueeze(0)).square()[0]


def directions(summed: Tensor, damping: float, rank: int) -> tuple[Tensor, Tensor]:
    """V [m, at most rank] and r [1] of a (noisy) sum of scaled triangles."""
    A = unscaled(summed)
    m = len(A)
    values, vectors = torch.linalg.eigh(A)
    values = values.clamp_min(0)  # noise may have made some negative
    values = values / values.mean().clamp_min(1e-30)
    kept = min(rank, m - 1)
    rest = (values[: m - kept].mean() + damping).rsqrt()
    strong = (values[m - kept :] + damping).rsqrt()
    return (vectors[:, m - kept :] * (rest - strong).clamp_min(0).sqrt()).contiguous(), rest.view(1)


def whitening_arrays(name: str, V: Tensor, rest: Tensor) -> dict[str, Tensor]:
    """V [m, rank] and r [1] of the layer of this name, as they travel."""
    return {WHITENING + name: V, REST + name: rest}


def is_whitening(name: str) -> bool:
    """Whether an array of this name is a part of one."""
    return name.startswith((WHITENING, REST))


def read_whitening(arrays: Mapping[str, Tensor], like: Tensor, damping: float) -> dict[Layer, Tensor]:
    """P [m, m] of each layer that the arrays name. `MessageError` for arrays that no moments give: of a P that is far
    worse conditioned, rounding would give one sample more than its clip.
    """
    found = {}
    for name, V in arrays.items():
        if not name.startswith(WHITENING):
            continue
        layer = Layer.parse(name.removeprefix(WHITENING))
        rest = arrays.get(REST + layer.name)
        if rest is None or rest.shape != (1,) or V.ndim != 2:
            raise MessageError(
                f"whitening of the layer at columns {layer.name} is not [inputs, directions] and a number"
            )
        check_layer(layer, len(V), like)
        V, r = V.double(), float(rest)
        least, most = (len(V) + damping) ** -0.5, damping**-0.5
        squares = torch.linalg.svdvals(V).square()  # eigenvalues of V Vᵀ, beside zeros
        highest = r if V.shape[1] < len(V) else r - float(squares[-1])
        lowest = r - float(squares[0]) if len(squares) else r
        if not 0.99 * least <= lowest <= highest <= 1.01 * most:
            raise MessageError(f"whitening has eigenvalues outside {least:.3g} … {most:.3g}, as no moments give")
        found[layer] = (r * torch.eye(len(V), dtype=V.dtype, device=V.device) - V @ V.T).to(like)
    return found


def check_layer(layer: Layer, width: int, like: Tensor) -> None:
    """`MessageError` unless weights [d] as `like` may have this layer: `width` inputs, its bias's 1 among them."""
    inputs = width - (layer.bias is not None)
    span = layer.weight[1] - layer.weight[0]
    if inputs < 1 or layer.transposed or span % inputs or layer.weight[1] > like.numel():
        raise MessageError(f"{width} inputs fit no layer at columns {layer.name}")
    if layer.bias is not None and (layer.bias[1] - layer.bias[0] != span // inputs or layer.bias[1] > like.numel()):
        raise MessageError(f"the layer at columns {layer.name} has no such bias")


def _beside(m: int, like: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(m, m, device=like.device)
    return torch.where(rows == columns, 1.0, math.sqrt(2)).to(like)
