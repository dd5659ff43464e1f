"""Steps from sums of curvature, C ≈ A ⊗ G for a layer, in closed form by the factors' eigenvalues and eigenvectors.

C's eigenvalues are the products of those of A and G, and its eigenvectors theirs. With Λ these products, a layer's part
g [n, m] of the mean gradient is U_Gᵀ g U_A in these coordinates, and

    Flow     w(t) − w = −(I − e^{−t(μC + δ)}) (μC + δ)⁻¹ g, which multiplies coordinates by
             φ = (1 − e^{−t(μΛ + δ)}) / (μΛ + δ)
    Metric   P g = (G + (√λ/π) I)⁻¹ g (A + π√λ I)⁻¹,   π² = (tr A / m) / (tr G / n)

with damping λ shared out between the factors in proportion to their mean eigenvalues (Martens & Grosse 2015, section
6.3). A step Δ = −η P g has the squared length ΔᵀCΔ ≤ η² gᵀP g: twice the Kullback–Leibler divergence between
predictions before and after it, for cross-entropy and to second order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from ntkfl.errors import MessageError, NumericalError
from ntkfl.tangent.sums import (
    DIAGONAL,
    GRADIENT,
    REST,
    SAMPLES,
    SKETCH,
    Columns,
    Factor,
    Layer,
    Sums,
    probe_matrix,
    uncovered,
)

_SMALL = 512  # rows of a matrix that a processor decomposes sooner than an accelerator


class Eigen(NamedTuple):
    """A factor's spectrum: values [groups, n], not negative, and vectors [groups, n, n], or None for the identity.

    Of a sketched factor the r leading ones: vectors [groups, n, r], values [groups, r+1], of which the last is that of
    all directions beside them.
    """

    values: Tensor
    vectors: Tensor | None

    @property
    def size(self) -> int:
        """n."""
        return self.values.shape[1] if self.vectors is None else self.vectors.shape[1]

    @property
    def partial(self) -> bool:
        """Whether some directions have no vector of their own."""
        return self.vectors is not None and self.vectors.shape[2] < self.size

    @property
    def spectrum(self) -> Tensor:
        """The eigenvalue of each of `coordinates`, [groups, k]."""
        if not self.partial:
            return self.values
        return torch.cat([self.values[:, :-1], self.values[:, -1:].expand(-1, self.size)], dim=1)

    @property
    def trace(self) -> Tensor:
        """[groups, 1]"""
        beside = self.size - self.values.shape[1] + 1 if self.partial else 1
        return self.values.sum(1, keepdim=True) + (beside - 1) * self.values[:, -1:]

    def coordinates(self, rows: Tensor) -> Tensor:
        """Rows [groups, ·, n] in the eigenbasis, [groups, ·, k]: of a sketched factor those along its r vectors, and
        behind them what is left of the rows, which all has one eigenvalue. Lengths stay as they are.
        """
        if self.vectors is None:
            return rows
        along = rows @ self.vectors
        return torch.cat([along, rows - along @ self.vectors.mT], dim=-1) if self.partial else along

    def rows(self, coordinates: Tensor) -> Tensor:
        """The inverse of `coordinates`."""
        if self.vectors is None:
            return coordinates
        r = self.vectors.shape[2]
        along = coordinates[..., :r] @ self.vectors.mT
        return along + coordinates[..., r:] if self.partial else along


def eigen(factor: Factor, samples: Tensor) -> Eigen:
    """Of a factor's mean over `samples`."""
    mean = Factor(factor.values / samples, factor.form)
    if not bool(mean.values.isfinite().all()):
        raise NumericalError(
            "a factor of the curvature is not finite: the training diverged; take a larger mu, delta or damping"
        )
    if mean.form == DIAGONAL:
        return Eigen(mean.values.clamp(min=0), None)
    if mean.form == SKETCH:
        return _sketched(mean.values)
    square = mean.square()
    try:
        small = square.shape[1] <= _SMALL
        values, vectors = (t.to(square) for t in torch.linalg.eigh(square.cpu() if small else square))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # float32 does not always converge where many values are equal
        values, vectors = (t.to(square) for t in torch.linalg.eigh(square.double().cpu()))
    # Rounding, on the wire too, leaves some values just below zero; vectors come by columns, and files hold rows.
    return Eigen(values.clamp(min=0), vectors.contiguous())


