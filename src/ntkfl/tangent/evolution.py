"""Evolving the weights of the linearised network: outputs f(t) and weights w(t) for all wanted t in one pass.

Both schemes accumulate residuals R(t) ∈ R^{N×d2}; the weights follow as w(t) = w(0) + (η/N) Jᵀ R(t), the paper's weight
evolution. They differ in what is accumulated, and agree only as ηλ/N → 0:

- `flow`: R = ∫_0^t r(f(u)) du along f' = (η/N) Θ r(f), the gradient flow of the linearised network;
- `paper`: R = Σ_{u<t} r(f(u)) with f(u) on the flow (trace kernel): the paper's closed form for `mse`, what its
  authors' code sums for `ce`.

Θ is J Jᵀ (`full`, exactly the linearised network) or H ⊗ I with the paper's kernel H (`trace`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, DataError, NumericalError, unknown
from ntkfl.tangent.jacobian import Jacobian, check_jacobian
from ntkfl.tangent.losses import LOSSES, AnyLoss, Loss, find_loss
from ntkfl.tangent.solvers import Statistics, integrate

KERNELS = ("full", "trace")
SCHEMES = ("flow", "paper")
PAPER_STEPS = tuple(range(100, 2001, 100))
LEAST_RTOL = 1e-9  # of order two, the integrator takes 2.2 times the steps for each further digit, and at most 10,000
_PASS_NUMBERS = 2**24  # numbers of a layer's outputs, over all rows and changes, alive while changes are made

Product = Callable[[Tensor], Tensor]  # R ↦ Θ R, [N, d2] -> [N, d2], in the Jacobian's precision
Solution = tuple[Tensor, Callable[[], Tensor], Statistics]  # residuals [S, N, d2], how to make the outputs, the cost


@dataclass(frozen=True)
class Evolution:
    """The evolved states at `steps`, S of them."""

    jacobian: Jacobian = field(repr=False)
    lr: float
    steps: tuple[float, ...]
    residuals: Tensor = field(repr=False)  # accumulated: [S, N, d2]
    trajectory: Callable[[], Tensor] = field(repr=False)  # makes `outputs`
    statistics: Statistics = field(default_factory=Statistics)

    @cached_property
    def outputs(self) -> Tensor:
        """f^(k,t): [S, N, d2], made when asked for; weights need the residuals alone."""
        return _finite(self.trajectory()).to(self.jacobian.dtype)

    def delta(self, i: int) -> Tensor:
        """w^(k,t_i) − w^(k) = (η/N) Jᵀ R(t_i): [d]."""
        return self.jacobian.vjp(self.residuals[i]).mul_(self.lr / len(self.jacobian))

    def deltas(self) -> Tensor:
        """All weight changes: [S, d], as many in one pass as fit beside a Jacobian."""
        numbers = sum(t.numel() for t in self.jacobian.tensors())
        few = max(1, _PASS_NUMBERS * self.jacobian.shape[1] // numbers)
        changes = [self.jacobian.vjp(some) for some in torch.split(self.residuals, few)]
        return torch.cat(changes).mul_(self.lr / len(self.jacobian))


def geometric_steps(lr: float, longest: float = 40.0, shortest: float = 0.1, ratio: float = 1.5) -> tuple[float, ...]:
    """Steps whose flow times ηt run geometrically from about `shortest` to `longest`: what counts is ηt, not t."""
    if not (lr > 0 and 0 < shortest <= longest and ratio > 1):
        raise ConfigError("a geometric grid needs lr > 0, 0 < shortest <= longest and ratio > 1")
    count = 1 + math.floor(math.log(longest / shortest) / math.log(ratio) + 1e-9)
    return tuple(longest / ratio ** (count - 1 - i) / lr for i in range(count))


def evolve(
    J: Jacobian,
    f0: Tensor,
    y: Tensor,
    lr: float = 0.01,
    steps: Sequence[float] | None = None,
    loss: AnyLoss = "ce",
    kernel: str = "full",
    scheme: str = "flow",
    rtol: float = 1e-4,
) -> Evolution:
    """Evolve outputs f0 [N, d2] towards labels y (classes [N] or real [N, d2]) along the linearisation J.

    steps: an increasing list of positive numbers of gradient steps of size `lr` (default: `geometric_steps`); `paper`
        needs whole ones.
    loss: "ce", "mse", a `Loss` of your own, or a function of outputs and targets that gives one value per sample
        (convex in the outputs); what falls is its mean over samples. "ce" is cross-entropy of the softmax. "mse" is
        half the mean over outputs of the squared error, (1/d2) Σ_j ½(f_j − Y_j)²: half of `F.mse_loss`, so that a step
        is half of one on that.
    kernel: "full" for J Jᵀ, exactly the linearised network f0 + J (w − w0), or "trace" for the kernel [N, N] that
        `J.kernel()` gives, the same for every output; the outputs are then not those of the linearised network.
    rtol: the relative error of each step of an integrated flow, from 1e-9 to below 1.

    Cost: `flow` takes products in proportion to the square root of the stiffness, `paper` as many and a residual for
    each whole step. `mse` with `trace` is solved in closed form, whatever ηt is, by the
    kernel's eigenvalues.
    Memory: a few [N, d2] arrays beside J, and for `trace` the kernel.
    """
    check_jacobian(J)
    criterion = find_loss(loss)
    if kernel not in KERNELS:
        raise unknown("kernel", kernel, KERNELS)
    if scheme not in SCHEMES:
        raise unknown("scheme", scheme, SCHEMES)
    N, d2 = J.shape[:2]
    wanted = _check_steps(steps if steps is not None else geometric_steps(lr), lr, scheme)
    if not LEAST_RTOL <= rtol < 1:
        raise ConfigError(
            f"rtol must be at least {LEAST_RTOL:g} and below 1, got {rtol}: it is the relative error of each step of "
            "the flow, and a smaller one takes more steps than the integrator may"
        )
    if N == 0:
        raise DataError("there is nothing to evolve: the Jacobian has no rows")
    if tuple(f0.shape) != (N, d2):
        raise DataError(f"f0 must have the Jacobian's shape [{N}, {d2}], got {list(f0.shape)}")
    if y.shape[0] != N:
        raise DataError(f"{y.shape[0]} labels for {N} samples")
    f0 = f0.detach().to(device=J.device, dtype=J.dtype)
    if not bool(f0.isfinite().all()):
        raise NumericalError("f0 has values that are not finite")
    Y = criterion.targets(y.to(J.device), d2, torch.float64)
    if scheme == "paper" and kernel != "trace":
        raise ConfigError("scheme 'paper' is the paper's sum, of its kernel 'trace'; use 'flow' for the full one")

    # What the rounding of f, and of a softmax, can make of targets that are met exactly.
    rounding = 16 * torch.finfo(f0.dtype).eps * Y.abs() if loss in LOSSES else torch.zeros_like(Y)
    if not bool((criterion.residual(f0, Y.to(f0.dtype)).abs() > rounding).any()):  # nothing to learn: R stays 0
        still = f0.expand(len(wanted), N, d2)
        return Evolution(J, lr, wanted, torch.zeros_like(still), lambda: still)
    solve = _flow if scheme == "flow" else _sampled_flow
    if loss == "mse" and kernel == "trace":
        solve = _spectral
    problem = _Problem(J, f0, Y, criterion, lr, wanted, kernel, scheme, rtol)
    residuals, trajectory, stats = _as_far_as_it_goes(solve, problem)
    return Evolution(J, lr, wanted[: len(residuals)], _finite(residuals).to(J.dtype), trajectory, stats)


@dataclass(frozen=True)
class _Problem:
    """Outputs f0 [N, d2], in J's precision, that move towards Y [N, d2], in float64."""

    J: Jacobian
    f0: Tensor
    Y: Tensor
    loss: Loss
    lr: float
    steps: tuple[float, ...]
    kernel: str
    scheme: str
    rtol: float

    @property
    def rate(self) -> float:
        """η/N."""
        return self.lr / len(self.J)

    def product(self) -> Product:
        """R ↦ Θ R for the full kernel, never made, or for the trace kernel, made here."""
        if self.kernel == "full":
            return self.J.product
        H = self.J.kernel()
        return lambda R: (R.to(H.dtype).T.contiguous() @ H).T  # H is symmetric; this way is the faster


