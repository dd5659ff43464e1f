"""Bounds on what a minority of Byzantine clients does to NTK-FL from sums, where each client's sums are seen.

The step is linear in the gradient: w(t) − w = Σ_m P g_m / N, with P of all clients' curvature. A gradient with a large
part where there is little curvature is short and moves the weights far, so it is the step P g_m that is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ntkfl.methods.robust import clip_factors, fair_counts
from ntkfl.tangent import Flow, Sums
from ntkfl.tangent.sums import GRADIENT, SAMPLES


class ClientGradient(NamedTuple):
    """A client's gradient, summed over its samples, [d], and how many these are, []."""

    gradient: Tensor
    samples: Tensor

    @staticmethod
    def of(sums: Sums) -> ClientGradient:
        return ClientGradient(sums.arrays[GRADIENT], sums.arrays[SAMPLES])


def bounded(
    flow: Flow, clients: Sequence[ClientGradient], limit: float, time: float | None, mu: float, delta: float
) -> tuple[Flow, int]:
    """`flow`, driven by Σ_m c_m s_m g_m / Σ_m s_m n_m, and how many clients have c_m s_m < 1.

    s_m ≤ 1 makes a client's samples n_m count for `limit` times the median client's at most, c_m ≤ 1 its own step
    P g_m / n_m as long as `limit` times the median one at most.
    """
    samples = torch.stack([own.samples for own in clients])
    steps = flow.step_lengths([own.gradient / own.samples for own in clients], time, mu, delta)
    shares = fair_counts(samples, limit) / samples
    factors = clip_factors(steps, limit) * shares
    if not bool((factors < 1).any()):
        return flow, 0
    gradient = torch.stack([factor * own.gradient for factor, own in zip(factors, clients, strict=True)]).sum(0)
    return flow.driven_by(gradient / (shares * samples).sum()), int((factors < 1).sum())
