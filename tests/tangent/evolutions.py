"""A small problem to evolve, its dense kernel, and tight integration as the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.tangent.losses import AnyLoss, find_loss
from tests.tangent.networks import build

STEPS = (0.5, 3, 10, 40.25)


def problem(name: str = "relu", outputs: int = 3) -> tuple[nn.Module, Tensor, ntkfl.Jacobian, Tensor, Tensor]:
    model, x = build(name)
    y = torch.tensor([0, 1, 2, 2, 1, 0, 1]) % outputs
    with torch.no_grad():
        f0 = model(x)
    return model, x, ntkfl.jacobian(model, x), f0, y


def theta(J: ntkfl.Jacobian, kernel: str) -> Tensor:
    """The dense kernel over all N·d2 outputs."""
    N, d2, d = J.shape
    D = J.dense()
    if kernel == "full":
        flat = D.reshape(N * d2, d)
        return flat @ flat.T
    return torch.kron(torch.einsum("ajd,bjd->ab", D, D) / d2, torch.eye(d2, dtype=D.dtype))


def descended(
    J: ntkfl.Jacobian, f0: Tensor, Y: Tensor, lr: float, t: int, loss: AnyLoss, kernel: str
) -> tuple[Tensor, Tensor]:
    """f(t) and R(t) = Σ_{u<t} r(f(u)) of t explicit steps f(u) = f0 + (η/N) Θ R(u): what the flow is the limit of."""
    f, R, Theta = f0, torch.zeros_like(f0), theta(J, kernel)
    for _ in range(t):
        R = R + find_loss(loss).residual(f, Y)
        f = f0 + lr / len(f0) * (Theta @ R.reshape(-1)).view_as(f0)
    return f, R


def classical(slope: Callable[[Tensor], Tensor], state: Tensor, t: float, steps: int) -> Tensor:
    """The state at time t, by the classical fourth-order method."""
    h = t / steps
    for _ in range(steps):
        a = slope(state)
        b = slope(state + h / 2 * a)
        c = slope(state + h / 2 * b)
        state = state + h / 6 * (a + 2 * b + 2 * c + slope(state + h * c))
    return state


def rk4(
    J: ntkfl.Jacobian, f0: Tensor, Y: Tensor, lr: float, t: float, loss: AnyLoss, kernel: str
) -> tuple[Tensor, Tensor]:
    """Tight integration of f' = (η/N) Θ r and R' = r on the dense kernel: f(t), R(t)."""
    Theta, N = theta(J, kernel), len(f0)

    def outputs(R: Tensor) -> Tensor:
        return f0 + lr / N * (Theta @ R.reshape(-1)).view_as(f0)

    steps = max(200, math.ceil(20 * t * lr / N * float(torch.linalg.matrix_norm(Theta, 2))))
    R = classical(lambda R: find_loss(loss).residual(outputs(R), Y), torch.zeros_like(f0), t, steps)
    return outputs(R), R