def _sketched(values: Tensor) -> Eigen:
    """Nyström's approximation from Y = A Ω: A ≈ Y (Ωᵀ Y)⁻¹ Yᵀ, and the mean of what its trace lacks for all other
    directions. Y + ν Ω, which belongs to A + ν I, keeps Ωᵀ Y positive where half precision rounds Y by 2⁻¹¹ (Tropp et
    al., Fixed-rank approximation of a positive-semidefinite matrix from streaming data, 2017, Algorithm 3).
    """
    Y, trace = values[..., :-1].double(), values[..., -1].double().sum(1)
    n, r = Y.shape[1:]
    probe = probe_matrix(n, r).to(Y)
    shift = 2.0**-11 * torch.linalg.matrix_norm(Y)[:, None, None].clamp(min=1e-30)
    Y = Y + shift * probe
    inner = probe.mT @ Y
    scales, turn = torch.linalg.eigh((inner + inner.mT) / 2)
    least = scales[:, -1:] * 1e-7
    root = torch.where(scales > least, scales.clamp(min=least).rsqrt(), 0)
    vectors, singular, _ = torch.linalg.svd((Y @ turn) * root.unsqueeze(1), full_matrices=False)
    leading = (singular.square() - shift[:, :, 0]).clamp(min=0)
    beside = ((trace - leading.sum(1)) / (n - r)).clamp(min=0)
    leading = torch.cat([leading, beside.unsqueeze(1)], dim=1)
    return Eigen(leading.to(values), vectors.to(values).contiguous())


class KroneckerBlock(NamedTuple):
    """Columns whose block of C is A ⊗ G for every group: a layer, or all columns of no layer, where C is diagonal."""

    layer: Layer | Columns
    A: Eigen
    G: Eigen
    single: bool  # C's block is A itself, and G = 1

    @property
    def eigenvalues(self) -> Tensor:
        """Λ, [groups, k_G, k_A]."""
        return self.G.spectrum.unsqueeze(2) * self.A.spectrum.unsqueeze(1)

    def matrices(self, gradient: Tensor) -> Tensor:
        """This part g of a gradient [d], [groups, n, m]."""
        return self.layer.matrices(gradient, len(self.A.values), self.G.size)

    def coordinates(self, gradient: Tensor) -> Tensor:
        """U_Gᵀ g U_A of a gradient [d], [groups, k_G, k_A]."""
        return self.A.coordinates(self.G.coordinates(self.matrices(gradient).mT).mT)

    def write(self, out: Tensor, coordinates: Tensor) -> None:
        """The inverse of `coordinates`, into a vector [d]."""
        self.layer.write(out, self.A.rows(self.G.rows(coordinates.mT).mT))


def decomposed(sums: Sums, known: Mapping[Layer, Eigen] | None = None) -> list[KroneckerBlock]:
    """The parts of C, the mean over the samples. `known`: spectra of input factors to use in place of the sums' own."""
    samples, layers, parts = sums.arrays[SAMPLES], sums.layers(), list[KroneckerBlock]()
    one = sums.arrays[GRADIENT].new_ones(1, 1)
    for shaped in layers:
        groups, _, m = shaped.shape
        A = (known or {}).get(shaped.layer)
        if A is None:
            if shaped.inputs is None:
                raise MessageError(f"no factor of the inputs of the layer at columns {shaped.layer.name}")
            A = eigen(shaped.inputs, samples)
        if (len(A.values), A.size) != (groups, m):
            raise MessageError(f"a factor of other inputs than the layer's at columns {shaped.layer.name}")
        single = shaped.outputs is None
        G = Eigen(one.expand(groups, 1), None) if shaped.outputs is None else eigen(shaped.outputs, samples)
        if shaped.shared:  # A and G both have the trace of C's block
            G = Eigen(G.values / G.trace.clamp(min=torch.finfo(G.values.dtype).tiny), G.vectors)
        parts.append(KroneckerBlock(shaped.layer, A, G, single))
    rest = uncovered(tuple(shaped.layer for shaped in layers), sums.arrays[GRADIENT].numel(), samples.device)
    if len(rest):
        squares = eigen(Factor(sums.arrays[REST].unsqueeze(0), DIAGONAL), samples)
        parts.append(KroneckerBlock(Columns(rest), squares, Eigen(one, None), True))
    return parts


class Flow:
    """The flow from where `sums` were taken. `known`: spectra of layers' input factors to use in place of theirs."""

    def __init__(self, sums: Sums, known: Mapping[Layer, Eigen] | None = None) -> None:
        self._samples = float(sums.arrays[SAMPLES])
        self._parts = decomposed(sums, known)
        self._begin(sums.arrays[GRADIENT] / sums.arrays[SAMPLES])

    def _begin(self, gradient: Tensor) -> None:
        self._gradient = gradient
        self._coordinates = [part.coordinates(gradient) for part in self._parts]

    def driven_by(self, gradient: Tensor) -> Flow:
        """The flow with the same curvature and another mean gradient [d]: its change is linear in that."""
        other = copy(self)
        other._begin(gradient)
        return other

    def _phis(self, time: float | None, mu: float, delta: float) -> Iterator[tuple[KroneckerBlock, Tensor]]:
        """Each part with its φ."""
        for part in self._parts:
            yield part, _phi(mu * part.eigenvalues + delta, time, self._samples)

    def step_lengths(self, gradients: Sequence[Tensor], time: float | None, mu: float, delta: float) -> Tensor:
        """‖w(t) − w‖ that each of these mean gradients [d] alone would drive, [gradients]: eigenvectors turn, and so
        keep lengths, so that nothing is turned back.
        """
        squares = self._gradient.new_zeros(len(gradients))
        for part, phi in self._phis(time, mu, delta):
            squares += torch.stack([(part.coordinates(gradient) * phi).square().sum() for gradient in gradients])
        return squares.sqrt()

    def change(self, time: float | None, mu: float, delta: float) -> Tensor:
        """w(t) − w, [d]; time None: the end of the flow, where directions without curvature stay as they are."""
        return self.change_and_curvature(time, mu, delta)[0]

    def change_and_curvature(self, time: float | None, mu: float, delta: float) -> tuple[Tensor, float]:
        """The change Δ = w(t) − w, and Δᵀ C Δ in the factored form of C, without μ and δ."""
        out, curvature = torch.zeros_like(self._gradient), 0.0
        for (part, phi), coordinates in zip(self._phis(time, mu, delta), self._coordinates, strict=True):
            moved = coordinates * phi
            curvature += float((part.eigenvalues * moved.square()).sum(dtype=torch.float64))
            part.write(out, -moved)
        return out, curvature


def _phi(rate: Tensor, time: float | None, samples: float) -> Tensor:
    """(1 − e^{−t·rate}) / rate, which is t where the rate is 0."""
    some = rate.clamp(min=torch.finfo(rate.dtype).tiny)
    if time is None:
        # The pseudo-inverse: what rounding made of no curvature counts as none. An eigenvalue of a factor of n rows,
        # summed over N samples, is wrong by about (n + √N) ε of the largest.
        lost = sum(rate.shape[-2:]) + 2 * math.sqrt(samples)
        least = rate.amax() * lost * torch.finfo(rate.dtype).eps
        return torch.where(rate > least, 1 / some, 0)
    return torch.where(rate > 0, -torch.expm1(-time * some) / some, time)


class Metric:
    """P of sums over samples at some weights: `metric(g)` is P g for a gradient g [d].

    Made once, at the cost of decomposing the factors, n³ operations each; P g costs two small products per layer.
    """

    def __init__(self, sums: Sums, damping: float) -> None:
        self._parts: list[tuple[KroneckerBlock, _Product, _Product]] = []
        for part in decomposed(sums):
            if part.single:
                self._parts.append((part, _inverse(part.A, damping), lambda rows: rows))
                continue
            least = torch.finfo(part.A.values.dtype).tiny
            means = [own.trace.clamp(min=least) / own.size for own in (part.A, part.G)]
            pi, root = (means[0] / means[1]).sqrt(), math.sqrt(damping)
            self._parts.append((part, _inverse(part.A, pi * root), _inverse(part.G, root / pi)))

    def __call__(self, gradient: Tensor) -> Tensor:
        """P g, [d] -> [d]."""
        out = torch.zeros_like(gradient)
        for part, A, G in self._parts:
            part.layer.write(out, G(A(part.matrices(gradient)).mT).mT)
        return out


_Product = Callable[[Tensor], Tensor]  # of rows [groups, ·, n] with a matrix


def _inverse(own: Eigen, damping: Tensor | float) -> _Product:
    """Rows times (M + r I)⁻¹, r > 0 [groups, 1]: by a matrix where M has all its eigenvectors. What half precision on
    the way made of M's smallest eigenvalues is not below zero in `own`, so that the inverse is positive.
    """
    scale = 1 / (own.spectrum + damping)
    if own.vectors is None or own.partial:
        return lambda rows: own.rows(own.coordinates(rows) * scale.unsqueeze(1))
    matrix = (own.vectors * scale.unsqueeze(1)) @ own.vectors.mT
    return lambda rows: rows @ matrix
