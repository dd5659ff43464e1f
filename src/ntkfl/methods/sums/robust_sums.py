"""Bounds on what a minority of Byzantine clients can do to `sum-ntk-fl`, where each client's sums are seen.

The step is linear in the gradient: Δ = Σ_m P g_m / N, with P from all clients' curvature. A gradient along directions
of little curvature is short and still moves the weights far, so the step P g_m is what is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ntkfl.methods.robust import clip_factors, fair_counts
from ntkfl.tangent import Flow

TRIMMED = 0.2  # share of clients at either end whose losses do not count when two weights are compared
FAR = 10.0  # the most that a client's loss counts for, in units of the median client's


class ClientSums(NamedTuple):
    """A client's gradient, summed over its samples, [d]; how many these are, []; its sums of losses, [1] or [2]."""

    gradient: Tensor
    samples: Tensor
    losses: Tensor


def bounded_gradient(
    flow: Flow, clients: Sequence[ClientSums], limit: float, time: float | None, mu: float, delta: float
) -> tuple[Tensor, int]:
    """The mean gradient Σ_m c_m s_m g_m / Σ_m s_m n_m, [d], and how many clients have c_m s_m < 1.

    s_m ≤ 1 makes a client's samples n_m count for at most `limit` times the median client's; c_m ≤ 1 makes its own step
    P g_m / n_m at most `limit` times as long as the median one.
    """
    samples = torch.stack([client.samples for client in clients])
    steps = flow.step_lengths([client.gradient / client.samples for client in clients], time, mu, delta)
    shares = fair_counts(samples, limit) / samples
    factors = clip_factors(steps, limit) * shares
    gradient = torch.stack([factor * client.gradient for factor, client in zip(factors, clients, strict=True)]).sum(0)
    return gradient / (shares * samples).sum(), int((factors < 1).sum())


def trimmed_losses(clients: Sequence[ClientSums]) -> Tensor:
    """Mean losses [2] without the clients whose loss grew most, and least, from the second weights to the first, and
    with none that drowns the others: a few liars must not make a good step look bad, nor a bad one good.
    """
    losses = torch.stack([client.losses for client in clients])
    samples = torch.stack([client.samples for client in clients]).double()
    order = (losses[:, 0].clamp(min=1e-30).log() - losses[:, 1].clamp(min=1e-30).log()).argsort()
    cut = int(TRIMMED * len(clients))
    kept = order[cut : len(clients) - cut]
    means = losses[kept] / samples[kept].unsqueeze(1)
    most = FAR * means[:, 1].median()
    means = means * (most / means[:, 1].clamp(min=1e-30)).clamp(max=1).unsqueeze(1)
    return (samples[kept] @ means) / samples[kept].sum()
