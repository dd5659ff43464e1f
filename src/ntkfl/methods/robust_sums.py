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
from ntkfl.methods.sum_messages import Reply
from ntkfl.tangent import Flow
from ntkfl.tangent.sums import GRADIENT, SAMPLES

TRIMMED = 0.2  # of the clients, at either end, whose losses do not count when two weights are compared
FAR = 10.0  # how many times the median client's loss a client's counts for at most


class ClientSums(NamedTuple):
    """A client's gradient, summed over its samples, [d]; how many these are, []; its sums of losses, [1] or [2]."""

    gradient: Tensor
    samples: Tensor
    losses: Tensor

    @staticmethod
    def of(reply: Reply) -> ClientSums:
        return ClientSums(reply.sums.arrays[GRADIENT], reply.sums.arrays[SAMPLES], reply.losses)


def bounded(
    flow: Flow, clients: Sequence[ClientSums], limit: float, time: float | None, mu: float, delta: float
) -> tuple[Tensor, int]:
    """The mean gradient Σ_m c_m s_m g_m / Σ_m s_m n_m, [d], and how many clients have c_m s_m < 1.

    s_m ≤ 1 makes a client's samples n_m count for `limit` times the median client's at most, c_m ≤ 1 its own step
    P g_m / n_m as long as `limit` times the median one at most.
    """
    samples = torch.stack([own.samples for own in clients])
    steps = flow.step_lengths([own.gradient / own.samples for own in clients], time, mu, delta)
    shares = fair_counts(samples, limit) / samples
    factors = clip_factors(steps, limit) * shares
    gradient = torch.stack([factor * own.gradient for factor, own in zip(factors, clients, strict=True)]).sum(0)
    return gradient / (shares * samples).sum(), int((factors < 1).sum())


def trimmed_losses(clients: Sequence[ClientSums]) -> Tensor:
    """Mean losses [2] without the clients for which the first is most, and least, of the second, and with none that
    drowns the others: a few that lie must not make a good step look bad, nor a bad one good.
    """
    losses = torch.stack([own.losses for own in clients])
    samples = torch.stack([own.samples for own in clients]).double()
    order = (losses[:, 0].clamp(min=1e-30).log() - losses[:, 1].clamp(min=1e-30).log()).argsort()
    cut = int(TRIMMED * len(clients))
    kept = order[cut : len(clients) - cut]
    means = losses[kept] / samples[kept].unsqueeze(1)
    most = FAR * means[:, 1].median()
    means = means * (most / means[:, 1].clamp(min=1e-30)).clamp(max=1).unsqueeze(1)
    return (samples[kept] @ means) / samples[kept].sum()