def _as_far_as_it_goes(solve: Callable[[_Problem], Solution], problem: _Problem) -> Solution:
    """What `solve` gives; where the error of a flow cannot be held, again with products in float64; where that fails
    too, or the cost has no end, the steps that were reached. `Statistics.fallback` says which; `NumericalError` where
    not one was.
    """
    residuals, trajectory, stats = solve(problem)
    why, dear, remarks = stats.stopped, stats.exhausted, list[str]()
    if not why:
        return residuals, trajectory, stats
    if not dear and problem.J.dtype != torch.float64:
        again = solve(replace(problem, J=problem.J.double(), f0=problem.f0.double()))
        again[2].evaluations += stats.evaluations
        if len(again[0]) >= len(residuals):
            (residuals, trajectory, stats), remarks = again, ["products in float64"]
    if not len(residuals):
        hint = "take shorter steps or a larger rtol" if dear else "look for extreme rows in the Jacobian"
        hint += "; inputs far from mean 0 and deviation 1 must be scaled first (ntkfl train --standardize)"
        raise NumericalError(f"the flow could not be integrated: {why}; {hint}")
    if len(residuals) < len(problem.steps):
        remarks.append(f"{len(residuals)} of {len(problem.steps)} candidates")
    return residuals, trajectory, replace(stats, fallback=f"{', '.join(remarks)}: {why}")


