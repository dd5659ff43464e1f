"""Many small minimisations at once: every row has its own loss, its own history and its own step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor], Tensor]  # x [n, m] -> one number a row, [n]
_ARMIJO, _SHORTER, _TRIES = 1e-4, 0.3, 5
_STILL = 1e-5  # a step that lowers a row by less than this part of where it began ends it


def lbfgs(loss: Loss, start: Tensor, steps: int, history: int = 10) -> tuple[Tensor, Tensor]:
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
        pairs = pairs[-history:]
        fresh = stuck
    return x, value


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
