"""The linearised flow seen from the weights, in closed form: w(t) = w − (I − e^{−tC}) C⁻¹ g.

With C ≈ A ⊗ G for a layer, C's eigenvalues are the products of those of A and G, and its eigenvectors theirs: the flow
multiplies each entry of U_Gᵀ g U_A by φ = (1 − e^{−t(μΛ + δ)}) / (μΛ + δ).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        raise NumericalError("a factor of the curvature is not finite: the training diverged; take a larger μ or δ")
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


class Flow:
    """The flow from where `sums` were taken. `known`: spectra of layers' input factors to use in place of theirs."""

    def __init__(self, sums: Sums, known: Mapping[Layer, Eigen] | None = None) -> None:
        samples = sums.arrays[SAMPLES]
        gradient = sums.arrays[GRADIENT] / samples
        layers = sums.layers()
        self._columns = gradient
        self._samples = float(samples)
        self._parts: list[tuple[Layer, Eigen, Eigen, Tensor]] = []
        for shaped in layers:
            groups, n, m = shaped.shape
            A = (known or {}).get(shaped.layer)
            if A is None:
                if shaped.inputs is None:
                    raise MessageError(f"no factor of the inputs of the layer at columns {shaped.layer.name}")
                A = eigen(shaped.inputs, samples)
            if (len(A.values), A.size) != (groups, m):
                raise MessageError(f"a factor of other inputs than the layer's at columns {shaped.layer.name}")
            G = Eigen(gradient.new_ones(groups, 1), None)
            if shaped.outputs is not None:
                G = eigen(shaped.outputs, samples)
            if shaped.shared:
                G = Eigen(G.values / G.trace.clamp(min=torch.finfo(G.values.dtype).tiny), G.vectors)
            rotated = _rotated(shaped.layer.matrices(gradient, groups, n), A, G)
            self._parts.append((shaped.layer, A, G, rotated))
        self._rest = uncovered(tuple(shaped.layer for shaped in layers), gradient.numel(), gradient.device)
        self._squares = sums.arrays[REST] / samples if len(self._rest) else gradient.new_zeros(0)

    def driven_by(self, gradient: Tensor) -> Flow:
        """The flow with the same curvature and another mean gradient [d]: its change is linear in that."""
        other = copy(self)
        other._columns = gradient
        other._parts = [
            (layer, A, G, _rotated(layer.matrices(gradient, len(A.values), G.size), A, G))
            for layer, A, G, _ in self._parts
        ]
        return other

    def step_lengths(self, gradients: Sequence[Tensor], time: float | None, mu: float, delta: float) -> Tensor:
        """‖w(t) − w‖ that each of these mean gradients [d] alone would drive, [gradients]: eigenvectors turn, and so
        keep lengths, so that nothing is turned back.
        """
        squares = self._columns.new_zeros(len(gradients))
        for layer, A, G, _ in self._parts:
            phi = _phi(mu * G.spectrum.unsqueeze(2) * A.spectrum.unsqueeze(1) + delta, time, self._samples)
            for i, gradient in enumerate(gradients):
                moved = _rotated(layer.matrices(gradient, len(A.values), G.size), A, G) * phi
                squares[i] += moved.square().sum()
        if len(self._rest):
            rest = torch.stack([gradient[self._rest] for gradient in gradients])
            squares += (rest * _phi(mu * self._squares + delta, time, self._samples)).square().sum(1)
        return squares.sqrt()

    def change(self, time: float | None, mu: float, delta: float) -> Tensor:
        """w(t) − w, [d]; time None: the end of the flow, where directions without curvature stay as they are."""
        return self.change_and_curvature(time, mu, delta)[0]

    def change_and_curvature(self, time: float | None, mu: float, delta: float) -> tuple[Tensor, float]:
        """The change Δ = w(t) − w, and Δᵀ C Δ in the factored form of C, without μ and δ."""
        out, curvature = torch.zeros_like(self._columns), 0.0
        for layer, A, G, rotated in self._parts:
            product = G.spectrum.unsqueeze(2) * A.spectrum.unsqueeze(1)
            moved = rotated * _phi(mu * product + delta, time, self._samples)
            curvature += float((product * moved.square()).sum(dtype=torch.float64))
            layer.write(out, -A.rows(G.rows(moved.mT).mT))
        if len(self._rest):
            out[self._rest] = -self._columns[self._rest] * _phi(mu * self._squares + delta, time, self._samples)
            curvature += float((self._squares * out[self._rest].square()).sum(dtype=torch.float64))
        return out, curvature


def _rotated(matrices: Tensor, A: Eigen, G: Eigen) -> Tensor:
    """U_Gᵀ g U_A of a layer's part of the gradient [groups, n, m]."""
    return A.coordinates(G.coordinates(matrices.mT).mT)


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
