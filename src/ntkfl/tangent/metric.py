"""A metric for steps, from the curvature of many samples: damped inverses of its Kronecker factors.

C ≈ A ⊗ G for a layer. Damping λ is shared out between the factors in proportion to their mean eigenvalues (Martens &
Grosse 2015, section 6.3):

    P g = (G + (√λ/π) I)⁻¹ g (A + π√λ I)⁻¹,   π² = (tr A / m) / (tr G / n)

for the layer's part g [n, m] of a gradient. A step Δ = −η P g then has the squared length ΔᵀCΔ ≤ η² gᵀP g: twice the
Kullback–Leibler divergence between predictions before and after it, for cross-entropy and to second order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ntkfl.errors import MessageError, NumericalError
from ntkfl.tangent.flow import Eigen, eigen
from ntkfl.tangent.sums import REST, SAMPLES, Factor, Layer, Sums, uncovered

_TRIES = 20  # tenfold dampings, until what rounding left of a factor is positive


class _Inverse(NamedTuple):
    """(M + r I)⁻¹ for the mean M of a factor: as matrices [groups, n, n], or by the spectrum of a sketched or diagonal
    factor.
    """

    matrix: Tensor | None
    spectrum: Eigen | None
    damping: Tensor  # r, [groups, 1]

    def times(self, rows: Tensor) -> Tensor:
        """Rows [groups, ·, n] times the inverse."""
        if self.matrix is not None:
            return rows @ self.matrix
        assert self.spectrum is not None
        return self.spectrum.rows(
            self.spectrum.coordinates(rows) / (self.spectrum.spectrum + self.damping).unsqueeze(1)
        )


class Metric:
    """P of sums over samples at some weights: `metric(g)` is P g for a gradient g [d].

    Made once, at the cost of an inverse per factor, n³ operations each; P g costs two small products per layer.
    """

    def __init__(self, sums: Sums, damping: float, d: int) -> None:
        samples = sums.arrays[SAMPLES]
        self._parts: list[tuple[Layer, int, _Inverse, _Inverse | None]] = []
        layers = sums.layers()
        for shaped in layers:
            if shaped.inputs is None:
                raise MessageError(f"no factor of the inputs of the layer at columns {shaped.layer.name}")
            groups, n, m = shaped.shape
            A = Factor(shaped.inputs.values / samples, shaped.inputs.form)
            if shaped.outputs is None:  # the block itself
                self._parts.append((shaped.layer, 1, _inverse(A, A.values.new_full((groups, 1), damping)), None))
                continue
            G = Factor(shaped.outputs.values / samples, shaped.outputs.form)
            if shaped.shared:  # A and G both have the block's trace
                trace = _trace(G).clamp(min=torch.finfo(G.values.dtype).tiny)
                G = Factor(G.values / (trace.unsqueeze(2) if G.values.ndim == 3 else trace), G.form)
            least = torch.finfo(A.values.dtype).tiny
            pi = (_trace(A).clamp(min=least) / m / (_trace(G).clamp(min=least) / n)).sqrt()
            root = math.sqrt(damping)
            self._parts.append((shaped.layer, n, _inverse(A, pi * root), _inverse(G, root / pi)))
        self._rest = uncovered(tuple(shaped.layer for shaped in layers), d, samples.device)
        self._squares = sums.arrays[REST] / samples + damping if len(self._rest) else samples.new_zeros(0)

    def __call__(self, gradient: Tensor) -> Tensor:
        """P g, [d] -> [d]."""
        out = torch.zeros_like(gradient)
        for layer, n, A, G in self._parts:
            own = A.times(layer.matrices(gradient, len(A.damping), n))
            layer.write(out, own if G is None else G.times(own.mT).mT)
        out[self._rest] = gradient[self._rest] / self._squares
        return out


def _trace(factor: Factor) -> Tensor:
    """[groups, 1]."""
    if factor.form:
        return eigen(factor, factor.values.new_ones(())).trace
    return factor.square().diagonal(dim1=1, dim2=2).sum(1, keepdim=True)


def _inverse(factor: Factor, damping: Tensor) -> _Inverse:
    """Of a factor's mean, damped. Where half precision on the way has left it indefinite, damped tenfold, and so on."""
    if factor.form:
        return _Inverse(None, eigen(factor, factor.values.new_ones(())), damping)
    square = factor.square().double()
    unit = torch.eye(square.shape[1], dtype=torch.float64, device=square.device)
    for more in range(_TRIES):
        root, failed = torch.linalg.cholesky_ex(square + 10.0**more * damping.double().unsqueeze(2) * unit)
        if not bool(failed.any()):
            return _Inverse(torch.cholesky_inverse(root).to(damping), None, 10.0**more * damping)
    raise NumericalError("a factor of the curvature is not finite: the training diverged")
