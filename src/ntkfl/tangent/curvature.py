"""Sums that curvature is made of: the gradient and the Kronecker factors of the Gauss–Newton matrix, over samples.

C = (1/N) Σ_i J_iᵀ H_i J_i with H_i = ∂²ℓ/∂f² = R_i R_iᵀ. Its block for a layer of weights W is
(1/N) Σ_ic vec(D_ic) vec(D_ic)ᵀ with D_i = R_iᵀ ∂f_i/∂W, a matrix [outputs, inputs] for each column c, and is
approximated by A ⊗ G. A layer that is used once per sample has D_ic = b_ic a_iᵀ, with its inputs a (and a 1 behind them
where a bias trains) and b = R_iᵀ ∂f/∂out (K-FAC, Martens & Grosse 2015):

    A = (1/N) Σ_i a_i a_iᵀ,   G = (1/N) Σ_ic b_ic b_icᵀ

Where weights are shared by positions, D_ic = Σ_t b_itc a_itᵀ. To take positions for independent (KFC, Grosse & Martens
2016) would lose what they add up to: behind an average over positions up to T times. So D itself is used,

    A = (1/N) Σ_ic D_icᵀ D_ic,   G = Σ_ic D_ic D_icᵀ / Σ_ic ‖D_ic‖²

one step of the power iteration to the nearest A ⊗ G from G = I (as Morwani et al. 2024 read Shampoo); its trace is C's.
All are sums over samples: those of several sets of samples add up to those of all of them. `sums.py` holds them,
`flow.py` evolves weights along them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.errors import unknown
from ntkfl.tangent.blocks import DenseBlock, FactoredBlock, row_products
from ntkfl.tangent.build import differentiable, jacobian, numbers_at_once
from ntkfl.tangent.layers import EmbeddingBlock, ScaleBlock
from ntkfl.tangent.losses import AnyLoss, Loss, find_loss
from ntkfl.tangent.parameters import eager, evaluating, trainable, unflatten
from ntkfl.tangent.passes import JacobianPlan, substituted
from ntkfl.tangent.sums import (
    CONSTANT,
    DIAGONAL,
    GRADIENT,
    INPUTS,
    OUTPUTS,
    REST,
    SAMPLES,
    SHARED,
    SKETCH,
    Layer,
    Sums,
    probe_matrix,
    sketch_rank,
    uncovered,
)

LARGEST = 1024  # rows of a factor that is kept whole; of a larger one a sketch is
FISHERS = ("exact", "mc")
COMBINED = 8  # sums of a sample's rows that stand for them in A of weights that positions share, with "mc"


def curvature_sums(
    model: nn.Module,
    x: Tensor,
    Y: Tensor,
    loss: AnyLoss,
    plan: JacobianPlan,
    constant: bool = True,
    largest: int = LARGEST,
    fisher: str = "exact",
    generator: torch.Generator | None = None,
) -> Sums:
    """The sums over the rows of x at the model's weights, for targets Y [N, d2]; `plan` is `plan_jacobian(model, x)`.

    constant: False leaves out factors of inputs that do not depend on any trained weight (an earlier call has them).
    largest: the most rows of a factor that is kept whole, n(n+1)/2 numbers; of a larger one a sketch is, at most 257·n.
    fisher: "exact" takes all columns of the loss's `hessian_root` R_i, H_i = R_i R_iᵀ. "mc" takes one random column r_i
        in its place, E r_i r_iᵀ = H_i, so that factors of outputs are right in the mean (A of weights that positions
        share, too).
    generator: what "mc" draws with, on the model's device; by default PyTorch's own.

    Cost: a gradient pass for g; for the factors a forward pass and one backward pass for each column (one with "mc",
    whatever the number of classes), and N·n² multiplications for a factor of n rows. Chunk by chunk, so that memory
    does not grow with N.
    """
    if fisher not in FISHERS:
        raise unknown("fisher", fisher, FISHERS)
    criterion, sums = find_loss(loss), _Totals(largest, fisher == "mc", generator)
    squares, layers = Y.new_zeros(plan.total), list[Layer]()
    plan, unmoved = plan.factored(), plan.constant()
    columns = 1 if fisher == "mc" else plan.outputs
    for batch, own in _chunks(x, Y, max(1, plan.working * columns // plan.outputs)):
        f, gradient = _outputs_and_gradient(model, batch, own, criterion)
        sums.add(GRADIENT, gradient)
        R = criterion.hessian_root(f, own) if fisher == "exact" else criterion.drawn_root(f, own, generator)
        J = jacobian(model, batch, plan=plan, contract=R.mT)  # Rᵀ J: [n, c, d]
        layers = []
        for block in J.blocks:
            if isinstance(block, FactoredBlock):
                layers.append(layer_of(block))
                sums.add_factors(layers[-1], block, layers[-1].weight[0] in unmoved, constant)
            else:
                assert isinstance(block, DenseBlock)
                block.scatter(squares, block.values.square().sum((0, 1)))
    rest = uncovered(tuple(layers), plan.total, squares.device)
    beside = {REST: squares[rest]} if len(rest) else {}
    return Sums({SAMPLES: Y.new_tensor(len(x)), **sums.finished(), **beside})


def step_curvature(model: nn.Module, x: Tensor, Y: Tensor, change: Tensor, loss: AnyLoss, plan: JacobianPlan) -> Tensor:
    """N Δᵀ C Δ = Σ_i ‖R_iᵀ J_i Δ‖² over the rows of x, []: the curvature that a change Δ [d] of the weights meets."""
    criterion, total = find_loss(loss), change.new_zeros((), dtype=torch.float64)
    for batch, own in _chunks(x, Y, max(1, plan.working // plan.outputs)):
        f, moved = _outputs_and_jvp(model, batch, change, plan)
        R = criterion.hessian_root(f, own)
        total += (R.mT @ moved.unsqueeze(2)).square().sum(dtype=torch.float64)
    return total


def _outputs_and_jvp(model: nn.Module, x: Tensor, change: Tensor, plan: JacobianPlan) -> tuple[Tensor, Tensor]:
    """Outputs f and J Δ, [N, d2] each. Cost: about three gradient passes, whatever d2 is.

    Jᵀ u is linear in u, so that a backward pass through its backward pass gives J Δ. Where an operation has no second
    derivative, or a wrong one, so that ⟨u, J Δ⟩ is not ⟨Jᵀ u, Δ⟩, the Jacobian is made.
    """
    with eager(model) as model, differentiable(model):
        plan.check(model)
        parameters, directions = [*trainable(model).values()], [*unflatten(model, change).values()]
        try:
            with substituted(plan.known, {}), torch.enable_grad():
                f = model(x)
                u = torch.randn(f.shape, generator=torch.Generator().manual_seed(0)).to(f).requires_grad_()
                back = torch.autograd.grad(f, parameters, u, create_graph=True, allow_unused=True)
                used = [(g, v) for g, v in zip(back, directions, strict=True) if g is not None]
                moved: Tensor = torch.autograd.grad([g for g, _ in used], u, [v for _, v in used])[0]
            off = (u * moved).sum() - torch.stack([(g * v).sum() for g, v in used]).sum()
            if bool(off.abs() <= 1e-4 * u.norm() * moved.norm()):
                return f.detach(), moved
        except RuntimeError:
            pass
        return model(x), jacobian(model, x, plan=plan).jvp(change)


def layer_of(block: FactoredBlock) -> Layer:
    """The columns of a block whose weight trains."""
    assert block.weight is not None
    return Layer.at(block.weight, block.bias, isinstance(block, EmbeddingBlock))


def with_ones(seen: Tensor, block: FactoredBlock) -> Tensor:
    """What a layer sees, [..., inputs], with a 1 behind it where a bias trains: [..., m]."""
    return seen if block.bias is None else F.pad(seen, (0, 1), value=1.0)


def _chunks(x: Tensor, Y: Tensor, working: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and their targets, as many at a time as are differentiated at once where a row takes `working` numbers; up
    to twice as many where these are few, as the calls of a deep network's layers take longer than their arithmetic.
    """
    rows = max(1, numbers_at_once(x) // working)
    rows = min(2 * rows, max(rows, 32))
    return zip(torch.split(x, rows), torch.split(Y, rows), strict=True)


def _outputs_and_gradient(model: nn.Module, x: Tensor, Y: Tensor, criterion: Loss) -> tuple[Tensor, Tensor]:
    """Outputs f [N, d2] and Σ_i ∇ℓ_i [d], by an ordinary backward pass."""
    parameters = list(trainable(model).values())
    with evaluating(model), torch.enable_grad():
        f = model(x)
        # Of a number, as torch imports sympy to look at a gradient that it is given.
        inner = -(f * criterion.residual(f.detach(), Y)).sum()
        gradients = torch.autograd.grad(inner, parameters, materialize_grads=True)
    return f.detach(), torch.cat([gradient.reshape(-1) for gradient in gradients])


class _Totals:
    """Arrays by name, added up chunk by chunk."""

    def __init__(self, largest: int, drawn: bool, generator: torch.Generator | None) -> None:
        self.arrays: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}  # symmetric matrices [groups, n, n], of which triangles are given out
        self.largest, self.drawn, self.generator = largest, drawn, generator

    def add(self, name: str, value: Tensor) -> None:
        self.arrays[name] = self.arrays[name] + value if name in self.arrays else value

    def add_factors(self, layer: Layer, block: FactoredBlock, never_changes: bool, constant: bool) -> None:
        """The layer's A and G over a chunk's samples, from its block of Rᵀ J."""
        name, outputs = layer.name, f"{layer.name}/{OUTPUTS}"
        if isinstance(block, ScaleBlock):
            # A channel's own 2×2 block, exact (unit-wise, Osawa et al. 2020): its weights are too few for more.
            both = [block.weight_values()] + ([] if block.bias is None else [block.pooled(block.g)])
            self.add_gram(f"{name}/{INPUTS}", torch.stack(both, dim=-1))
            return
        if not isinstance(block, EmbeddingBlock) and block.positions > 1:
            D = _derivatives(block)  # [N·c, groups, n, m]
            few = _combined(D, self.generator) if self.drawn and D.shape[2] > COMBINED else D
            self.add_gram(f"{name}/{SHARED}", few.transpose(1, 2).flatten(0, 1))
            self.add_gram(outputs, D.permute(0, 3, 1, 2).flatten(0, 1))
            return
        if not never_changes or constant:
            inputs = f"{name}/{CONSTANT if never_changes else INPUTS}"
            if isinstance(block, EmbeddingBlock):  # one-hot inputs: their second moments are counts
                tokens = (layer.weight[1] - layer.weight[0]) // block.n_out
                counts = torch.bincount(block.a.flatten(), minlength=tokens).unsqueeze(0)
                self.add(inputs + DIAGONAL, counts.to(block.g.dtype))
            else:
                self.add_gram(inputs, with_ones(block.seen(), block).transpose(1, 2).flatten(0, 1))
        self.add_gram(outputs, block.g.reshape(-1, block.groups, block.n_out // block.groups), 1 / block.positions)  # b

    def finished(self) -> dict[str, Tensor]:
        """All arrays."""
        for name, square in self.squares.items():
            i, j = torch.triu_indices(*square.shape[1:], device=square.device)
            self.arrays[name] = square[:, i, j]
        return self.arrays

    def add_gram(self, name: str, rows: Tensor, scale: float = 1.0) -> None:
        """Add Σ v vᵀ over rows [..., groups, n]: for every group a triangle, or a sketch where n is too large."""
        by_group = rows.flatten(0, -3).transpose(0, 1)
        n = by_group.shape[2]
        if n <= self.largest:
            v = by_group.mT.contiguous()
            # Normalisation has a group for each channel: one batched product in place of many small ones.
            square = (row_products(v[0], v[0]).unsqueeze(0) if len(v) == 1 else v @ v.mT) * scale
            self.squares[name] = square.add_(self.squares[name]) if name in self.squares else square
            return
        probed = by_group.mT @ (by_group @ probe_matrix(n, sketch_rank(n)).to(rows))
        self.add(name + SKETCH, torch.cat([probed, by_group.square().sum(1).unsqueeze(2)], dim=2) * scale)


def _combined(D: Tensor, generator: torch.Generator | None) -> Tensor:
    """COMBINED sums of the n rows of each matrix, with random signs: their Σ v vᵀ is Dᵀ D in the mean."""
    signs = torch.randint(0, 2, (*D.shape[:2], COMBINED, D.shape[2]), generator=generator, device=D.device)
    return signs.mul_(2).sub_(1).to(D) @ D / math.sqrt(COMBINED)


def _derivatives(block: FactoredBlock) -> Tensor:
    """D = Rᵀ ∂f/∂W of every sample and column, a bias as the last input: [N·c, groups, outputs, inputs]."""
    weight = block.weight_values()  # [N, c, k]
    D = weight.view(-1, block.groups, block.n_out // block.groups, weight.shape[2] // block.n_out)
    return D if block.bias is None else torch.cat([D, block.pooled(block.g).reshape(*D.shape[:3], 1)], dim=-1)
