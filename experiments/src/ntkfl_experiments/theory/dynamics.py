"""Training the network of the analysis three ways: by gradient descent, by the tangent kernel, by federated averaging.

The loss is L = (1/N) Σ ½(f − y)², residuals are r = y − f. Shapes as in `two_layer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntkfl.tangent import evolve, jacobian
from ntkfl_experiments.theory.two_layer import TwoLayer


@dataclass(frozen=True)
class State:
    """Gradient descent after `step` steps, before the next: the network and its residuals y − f [N]."""

    step: int
    network: TwoLayer
    residual: Tensor


def descend(network: TwoLayer, x: Tensor, y: Tensor, lr: float, steps: int) -> Iterator[State]:
    """States 0 … steps of gradient descent: v ← v + (η/N) J(v)ᵀ r, the Jacobian taken anew in every step."""
    scaled = (network.c / math.sqrt(network.width)).unsqueeze(1)  # [n, 1]
    v = network.v
    for step in range(steps + 1):
        before = x @ v.T  # [N, n]
        residual = y - (torch.relu(before) @ scaled).squeeze(1)
        yield State(step, TwoLayer(v, network.c), residual)
        if step < steps:
            pushed = (before >= 0).to(x.dtype).mul_(residual.unsqueeze(1) * (lr / len(x)))
            v = v + (pushed.T @ x) * scaled


def descended(network: TwoLayer, x: Tensor, y: Tensor, lr: float, steps: int) -> TwoLayer:
    """The network after `steps` steps of gradient descent."""
    *_, last = descend(network, x, y, lr, steps)
    return last.network


@dataclass(frozen=True)
class Evolved:
    """The paper's evolution at S steps: residuals y − f of the linearised outputs [S, N], networks at w^(k,t)."""

    residuals: Tensor
    networks: list[TwoLayer]


def evolved(network: TwoLayer, x: Tensor, y: Tensor, lr: float, steps: Sequence[float]) -> Evolved:
    """f^(k,t) and w^(k,t) from one Jacobian, by `ntkfl.evolve` (d2 = 1, so the trace kernel is the full one)."""
    J, f0 = jacobian(network.module(), x), network.outputs(x).unsqueeze(1)
    evolution = evolve(J, f0, y.unsqueeze(1), lr, steps, "mse", "trace", "paper")
    changes = evolution.deltas().view(len(evolution.steps), *network.v.shape)
    return Evolved(y - evolution.outputs.squeeze(-1), [network.moved(change) for change in changes])


def federated_round(
    network: TwoLayer,
    x: Tensor,
    y: Tensor,
    clients: Sequence[Tensor],
    lr: float,
    local_steps: int,
    divide_twice: bool = False,
) -> TwoLayer:
    """One round of FedAvg: each client descends on its own rows (`clients` lists them), the server takes the mean.

    `divide_twice` divides a client's gradient by all N = len(x) rows, not by its own, as the proof of Theorem 2 does.
    """
    total = torch.zeros_like(network.v)
    for rows in clients:
        rate = lr * len(rows) / len(x) if divide_twice else lr
        total += descended(network, x[rows], y[rows], rate, local_steps).v - network.v
    return network.moved(total / len(clients))


def squared_residual(network: TwoLayer, x: Tensor, y: Tensor) -> float:
    """‖f − y‖²."""
    return float((network.outputs(x) - y).square().sum())


def furthest_move(after: TwoLayer, before: TwoLayer) -> float:
    """R = max_r ‖v_r(t) − v_r‖₂."""
    return float((after.v - before.v).norm(dim=1).max())


def flipped(after: TwoLayer, before: TwoLayer, x: Tensor) -> Tensor:
    """How many neurons' activations differ, for each input: [N]."""
    return (after.active(x) != before.active(x)).sum(dim=1)


def within_reach(network: TwoLayer, x: Tensor, radius: float) -> Tensor:
    """|S_i| for each input: the neurons a move of at most `radius` can flip, those with |v_r·x_i| ≤ R: [N]."""
    return ((x @ network.v.T).abs() <= radius).sum(dim=1)


def flip_nearest(network: TwoLayer, x: Tensor, radius: float) -> TwoLayer:
    """Every neuron moved by at most `radius` so that its activation flips at the input nearest to its boundary.

    Neurons out of reach of every input stay. An adversary allowed by Lemmas 1 and 3.
    """
    before = x @ network.v.T  # [N, n]
    nearest = before.abs().argmin(dim=0)
    distance = before.gather(0, nearest.unsqueeze(0)).squeeze(0)  # signed, [n]
    overshoot = 1 + 1e-9
    move = torch.where(distance.abs() * overshoot <= radius, -distance * overshoot, torch.zeros_like(distance))
    return network.moved(move.unsqueeze(1) * x[nearest])
