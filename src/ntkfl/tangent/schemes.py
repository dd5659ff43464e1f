"""How residuals are accumulated: one function for each scheme and the losses and kernels that it is solved by.

Each takes outputs f0 [N, d2], targets Y [N, d2] in float64 and steps, S of them, and gives the accumulated residuals
[S, N, d2], a function that makes the outputs at those steps, and what it cost. `evolution.py` says what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ntkfl.errors import NumericalError
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.krylov import linear_flow
from ntkfl.tangent.losses import Loss, per_sample
from ntkfl.tangent.solvers import Statistics, integrate

Product = Callable[[Tensor], Tensor]
Solution = tuple[Tensor, Callable[[], Tensor], Statistics]  # residuals [S, N, d2], how to make the outputs, the cost


def finite(values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise NumericalError("the evolution produced values that are not finite: look for extreme rows in the Jacobian")
    return values


def kernel_product(J: Jacobian, kernel: str, fits: bool) -> Product:
    """R ↦ Θ R, [N, d2] -> [N, d2], in the Jacobian's precision; a trace kernel that does not fit is never whole."""
    if kernel == "full":
        return J.product
    if not fits:
        return J.kernel_product
    H = J.kernel()
    return lambda R: (R.to(H.dtype).T.contiguous() @ H).T  # H is symmetric; this way is the faster


def flow(
    theta: Product,
    f0: Tensor,
    Y: Tensor,
    lr: float,
    steps: Sequence[float],
    loss: Loss,
    rtol: float,
    most: int | None,
) -> Solution:
    """R' = r(f0 + (η/N) Θ R), R(0) = 0, by Runge–Kutta–Chebyshev."""
    rate = lr / len(f0)
    Y = Y.to(f0.dtype)
    rounding = 0.0 if f0.dtype == torch.float64 else torch.finfo(f0.dtype).eps

    # Outputs are no better than the products they come from, so they stay in that precision; the state does not.
    def outputs(R: Tensor) -> Tensor:
        return torch.add(f0, theta(R), alpha=rate)

    def slope(R: Tensor) -> Tensor:
        return loss.residual(outputs(R), Y).double()

    # The Jacobian of R' is −(η/N) Λ Θ with Λ the loss's curvature: similar to a symmetric positive one.
    def stiffness(R: Tensor) -> Product:
        f = outputs(R)
        return lambda v: loss.curvature_product(f, Y, rate * theta(v)).double()

    start = torch.zeros_like(f0, dtype=torch.float64)
    states, stats = integrate(slope, start, steps, stiffness, rtol, rounding, most)
    residuals = torch.stack(states) if states else f0.new_empty((0, *f0.shape))
    return residuals, lambda: torch.stack([outputs(R) for R in residuals]), stats


def sampled_flow(
    theta: Product,
    f0: Tensor,
    Y: Tensor,
    lr: float,
    steps: Sequence[float],
    loss: Loss,
    rtol: float,
    most: int | None,
) -> Solution:
    """R(t) = Σ_{u<t} r(f(u)) at whole u, f' = (η/N) Θ r(f), by Runge–Kutta–Chebyshev.

    The state is f: where R is interpolated, as in `flow`, each f(u) would take a product with the kernel of its own.
    """
    rate, start = lr / len(f0), f0.double()
    near = Y.to(f0.dtype)

    def slope(f: Tensor) -> Tensor:
        return theta(loss.residual(f.to(f0.dtype), near)).double() * rate

    def stiffness(f: Tensor) -> Product:
        rounded = f.to(f0.dtype)
        return lambda v: theta(loss.curvature_product(rounded, near, v.to(f0.dtype))).double() * rate

    total, done = loss.residual(start, Y), 0
    residuals: list[Tensor] = []
    outputs: list[Tensor] = []

    def add(f: Tensor) -> None:
        nonlocal total, done
        done += 1
        if done in wanted:
            residuals.append(total)
            outputs.append(f)
        total = total + loss.residual(f, Y)

    wanted = frozenset(steps)
    _, stats = integrate(slope, start, range(1, int(steps[-1]) + 1), stiffness, rtol, 0.0, most, add)
    summed = torch.stack(residuals) if residuals else f0.new_empty((0, *f0.shape))
    return summed, lambda: torch.stack(outputs), stats


