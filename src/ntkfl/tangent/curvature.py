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

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.errors import unknown
from ntkfl.tangent.build import jacobian, numbers_at_once
from ntkfl.tangent.dense import DenseBlock
from ntkfl.tangent.factored import FactoredBlock
from ntkfl.tangent.jacobian import BlockJacobian
from ntkfl.tangent.layers import EmbeddingBlock, ScaleBlock
from ntkfl.tangent.losses import AnyLoss, find_loss
from ntkfl.tangent.parameters import evaluating
from ntkfl.tangent.passes import JacobianPlan
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
    fisher: "exact" takes all columns of R_i, H_i = R_i R_iᵀ, the loss's own `hessian_root`. "mc" takes one random
        column r_i in its place, E r_i r_iᵀ = H_i, so that every factor of outputs is right in the mean (A of weights
        that positions share, too): for cross-entropy the gradient for a label drawn from the model's own prediction.
        The work on factors falls by the number of columns; the Jacobian stays as it is. Gradients are exact in both.
    generator: what "mc" draws with, on the model's device; by default PyTorch's own.

    Cost: the Jacobian, and N·n² multiplications for a factor of n rows. Chunk by chunk, so that memory does not grow
    with N.
    """
    if fisher not in FISHERS:
        raise unknown("fisher", fisher, FISHERS)
    criterion, sums = find_loss(loss), _Totals(largest)
    squares = Y.new_zeros(plan.total)
    layers: list[Layer] = []
    for J, f, own in _chunks(model, x, Y, replace(plan, parts=[replace(part, dense=False) for part in plan.parts])):
        sums.add(GRADIENT, -J.vjp(criterion.residual(f, own)))
        R = criterion.hessian_root(f, own) if fisher == "exact" else criterion.drawn_root(f, own, generator)
        unmoved = {part.weight.start for part in plan.parts if part.weight is not None and part.constant}
        layers = []
        for block in J.blocks:
            if isinstance(block, FactoredBlock):
                layers.append(layer_of(block))
                sums.add_factors(layers[-1], block, R, layers[-1].weight[0] in unmoved, constant)
            else:
                assert isinstance(block, DenseBlock)
                values = (R.mT @ block.values).square().sum((0, 1))
                block.scatter(squares, values)
    rest = uncovered(tuple(layers), plan.total, squares.device)
    beside = {REST: squares[rest]} if len(rest) else {}
    return Sums({SAMPLES: Y.new_tensor(len(x)), **sums.arrays, **beside})


def step_curvature(model: nn.Module, x: Tensor, Y: Tensor, change: Tensor, loss: AnyLoss, plan: JacobianPlan) -> Tensor:
    """N Δᵀ C Δ = Σ_i ‖R_iᵀ J_i Δ‖² over the rows of x, []: the curvature that a change Δ [d] of the weights meets."""
    criterion, total = find_loss(loss), change.new_zeros((), dtype=torch.float64)
    for J, f, own in _chunks(model, x, Y, plan):
        R = criterion.hessian_root(f, own)
        total += (R.mT @ J.jvp(change).unsqueeze(2)).square().sum(dtype=torch.float64)
    return total


def layer_of(block: FactoredBlock) -> Layer:
    """The columns of a block whose weight trains."""
    assert block.weight is not None
    bias = None if block.bias is None else (block.bias.start, block.bias.stop)
    return Layer((block.weight.start, block.weight.stop), bias, isinstance(block, EmbeddingBlock))


def with_ones(seen: Tensor, block: FactoredBlock) -> Tensor:
    """What a layer sees, [..., inputs], with a 1 behind it where a bias trains: [..., m]."""
    return seen if block.bias is None else F.pad(seen, (0, 1), value=1.0)


def _chunks(
    model: nn.Module, x: Tensor, Y: Tensor, plan: JacobianPlan
) -> Iterator[tuple[BlockJacobian, Tensor, Tensor]]:
    """The Jacobian, outputs and targets of as many rows at a time as are differentiated at once."""
    rows = max(1, numbers_at_once(x) // plan.working)
    for batch, own in zip(torch.split(x, rows), torch.split(Y, rows), strict=True):
        J = jacobian(model, batch, plan=plan)
        assert isinstance(J, BlockJacobian)
        with evaluating(model), torch.no_grad():
            f = model(batch)
        yield J, f, own


class _Totals:
    """Arrays by name, added up chunk by chunk."""

    def __init__(self, largest: int) -> None:
        self.arrays: dict[str, Tensor] = {}
        self.largest = largest

    def add(self, name: str, value: Tensor) -> None:
        self.arrays[name] = self.arrays[name] + value if name in self.arrays else value

    def add_factors(self, layer: Layer, block: FactoredBlock, R: Tensor, never_changes: bool, constant: bool) -> None:
        """The layer's A and G over a chunk's samples, for roots R [N, d2, c]."""
        name, outputs = layer.name, f"{layer.name}/{OUTPUTS}"
        if isinstance(block, ScaleBlock):
            # A channel's own 2×2 block, exact (unit-wise, Osawa et al. 2020): its weights are too few for more.
            rooted = block.with_tensors((block.a, R.mT @ block.g))
            both = [rooted.weight_values()] + ([] if block.bias is None else [rooted.bias_values()])
            self.add_gram(f"{name}/{INPUTS}", torch.stack(both, dim=-1))
            return
        if not isinstance(block, EmbeddingBlock) and block.positions > 1:
            D = _derivatives(block, R)  # [N·c, groups, n, m]
            self.add_gram(f"{name}/{SHARED}", D.transpose(1, 2).flatten(0, 1))
            self.add_gram(outputs, D.permute(0, 3, 1, 2).flatten(0, 1))
            return
        if not never_changes or constant:
            inputs = f"{name}/{CONSTANT if never_changes else INPUTS}"
            if isinstance(block, EmbeddingBlock):  # one-hot inputs: their second moments are counts
                tokens = (layer.weight[1] - layer.weight[0]) // block.n_out
                counts = torch.bincount(block.a.flatten(), minlength=tokens).unsqueeze(0)
                self.add(inputs + DIAGONAL, counts.to(R.dtype))
            else:
                self.add_gram(inputs, with_ones(block.seen(), block).transpose(1, 2).flatten(0, 1))
        back = R.mT @ block.g  # b: [N, c, q]
        back = back.reshape(-1, block.groups, back.shape[2] // (block.positions * block.groups))
        self.add_gram(outputs, back, 1 / block.positions)

    def add_gram(self, name: str, rows: Tensor, scale: float = 1.0) -> None:
        """Add Σ v vᵀ over rows [..., groups, n]: for every group a triangle, or a sketch where n is too large."""
        by_group = rows.flatten(0, -3).transpose(0, 1)
        n = by_group.shape[2]
        if n <= self.largest:
            i, j = torch.triu_indices(n, n, device=rows.device)
            self.add(name, (by_group.mT @ by_group)[:, i, j] * scale)
            return
        probed = by_group.mT @ (by_group @ probe_matrix(n, sketch_rank(n)).to(rows))
        self.add(name + SKETCH, torch.cat([probed, by_group.square().sum(1).unsqueeze(2)], dim=2) * scale)


def _derivatives(block: FactoredBlock, R: Tensor) -> Tensor:
    """D = Rᵀ ∂f/∂W of every sample and column, a bias as the last input: [N·c, groups, outputs, inputs]."""
    groups, outputs = block.groups, block.g.shape[2] // block.positions
    rooted = block.with_tensors((block.a, R.mT @ block.g))
    weight = rooted.weight_values()
    D = weight.view(-1, groups, outputs // groups, weight.shape[2] // outputs)
    return D if block.bias is None else torch.cat([D, rooted.bias_values().reshape(*D.shape[:3], 1)], dim=-1)
