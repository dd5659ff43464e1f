"""The flow of a linear residual in closed form, R(t) = ∫_0^t e^{−hΘu} r du, for all t from one Krylov space.

m products give Q [m, n] with orthonormal rows and the tridiagonal T = Q Θ Qᵀ (Lanczos), and R(t) is about
‖r‖ Qᵀ t φ(hTt) e_1 with φ(z) = (1 − e^{−z})/z. Whatever t is, m grows at most to the number of different eigenvalues;
t → ∞ is the least-squares solution Θ⁺ r / h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST_PRODUCTS = 2000
_MOST_NUMBERS = 2**28  # of Q: 2 GiB
FIRST_ROWS = 64  # of Q, which doubles when it is full


class Krylov(NamedTuple):
    """R(t) and r(t) = e^{−hΘt} r at the wanted times, [S, *shape] each; the largest eigenvalue met; what it cost."""

    residuals: Tensor
    slopes: Tensor
    largest: float
    products: int


def linear_flow(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    h: float,
    times: Sequence[float],
    tolerance: float,
    eps: float,
) -> Krylov | None:
    """R' = r − hΘR from R(0) = 0 with r = `start`, whose norm is positive; None where the space would grow too large.

    The space grows until what is computed solves the equation up to `tolerance` times the size of r, at every wanted
    time. `eps` is the precision that R is used in: a part of R in Θ's null space changes nothing, and it is left out
    once t is so large that the rounding of that part would, by more than `tolerance`.
    """
    n, device = start.numel(), start.device
    most = min(n, MOST_PRODUCTS, max(2, _MOST_NUMBERS // n - 1))
    size = start.norm()
    Q = torch.empty(min(most + 1, FIRST_ROWS), start.numel(), dtype=torch.float64, device=device)
    Q[0] = start.reshape(-1) / size
    T = torch.zeros(most, most, dtype=torch.float64)
    t = torch.tensor(times, dtype=torch.float64).unsqueeze(1)  # [S, 1]
    for m in range(1, most + 1):
        image = product(Q[m - 1].view(start.shape)).double().reshape(-1)
        for _ in range(2):  # orthogonal to all before, twice: once leaves what cancellation takes
            along = Q[:m] @ image
            image = image - along @ Q[:m]
            T[m - 1, m - 1] += float(along[-1])
        rest = float(image.norm())
        scale = float(T[:m, :m].abs().sum(1).max())  # at least the largest eigenvalue
        if not rest < float("inf"):
            return None
        done = rest <= n * torch.finfo(torch.float64).eps * scale or m == n
        if done or m == most or m % max(4, m // 8) == 0:
            values, vectors = torch.linalg.eigh(T[:m, :m])
            residuals, slopes = _at(values, vectors, h, t, tolerance / eps)
            # R' differs from r − hΘR by h·rest·(the last coordinate of R) along the next direction.
            defect = h * rest * float(residuals[:, -1].abs().max())
            if done or defect <= tolerance:
                R, r = (size * (c.to(device) @ Q[:m]).view(-1, *start.shape) for c in (residuals, slopes))
                return Krylov(R, r, float(values[-1]), m)
        if m < most:
            if m == len(Q):
                Q = torch.cat([Q, torch.empty_like(Q)])
            T[m, m - 1] = T[m - 1, m] = rest
            Q[m] = image / rest
    return None


def _at(values: Tensor, vectors: Tensor, h: float, t: Tensor, harmless: float) -> tuple[Tensor, Tensor]:
    """Coordinates in Q of R(t) and r(t) for r = e_1, [S, m] each, from T's eigenvalues and eigenvectors.

    R's part in the null space is t times r's while hλt is below `harmless` for the largest λ, and 0 from there on.
    """
    largest = values[-1].clamp_min(0)
    null = values <= len(values) * torch.finfo(torch.float64).eps * largest  # rounding leaves no exact zeros
    decay = torch.where(null, 0.0, values * h)
    unseen = torch.where(h * largest * t < harmless, t, 0.0)
    weight = torch.where(null, unseen, -torch.expm1(-decay * t) / torch.where(null, 1.0, decay))
    first = vectors[0]
    return (weight * first) @ vectors.T, (torch.exp(-decay * t) * first) @ vectors.T