def _flow(own: _Problem) -> Solution:
    """R' = r(f0 + (η/N) Θ R), R(0) = 0, by Runge–Kutta–Chebyshev."""
    theta, f0, loss, Y, stats = own.product(), own.f0, own.loss, own.Y.to(own.f0.dtype), Statistics()
    rounding = 0.0 if f0.dtype == torch.float64 else torch.finfo(f0.dtype).eps

    # Outputs are no better than the products they come from, so they stay in that precision; the state does not.
    def outputs(R: Tensor) -> Tensor:
        return torch.add(f0, theta(R), alpha=own.rate)

    # The Jacobian of R' is −(η/N) Λ Θ with Λ the loss's curvature: similar to a symmetric positive one.
    def stiffness(R: Tensor) -> Product:
        f = outputs(R)
        return lambda v: loss.curvature_product(f, Y, own.rate * theta(v))

    start = torch.zeros_like(f0)
    states = integrate(lambda R: loss.residual(outputs(R), Y), start, own.steps, stiffness, own.rtol, stats, rounding)
    residuals = _stacked([*states], f0)
    return residuals, lambda: torch.stack([outputs(R) for R in residuals]), stats


def _sampled_flow(own: _Problem) -> Solution:
    """R(t) = Σ_{u<t} r(f(u)) at whole u, f' = (η/N) Θ r(f), by Runge–Kutta–Chebyshev.

    The state is f: where R is interpolated, as in `_flow`, each f(u) would take a product with the kernel of its own.
    """
    theta, loss, near, stats = own.product(), own.loss, own.Y.to(own.f0.dtype), Statistics()

    def slope(f: Tensor) -> Tensor:
        return theta(loss.residual(f.to(near.dtype), near)).double() * own.rate

    def stiffness(f: Tensor) -> Product:
        rounded = f.to(near.dtype)
        return lambda v: theta(loss.curvature_product(rounded, near, v.to(near.dtype))).double() * own.rate

    residuals, outputs, total = [], [], loss.residual(own.f0.double(), own.Y)
    whole = range(1, int(own.steps[-1]) + 1)
    for u, f in enumerate(integrate(slope, own.f0, whole, stiffness, own.rtol, stats), start=1):
        if u in own.steps:
            residuals.append(total)
            outputs.append(f)
        total = total + loss.residual(f, own.Y)
    return _stacked(residuals, own.f0), lambda: torch.stack(outputs), stats


def _spectral(own: _Problem) -> Solution:
    """`mse` with the trace kernel, in closed form: with H = Q diag(λ) Qᵀ and h = η/(N d2), f(t) − Y decays as e^{−hλt}.

    Accumulated residuals per eigenvalue: ∫_0^t e^{−hλu} du (`flow`) or Σ_{u<t} e^{−hλu} (`paper`), both t as λ → 0.
    """
    d2 = own.J.shape[1]
    eigenvalues, Q = torch.linalg.eigh(_finite(own.J.kernel().double()))
    decay = eigenvalues.clamp_min(0) * (own.rate / d2)  # [N]; the kernel is positive semidefinite up to rounding
    t = torch.tensor(own.steps, dtype=torch.float64, device=Q.device).unsqueeze(1)  # [S, 1]
    per_step = torch.expm1(-decay) if own.scheme == "paper" else -decay
    tiny = decay < 1e-300
    weight = torch.where(tiny, t, torch.expm1(-decay * t) / torch.where(tiny, 1.0, per_step))  # [S, N]
    start = Q.T @ (own.Y - own.f0.double())  # [N, d2]
    residuals = Q @ (weight.unsqueeze(-1) * start) / d2
    return residuals, lambda: own.Y - Q @ (torch.exp(-decay * t).unsqueeze(-1) * start), Statistics(evaluations=1)


def _stacked(states: list[Tensor], like: Tensor) -> Tensor:
    """[S, N, d2], S = 0 too."""
    return torch.stack(states) if states else like.new_empty(0, *like.shape)


def _finite(values: Tensor) -> Tensor:
    """The values, or an error that says where to look."""
    if not bool(values.isfinite().all()):
        raise NumericalError("the evolution produced values that are not finite: look for extreme rows in the Jacobian")
    return values


def _check_steps(steps: Sequence[float], lr: float, scheme: str) -> tuple[float, ...]:
    """The steps as numbers; `ConfigError` where the scheme cannot take them."""
    if not (lr > 0 and math.isfinite(lr)):
        raise ConfigError(f"the learning rate must be a positive number, got {lr}")
    try:
        wanted = tuple(float(t) for t in steps)
    except (TypeError, ValueError):
        raise ConfigError(f"steps must be an increasing list of positive numbers, not {steps!r}") from None
    increasing = all(a < b for a, b in itertools.pairwise(wanted))
    if not wanted or not increasing or not wanted[0] > 0 or not math.isfinite(wanted[-1]):
        raise ConfigError("steps must be an increasing list of positive numbers")
    if scheme != "flow" and any(t != round(t) for t in wanted):
        raise ConfigError(f"scheme {scheme!r} takes whole numbers of steps; fractional ones need scheme 'flow'")
    return wanted
