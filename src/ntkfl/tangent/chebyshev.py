"""A step of the Runge–Kutta–Chebyshev method: s evaluations in a three-term recursion, plainly or as a CUDA graph.

Coefficients from Sommeijer, Shampine and Verwer, J. Comput. Appl. Math. 88, 1998.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ntkfl.tangent.cuda_graph import capture

DAMPING = 2.0 / 13.0
MOST_STAGES = 2000
_Field = Callable[[Tensor], Tensor]


class Attempt(NamedTuple):
    """A step from y to ŷ: ŷ and F(ŷ); the norm of the method's estimate of its error,
    0.8 (y − ŷ) + 0.4 h (F(y) + F(ŷ)); and the norms of y, ŷ, F(y) and F(ŷ).
    """

    state: Tensor
    slope: Tensor
    error: float
    before: float
    after: float
    speed_before: float
    speed: float


class Stepper:
    """Evaluations of F and steps of y' = F(y), plainly; `evaluations` counts."""

    def __init__(self, field: _Field) -> None:
        self.field = field
        self.evaluations = 0

    def evaluate(self, y: Tensor) -> Tensor:
        """F(y)."""
        self.evaluations += 1
        return self.field(y)

    def step(self, y: Tensor, slope: Tensor, h: float, stages: int) -> Tensor:
        """One step of size h from y with F(y) = slope, by the method of `stages` stages."""
        first, coefficients = _coefficients(stages)
        before, current = y, torch.add(y, slope, alpha=first * h)
        for mu, nu, mu_tilde, gamma_tilde in coefficients:
            fresh = self.evaluate(current).mul_(mu_tilde * h)
            fresh.add_(current, alpha=mu).add_(before, alpha=nu)
            fresh.add_(y, alpha=1 - mu - nu).add_(slope, alpha=gamma_tilde * h)
            before, current = current, fresh
        return current

    def attempt(self, y: Tensor, slope: Tensor, h: float, stages: int) -> Attempt:
        """A step, F where it ends, and what tells whether it may be taken."""
        new = self.step(y, slope, h, stages)
        fresh = self.evaluate(new)
        return Attempt(new, fresh, *attempt_norms(y, new, slope, fresh, 0.4 * h).tolist())


