"""Dummy inputs optimised until they would have sent what was received.

Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019. The original matches one gradient of a batch. Here the
target is a sample's Jacobian (the entries that were sent, or, as one who does not know of sparsification would, zeros
for the others), or what a client of federated averaging sends after local training, which is played again step by step
for the dummies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from ntkfl.audit.descent import Loss, lbfgs
from ntkfl.tangent.build import plan_jacobian
from ntkfl.tangent.losses import per_sample
from ntkfl.tangent.parameters import call_with, evaluating, trainable
from ntkfl.tangent.passes import substituted

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """How dummies are optimised: by L-BFGS from standard normal noise, the best match of several starts."""

    steps: int = 60
    restarts: int = 2
    seed: int = 0


def match_jacobian(model: nn.Module, shape: Sequence[int], J: Tensor, match: str = "sent") -> Loss:
    """‖Ĵ_i − J_i‖²/‖J_i‖² of dummies [R·n, d1], R blocks of n, against received J [n, d2, d], zeros being entries that
    were not sent: "sent" compares where something was, "zeros" takes the rest for true zeros.
    """
    parameters = {name: p.detach() for name, p in trainable(model).items()}
    probe = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(J)
    with evaluating(model):
        known = plan_jacobian(model, probe).known
    size = J.square().sum((1, 2)).clamp_min(torch.finfo(J.dtype).tiny)
    compared = J.ne(0) if match == "sent" else torch.ones_like(J, dtype=torch.bool)

    def outputs(p: Parameters, sample: Tensor) -> Tensor:
        return call_with(model, p, sample.unsqueeze(0)).squeeze(0)

    each = vmap(jacrev(outputs), in_dims=(None, 0))

    def loss(x: Tensor) -> Tensor:
        with evaluating(model), substituted(known, {}):  # no fused kernels, which may have no derivative
            derivatives: Parameters = each(parameters, x.view(-1, *shape))
        own = torch.cat([value.flatten(2) for value in derivatives.values()], 2)
        error = (own.view(-1, *J.shape) - J) * compared
        return (error.square().sum((2, 3)) / size).flatten()

    return loss


def match_update(
    model: nn.Module,
    shape: Sequence[int],
    change: Tensor,
    samples: int,
    outputs: int,
    kind: str,
    lr: float,
    steps: int,
) -> Loss:
    """‖Δ̂ − Δ‖²/‖Δ‖² for dummies [R, B·d1 + B·d2] against w_m − w [d] after `steps` full-batch steps of rate `lr`.

    The last B·d2 numbers are the dummies' labels before a softmax: nobody sent any. Local training is unrolled.
    """
    start = {name: p.detach() for name, p in trainable(model).items()}
    size = change.square().sum().clamp_min(torch.finfo(change.dtype).tiny)

    def mean_loss(p: Parameters, x: Tensor, Y: Tensor) -> Tensor:
        return per_sample(kind, call_with(model, p, x), Y).mean()

    def one(dummy: Tensor) -> Tensor:
        x = dummy[: -samples * outputs].view(samples, *shape)
        Y = dummy[-samples * outputs :].view(samples, outputs).softmax(1)
        w = dict(start)
        for _ in range(steps):
            g = grad(mean_loss)(w, x, Y)
            w = {name: p - lr * g[name] for name, p in w.items()}
        moved = torch.cat([(w[name] - start[name]).reshape(-1) for name in start])
        return (moved - change).square().sum() / size

    def loss(x: Tensor) -> Tensor:
        with evaluating(model):
            return torch.stack([one(dummy) for dummy in x])

    return loss


def reconstruct(loss: Loss, targets: int, width: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """(dummies [targets, width], how well each matches [targets]): of all restarts, those that match best."""
    generator = torch.Generator().manual_seed(settings.seed)
    x, _ = lbfgs(loss, torch.randn(settings.restarts * targets, width, generator=generator), settings.steps)
    with torch.no_grad():
        match = loss(x).view(settings.restarts, targets).nan_to_num(nan=float("inf"))
    best = match.argmin(0)
    rows = torch.arange(targets)
    return x.view(settings.restarts, targets, width)[best, rows], match[best, rows]
