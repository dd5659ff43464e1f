"""Evolving the weights of the linearised network: outputs f(t) and weights w(t) for all wanted t in one pass.

All schemes accumulate residuals R(t) ∈ R^{N×d2}; the weights follow as w(t) = w(0) + (η/N) Jᵀ R(t), the paper's weight
evolution. They differ in what is accumulated, and agree only as ηλ/N → 0:

- `flow`: R = ∫_0^t r(f(u)) du along f' = (η/N) Θ r(f), the gradient flow of the linearised network;
- `descent`: R = Σ_{u<t} r(f(u)) along explicit gradient descent;
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
from ntkfl.tangent.losses import AnyLoss, find_loss
from ntkfl.tangent.schemes import Solution, descent, finite, flow, kernel_product, krylov_flow, sampled_flow, spectral
from ntkfl.tangent.solvers import Statistics

KERNELS = ("full", "trace")
SCHEMES = ("flow", "descent", "paper")
PAPER_STEPS = tuple(range(100, 2001, 100))
KERNEL_BYTES = 2**33  # a trace kernel up to this size is kept: 46,000 samples in float32; a larger one goes by blocks
LEAST_RTOL = 1e-9  # of order two, the integrator takes 2.2 times the steps for each further digit, and at most 10,000
_PASS_NUMBERS = 2**24  # numbers of a layer's outputs, over all rows and changes, alive while changes are made


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
        return finite(self.trajectory()).to(self.jacobian.dtype)

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
    most_products: int | None = None,
) -> Evolution:
    """Evolve outputs f0 [N, d2] towards labels y (classes [N] or real [N, d2]) along the linearisation J.

    `steps` is an increasing list of positive numbers of gradient steps of size `lr` (default: `geometric_steps`);
    `descent` and `paper` need whole ones. `flow` costs in proportion to the square root of the stiffness, `paper` as
    many products and a residual for each whole step, `descent` in proportion to the largest step. All hold a few N×d2
    arrays beside J, `trace` an N×N kernel up to 8 GiB, and above that makes it anew by blocks in every product. `mse`
    with `flow` is solved in closed form, whatever ηt is: by eigenvalues (`trace`), or in a Krylov space of as many
    arrays as it takes products (`full`). A flow that would take more than `most_products` products with the kernel
    (50,000, unless fewer are allowed) ends with the steps reached by then.

    `loss` is "ce", "mse", a `Loss` of your own, or a function of outputs and targets that gives one value per sample
    (convex in the outputs); what falls is its mean over samples. "ce" is cross-entropy of the softmax. "mse" is half
    the mean over outputs of the squared error, (1/d2) Σ_j ½(f_j − Y_j)²: half of `F.mse_loss`, so that a step is half
    of one on that.
    `kernel` is "full" for J Jᵀ, exactly the linearised network f0 + J (w − w0), or "trace" for the kernel [N, N] that
    `J.kernel()` gives, the same for every output; the outputs are then not those of the linearised network.
    `rtol`, from 1e-9 to below 1, is the relative error of each step of an integrated flow.
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
    if not bool(criterion.beyond_rounding(f0, Y.to(f0.dtype)).norm() > 0):  # nothing to learn: R stays 0
        still = f0.expand(len(wanted), N, d2)
        return Evolution(J, lr, wanted, torch.zeros_like(still), lambda: still)
    # The closed form needs the whole kernel; a flow too large for it is integrated like any other.
    fits = N * N * f0.element_size() <= KERNEL_BYTES
    if (loss, kernel) == ("mse", "trace") and (scheme == "paper" or (scheme == "flow" and fits)):
        residuals, trajectory, stats = spectral(J, f0, Y, lr, wanted, scheme)
    elif scheme == "descent":
        residuals, trajectory, stats = descent(kernel_product(J, kernel, fits), f0, Y, lr, wanted, criterion)
    else:

        def solve(J: Jacobian) -> Solution:
            integrated = sampled_flow if scheme == "paper" else flow
            theta = kernel_product(J, kernel, fits)
            return integrated(theta, f0.to(J.dtype), Y, lr, wanted, criterion, rtol, most_products)

        linear = (loss, kernel) == ("mse", "full")
        residuals, trajectory, stats = (
            krylov_flow(J, f0, Y, lr, wanted, rtol) if linear else None
        ) or _flow_as_far_as_it_goes(solve, J, len(wanted))
    return Evolution(J, lr, wanted[: len(residuals)], finite(residuals).to(J.dtype), trajectory, stats)


def _flow_as_far_as_it_goes(solve: Callable[[Jacobian], Solution], J: Jacobian, steps: int) -> Solution:
    """The flow by `solve`; where its error cannot be held, again with products in float64; where that fails too, or
    the cost has no end, the steps that were reached. `Statistics.fallback` says which; `NumericalError` where not one
    was.
    """
    best = solve(J)
    why, dear = best[2].stopped, best[2].exhausted
    if not why:
        return best
    said = ""
    if not dear and J.dtype != torch.float64:
        again = solve(J.double())
        again[2].evaluations += best[2].evaluations
        if len(again[0]) >= len(best[0]):
            best, said = again, "products in float64"
    residuals, trajectory, stats = best
    if not len(residuals):
        hint = "take shorter steps or a larger rtol" if dear else "look for extreme rows in the Jacobian"
        hint += "; inputs far from mean 0 and deviation 1 must be scaled first (ntkfl train --standardize)"
        raise NumericalError(f"the flow could not be integrated: {why}; {hint}")
    if len(residuals) < steps:
        short = f"{len(residuals)} of {steps} candidates"
        said = f"{said}, {short}" if said else short
    return residuals, trajectory, replace(stats, fallback=f"{said}: {why}")


def _check_steps(steps: Sequence[float], lr: float, scheme: str) -> tuple[float, ...]:
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
