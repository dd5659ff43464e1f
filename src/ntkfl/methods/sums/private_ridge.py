"""Ridge regression of the last layer from sums with differential privacy, in one round, after He et al. 2025 with
distributed noise (Kairouz et al. 2021).

With a = (φ, 1) for features φ [F] and targets t [d2] of norm at most 1, every sample scaled down to ‖a‖ ≤ clip, a
record changes each of the clients' sums

    G = Σ a aᵀ / clip²,   C = Σ a tᵀ / clip

by at most 1. They leave as integers with noise (`noisy_sums.py`) of one width. Noise of standard
deviation σ on G is a random symmetric matrix whose eigenvalues fill [−2s, 2s], s = σ √(p/2): far more than most of G's
own. So the eigenvectors u of noisy G are kept, and its eigenvalues e are replaced by what uᵀ G u is on average (Bun,
Bouchaud, Potters, Cleaning large correlation matrices, 2017), which the noisy eigenvalues alone tell:

    ξ_i = e_i − 2 s² Re g(e_i − iη),     g(z) = 1/p Σ_j 1/(z − e_j),     η = 2s/√p
    W = U (ξ + λ)⁻¹ Uᵀ C,                λ in units of 2s

Features that all have one norm lose nothing to clipping: end the backbone with `nn.LayerNorm(F,
elementwise_affine=False)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ntkfl.methods.base import Outcome, Round
from ntkfl.methods.replies import WEIGHTS
from ntkfl.methods.sums.last_layer import head_inputs, last_layer
from ntkfl.methods.sums.noisy_sums import LARGEST, NoisyIntegers, NoisySums, scaled_triangle, unscaled
from ntkfl.methods.task import ClientRound, State, Task, check_finite
from ntkfl.privacy.settings import Privacy
from ntkfl.wire.message import Message

_GRAM, _CROSS = "gram", "cross"
_SMALL = 1e-6  # of G's mean eigenvalue, added to all: sums without noise may be singular


class RidgeIntegers(NoisyIntegers):
    """`gram`, the scaled triangle of G [p (p + 1) / 2], and `cross`, C [p · d2] row by row."""

    @classmethod
    def numbers(cls, task: Task) -> dict[str, int]:
        """p (p + 1) / 2 and p · d2."""
        p = _size(task)
        return {_GRAM: p * (p + 1) // 2, _CROSS: p * task.outputs}


class PrivateRidge(NoisySums):
    """W = U (ξ + λ)⁻¹ Uᵀ (C + noise) from G + noise = U e Uᵀ."""

    name = "private-ridge"
    replies = {"weights": RidgeIntegers}
    _privacy: ClassVar[Privacy] = Privacy(epsilon=3.0, budget_rounds=1)
    grains = 2**16  # rounding must not count beside the millions of numbers of G
    rounding = 1e-6  # norms are computed in float64

    clip: float | None = Field(
        None, gt=0, description="bound on the 2-norm of a sample's features with the bias's 1; none: √(features + 1)"
    )
    penalty: float = Field(0.3, ge=0, description="λ, in units of the largest eigenvalue of G's noise")

    def limit(self, privacy: Privacy, name: str) -> float:
        """One sample's number is at most 1, √2 beside the diagonal of G."""
        return min(math.sqrt(2) * self.grains * privacy.sum_samples, LARGEST)

    def start(self, task: Task, weights: Tensor) -> State:
        self.check_round(task, 1)
        return super().start(task, weights)

    def round(self, task: Task, state: State, round: int, cohort: Sequence[int]) -> Round:
        """The only round: noisy G and C of the whole cohort, G's eigenvalues cleaned, and the layer solved for."""
        self.check_round(task, round, cohort)
        replies = yield Message("weights", round, {WEIGHTS: state[WEIGHTS]})
        total = self.total(task, replies)
        layer, p = last_layer(task.model, task.outputs), _size(task)
        noise = math.sqrt(task.privacy.noise_clients) * self.widths(task, RidgeIntegers.numbers(task))[_GRAM]
        gram, cross = total[_GRAM] / self.grains, total[_CROSS].view(p, -1) / self.grains
        solved = self.solve(gram, cross, noise / self.grains) / self._clip(p)
        weights = check_finite(layer.write(state[WEIGHTS], solved), "the solution")
        return Outcome({WEIGHTS: weights}, None, None, self.spent(task, round))

    def solve(self, gram: Tensor, cross: Tensor, noise: float) -> Tensor:
        """The weights [p, d2] from a scaled triangle of G with noise of this deviation, and C [p, d2], in float64."""
        values, vectors = torch.linalg.eigh(unscaled(gram))
        edge = 2 * noise * math.sqrt(len(cross) / 2)
        clean = cleaned(values, edge)
        floor = self.penalty * edge + _SMALL * clean.mean()
        solved: Tensor = vectors @ ((vectors.mT @ cross) / (clean + floor).unsqueeze(1))
        return solved

    def answer(self, task: Task, question: Message, client: ClientRound) -> NoisyIntegers:
        """G and C of the client as integers with noise. One forward pass; memory of p² numbers of float64."""
        self.check_round(task, question.of_kind("weights").round)
        model = task.at(question.vector(WEIGHTS, task.like))
        p, targets = _size(task), task.training_targets(client.y).double()
        gram, cross = targets.new_zeros(p, p), targets.new_zeros(p, targets.shape[1])
        most = 1 if task.one_by_one else 4096
        for rows, features in head_inputs(model, task.outputs, client.x, most):
            a = torch.cat([features.double(), targets.new_ones(len(features), 1)], dim=1)
            a, t = _at_most_one(a / self._clip(p)), _at_most_one(targets[rows])
            gram += a.mT @ a
            cross += a.mT @ t
        return self.integers(task, question, client, {_GRAM: scaled_triangle(gram), _CROSS: cross.reshape(-1)})

    def _clip(self, p: int) -> float:
        """The bound on a sample's norm: that of p numbers of mean square 1, where nobody gave one."""
        return math.sqrt(p) if self.clip is None else self.clip


def _size(task: Task) -> int:
    """p, the last layer's inputs and the bias's 1."""
    return last_layer(task.model, task.outputs).module.in_features + 1


def cleaned(values: Tensor, edge: float) -> Tensor:
    """ξ [p]: what the matrix without noise has, on average, along the eigenvectors of the noisy one with these
    `values` [p], where the eigenvalues of the noise fill [−edge, edge]; not below 0.
    """
    if edge == 0:
        return values.clamp(min=0)
    apart = values.unsqueeze(1) - values.unsqueeze(0)
    eta = edge / math.sqrt(len(values))
    return (values - edge**2 / 2 * (apart / (apart.square() + eta**2)).mean(1)).clamp(min=0)


def _at_most_one(rows: Tensor) -> Tensor:
    """Rows [n, m] scaled down to norm 1; those that are not finite become zero."""
    norms = rows.norm(dim=1, keepdim=True)
    return torch.where(norms.isfinite(), rows / norms.clamp(min=1), torch.zeros_like(rows))