def krylov_flow(J: Jacobian, f0: Tensor, Y: Tensor, lr: float, steps: Sequence[float], rtol: float) -> Solution | None:
    """`mse` with the full kernel: R' = r − hΘR, h = η/(N d2), in a Krylov space; None where that grows too large.

    In float32, products are wrong by up to eps·λ_max, which moves an eigenvalue of 0 enough to decay once htλ_max·eps
    nears 1: for such long times they are made again in float64, from a copy of J.
    """
    d2 = f0.shape[1]
    start, h = (Y - f0.double()) / d2, lr / f0.numel()
    eps = torch.finfo(J.dtype).eps
    found, stats = linear_flow(J.product, start, h, steps, 0.01 * rtol, eps), Statistics()
    if J.dtype != torch.float64 and (found is None or h * found.largest * steps[-1] * eps > 0.1):
        stats.evaluations = 0 if found is None else found.products
        stats.fallback = "products in float64: after so long a time the rounding of float32 counts"
        found = linear_flow(J.double().product, start, h, steps, 0.01 * rtol, eps)
    if found is None:
        return None
    stats.evaluations += found.products
    slopes = found.slopes
    return found.residuals, lambda: Y - d2 * slopes, stats


def descent(theta: Product, f0: Tensor, Y: Tensor, lr: float, steps: Sequence[float], loss: Loss) -> Solution:
    """Explicit gradient descent on the linearised model; the plain reference."""
    rate = lr / f0.shape[0]
    start = f0.double()
    before = float(per_sample(loss, start, Y).mean())
    f, R = start, torch.zeros_like(start)
    outputs, residuals, done = [], [], 0
    for wanted in steps:
        while done < wanted:
            R = R + loss.residual(f, Y)
            f = start + rate * theta(R).double()
            done += 1
        now = float(per_sample(loss, f, Y).mean())
        # The loss is convex in f, so stable descent cannot end above where it began.
        if not math.isfinite(now) or now > before * (1 + 1e-6) + 1e-12:
            raise NumericalError(
                f"gradient descent diverged: after {done} steps of size {lr:g} the loss is {now:.4g}, "
                f"against {before:.4g} at the start; take a smaller lr, or scheme 'flow', which has no stability limit"
            )
        outputs.append(f)
        residuals.append(R)
    return torch.stack(residuals), lambda: torch.stack(outputs), Statistics(evaluations=done)


def spectral(J: Jacobian, f0: Tensor, Y: Tensor, lr: float, steps: Sequence[float], scheme: str) -> Solution:
    """`mse` with the trace kernel, in closed form: with H = Q diag(λ) Qᵀ and h = η/(N d2), f(t) − Y decays as e^{−hλt}.

    Accumulated residuals per eigenvalue: ∫_0^t e^{−hλu} du (`flow`) or Σ_{u<t} e^{−hλu} (`paper`), both t as λ → 0.
    """
    N, d2 = f0.shape
    H, stats = J.kernel().double(), Statistics(evaluations=1)
    if not bool(H.isfinite().all()) and J.dtype != torch.float64:
        H, stats = J.double().kernel(), Statistics(evaluations=2, fallback="products in float64: the kernel overflowed")
    eigenvalues, Q = torch.linalg.eigh(finite(H))
    decay = eigenvalues.clamp_min(0) * (lr / (N * d2))  # [N]; the kernel is positive semidefinite up to rounding
    t = torch.tensor(steps, dtype=torch.float64, device=f0.device).unsqueeze(1)  # [S, 1]
    per_step = torch.expm1(-decay) if scheme == "paper" else -decay
    tiny = decay < 1e-300
    weight = torch.where(tiny, t, torch.expm1(-decay * t) / torch.where(tiny, 1.0, per_step))  # [S, N]
    start = Q.T @ (Y - f0.double())  # [N, d2]
    residuals = Q @ (weight.unsqueeze(-1) * start) / d2
    return residuals, lambda: Y - Q @ (torch.exp(-decay * t).unsqueeze(-1) * start), stats