class GraphStepper(Stepper):
    """The same on a GPU, where a stage is some twenty small kernels that take longer to launch one by one than to run.

    A stage is captured once and replayed; its coefficients come from a table on the device, at a row that the graph
    itself counts up, so that a whole step is queued without waiting for any of it. What ends an attempt is a graph as
    well: the norms cross from the GPU together, and that is the only time that it is waited for. The table is then
    free; a caller of `step` alone waits for its result before the next one.
    """

    def __init__(self, field: _Field, like: Tensor) -> None:
        super().__init__(field)
        # The last two states, y, F(y), and F at the latest state.
        self.basis = torch.zeros(5, *like.shape, dtype=like.dtype, device=like.device)
        self.table = torch.zeros(MOST_STAGES, 5, dtype=like.dtype, device=like.device)
        self.table[-1, 4] = 1.0  # F alone
        self.pinned = torch.zeros(self.table.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self.at = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.end, self.fresh = torch.zeros_like(like), torch.zeros_like(like)
        self.norms, self.share = like.new_zeros(5), like.new_zeros(())
        *self.stages, self.finish = capture(like.device, partial(self._stage, 0), partial(self._stage, 1), self._finish)

    def evaluate(self, y: Tensor) -> Tensor:
        self.evaluations += 1
        self.basis[:3] = y
        self.at.fill_(len(self.table) - 1)
        self.stages[0].replay()
        return self.basis[0].clone()

    def step(self, y: Tensor, slope: Tensor, h: float, stages: int) -> Tensor:
        return self._advance(y, slope, h, stages).clone()

    def attempt(self, y: Tensor, slope: Tensor, h: float, stages: int) -> Attempt:
        self.end.copy_(self._advance(y, slope, h, stages))
        self.share.fill_(0.4 * h)
        self.finish.replay()
        self.evaluations += 1
        state, fresh = self.end.clone(), self.fresh.clone()
        return Attempt(state, fresh, *self.norms.tolist())

    def _advance(self, y: Tensor, slope: Tensor, h: float, stages: int) -> Tensor:
        """The state after a step, where the stages left it."""
        first, coefficients = _coefficients(stages)
        turns = [(nu, mu) if j % 2 == 0 else (mu, nu) for j, (mu, nu, _, _) in enumerate(coefficients)]
        rest = [(1 - mu - nu, gamma * h, mu_tilde * h) for mu, nu, mu_tilde, gamma in coefficients]
        rows = [(*turn, *others) for turn, others in zip(turns, rest, strict=True)]
        self.pinned[: len(rows)] = torch.tensor(rows, dtype=self.table.dtype)
        self.table[: len(rows)].copy_(self.pinned[: len(rows)], non_blocking=True)
        self.at.zero_()
        self.basis[::2][:2] = y  # the state before, and y
        self.basis[3] = slope
        torch.add(y, slope, alpha=first * h, out=self.basis[1])
        for j in range(len(rows)):
            self.stages[j % 2].replay()
        self.evaluations += len(rows)
        return self.basis[(len(rows) + 1) % 2]

    def _stage(self, i: int) -> None:
        """The older of the last two states, the i-th, becomes the new one: all five combined."""
        self.basis[4] = self.field(self.basis[1 - i])
        weights = self.table.index_select(0, self.at)
        self.basis[i] = (weights @ self.basis.flatten(1)).view(self.basis.shape[1:])
        self.at.add_(1)

    def _finish(self) -> None:
        """F at the end of a step, and the norms of an attempt."""
        self.fresh.copy_(self.field(self.end))
        self.norms.copy_(attempt_norms(self.basis[2], self.end, self.basis[3], self.fresh, self.share))


def stepper(field: _Field, like: Tensor) -> Stepper:
    """The fastest that works for this field on the device of `like`."""
    if like.device.type == "cuda":
        try:
            return GraphStepper(field, like)
        except RuntimeError:  # a field with an operation that no graph can hold
            torch.cuda.synchronize(like.device)
    return Stepper(field)


def attempt_norms(y: Tensor, new: Tensor, slope: Tensor, fresh: Tensor, share: float | Tensor) -> Tensor:
    """The five norms of an attempt, [5]; `share` is 0.4 h."""
    estimate = torch.sub(y, new).mul_(0.8).add_((slope + fresh).mul_(share))
    norms: Tensor = torch.stack([estimate, y, new, slope, fresh]).flatten(1).norm(dim=1)
    return norms


@lru_cache(maxsize=512)
def stage_table(stages: int) -> Tensor:
    """What a step of size h combines, [stages, 5] in float64, the last two columns in units of h. The first row: of y
    and F(y) for the first state. Then for each stage: of the state before the last, the last, y, F(y), and F at the
    last.
    """
    first, coefficients = _coefficients(stages)
    rows = [(nu, mu, 1 - mu - nu, gamma, mu_tilde) for mu, nu, mu_tilde, gamma in coefficients]
    return torch.tensor([(0.0, 0.0, 1.0, first, 0.0), *rows], dtype=torch.float64)


@lru_cache(maxsize=512)
def _coefficients(stages: int) -> tuple[float, tuple[tuple[float, float, float, float], ...]]:
    """μ̃_1 and, for j = 2 … s, (μ_j, ν_j, μ̃_j, γ̃_j), from Chebyshev polynomials and their derivatives at w0."""
    w0 = 1 + DAMPING / stages**2
    T, D, DD = [1.0, w0], [0.0, 1.0], [0.0, 0.0]
    for j in range(2, stages + 1):
        T.append(2 * w0 * T[j - 1] - T[j - 2])
        D.append(2 * w0 * D[j - 1] - D[j - 2] + 2 * T[j - 1])
        DD.append(2 * w0 * DD[j - 1] - DD[j - 2] + 4 * D[j - 1])
    w1 = D[stages] / DD[stages]
    b = [0.0, 0.0] + [DD[j] / D[j] ** 2 for j in range(2, stages + 1)]
    b[0] = b[1] = b[2]
    a = [1 - b[j] * T[j] for j in range(stages + 1)]
    rows = []
    for j in range(2, stages + 1):
        mu_tilde = 2 * b[j] * w1 / b[j - 1]
        rows.append((2 * b[j] * w0 / b[j - 1], -b[j] / b[j - 2], mu_tilde, -a[j - 1] * mu_tilde))
    return b[1] * w1, tuple(rows)
