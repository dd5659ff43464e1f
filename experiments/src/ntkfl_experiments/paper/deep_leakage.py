"""Deep leakage for Figure 8: dummy inputs optimised until their Jacobians are the received ones.

Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019. The original matches one gradient of a batch. Here the
target is a sample's Jacobian: the entries that were sent, or, as one who does not know of sparsification would, zeros
for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from ntkfl.tangent.build import plan_jacobian
from ntkfl.tangent.parameters import evaluating, trainable, with_values
from ntkfl.tangent.passes import substituted

Parameters = dict[str, Tensor]
Loss = Callable[[Tensor], Tensor]  # x [n, m] -> one number per row, [n]
_ARMIJO, _SHORTER, _TRIES = 1e-4, 0.3, 5
_HISTORY = 10  # pairs that the inverse curvature is made of
_STILL = 1e-5  # a step that lowers a row by less than this part of where it began ends it


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
        return with_values(model, p)(sample.unsqueeze(0)).squeeze(0)

    each = vmap(jacrev(outputs), in_dims=(None, 0))

    def loss(x: Tensor) -> Tensor:
        with evaluating(model), substituted(known, {}):  # no fused kernels, which may have no derivative
            derivatives: Parameters = each(parameters, x.view(-1, *shape))
        own = torch.cat([value.flatten(2) for value in derivatives.values()], 2)
        error = (own.view(-1, *J.shape) - J) * compared
        return (error.square().sum((2, 3)) / size).flatten()

    return loss


def reconstruct(loss: Loss, targets: int, width: int, settings: Settings) -> Tensor:
    """Dummies [targets, width]: of all restarts, those that match best."""
    generator = torch.Generator().manual_seed(settings.seed)
    x = lbfgs(loss, torch.randn(settings.restarts * targets, width, generator=generator), settings.steps)
    with torch.no_grad():
        match = loss(x).view(settings.restarts, targets).nan_to_num(nan=float("inf"))
    return x.view(settings.restarts, targets, width)[match.argmin(0), torch.arange(targets)]


def lbfgs(loss: Loss, start: Tensor, steps: int) -> Tensor:
    """Liu and Nocedal 1989 with backtracking; a row that finds no lower point starts afresh from its gradient once, and
    then rests.
    """
    x = start.clone()
    value, gradient = _with_gradient(loss, x)
    begun = value.abs()
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []  # (s, y, 1/s·y), zero where a row's curvature is unusable
    fresh = torch.ones(len(x), dtype=torch.bool)
    resting = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(steps):
        direction = -_two_loops(gradient, pairs)
        slope = (direction * gradient).sum(1)
        uphill = slope >= 0
        direction[uphill] = -gradient[uphill]
        slope[uphill] = -gradient[uphill].square().sum(1)
        size = torch.where(fresh | uphill, 1 / gradient.norm(dim=1).clamp_min(1e-12), 1.0)
        size, lower = _backtrack(loss, x, value, direction, slope, size * ~resting)
        stuck = ~lower
        resting |= stuck & fresh
        if bool(resting.all()):
            break
        if bool(stuck.any()):
            pairs = [(s * lower[:, None], y * lower[:, None], r * lower) for s, y, r in pairs]
        step = torch.where(lower, size, 0.0)[:, None] * direction
        x = x + step
        before, above = gradient, value
        value, gradient = _with_gradient(loss, x)
        resting |= lower & (above - value < _STILL * begun)
        change = gradient - before
        curvature = (step * change).sum(1)
        usable = curvature > 1e-10 * change.square().sum(1).clamp_min(1e-30)
        pairs.append((step, change, torch.where(usable, 1 / curvature.clamp_min(1e-30), 0.0)))
        pairs = pairs[-_HISTORY:]
        fresh = stuck
    return x


def _backtrack(
    loss: Loss, x: Tensor, value: Tensor, direction: Tensor, slope: Tensor, size: Tensor
) -> tuple[Tensor, Tensor]:
    """Step sizes [n] that lower each row enough, by shortening, and whether one was found."""
    done = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(_TRIES):
        with torch.no_grad():
            there = loss(x + size[:, None] * direction)
        done |= (there <= value + _ARMIJO * size * slope) & (size > 0)
        if bool((done | (size == 0)).all()):
            break
        size = torch.where(done, size, size * _SHORTER)
    return size, done


def _two_loops(gradient: Tensor, pairs: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The inverse curvature that the pairs imply, times the gradient."""
    q, alphas = gradient.clone(), []
    for s, y, r in reversed(pairs):
        alpha = r * (s * q).sum(1)
        q -= alpha[:, None] * y
        alphas.append(alpha)
    scale = torch.ones(len(q), dtype=q.dtype)
    for _, y, r in pairs:  # of each row the last usable one
        scale = torch.where(r > 0, 1 / (r * y.square().sum(1)).clamp_min(1e-30), scale)
    q *= scale[:, None]
    for (s, y, r), alpha in zip(pairs, reversed(alphas), strict=True):
        q += (alpha - r * (y * q).sum(1))[:, None] * s
    return q


def _with_gradient(loss: Loss, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    values = loss(leaf)
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient
