"""Sums that curvature is made of: the gradient and the Kronecker factors of the Gauss–Newton matrix, over samples.

C = (1/N) Σ_i J_iᵀ H_i J_i with H_i = ∂²ℓ/∂f² = R_i R_iᵀ. Its block for a layer of weights W is
(1/N) Σ_ic vec(D_ic) vec(D_ic)ᵀ with D_i = R_iᵀ ∂f_i/∂W, a matrix [outputs, inputs] for each column c, and is taken for
A ⊗ G. A layer that is used once per sample has D_ic = b_ic a_iᵀ, with its inputs a (and a 1 behind them where a bias
trains) and b = R_iᵀ ∂f/∂out (K-FAC, Martens & Grosse 2015):

    A = (1/N) Σ_i a_i a_iᵀ,   G = (1/N) Σ_ic b_ic b_icᵀ

Where weights are shared by positions, D_ic = Σ_t b_itc a_itᵀ. To take positions for independent (KFC, Grosse & Martens
2016) would lose what they add up to: behind an average over positions up to T times. So D itself is used,

    A = (1/N) Σ_ic D_icᵀ D_ic,   G = Σ_ic D_ic D_icᵀ / Σ_ic ‖D_ic‖²

one step of the power iteration to the nearest A ⊗ G from G = I (as Morwani et al. 2024 read Shampoo); its trace is C's.
All are sums over samples: those of several sets of samples add up to those of all of them. `sums.py` holds them,
`flow.py` evolves weights along them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ntkfl.tangent.build import jacobian, numbers_at_once
from ntkfl.tangent.constant_inputs import constant_inputs
from ntkfl.tangent.dense import DenseBlock
from ntkfl.tangent.factored import FactoredBlock, LinearBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian
from ntkfl.tangent.layers import ConvolutionBlock, EmbeddingBlock, ScaleBlock
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


def curvature_sums(
    model: nn.Module,
    x: Tensor,
    Y: Tensor,
    loss: AnyLoss,
    plan: JacobianPlan,
    constant: bool = True,
    largest: int = LARGEST,
) -> Sums:
    """The sums over the rows of x at the model's weights, for targets Y [N, d2]; `plan` is `plan_jacobian(model, x)`.

    Chunk by chunk, so that memory does not grow with N. `constant=False` leaves out factors of inputs that no weight is
    before; `largest` is the most rows of a factor that is kept whole: of larger ones a sketch is. C's H is the loss's
    own `hessian_root`, squared.
    """
    plan = replace(plan, parts=[replace(part, dense=False) for part in plan.parts])
    unmoved, rows, totals = constant_inputs(model, x[:1], plan), _rows(plan, x), dict[str, Tensor]()
    for few, own in zip(torch.split(x, rows), torch.split(Y, rows), strict=True):
        for name, array in _sums(model, few, own, loss, plan, unmoved, constant, largest).items():
            _add(totals, name, array)
    return Sums({SAMPLES: Y.new_tensor(len(x)), **totals})


def _sums(
    model: nn.Module,
    x: Tensor,
    Y: Tensor,
    loss: AnyLoss,
    plan: JacobianPlan,
    unmoved: set[int],
    constant: bool,
    largest: int,
) -> dict[str, Tensor]:
    """Sums over the rows of x, all differentiated at once."""
    totals: dict[str, Tensor] = {}
    criterion = find_loss(loss)
    J = jacobian(model, x, plan=plan)
    assert isinstance(J, BlockJacobian)
    with evaluating(model), torch.no_grad():
        f = model(x)
    totals[GRADIENT] = -J.vjp(criterion.residual(f, Y))
    R = criterion.hessian_root(f, Y)
    squares, layers = Y.new_zeros(plan.total), []
    for block in J.blocks:
        if isinstance(block, FactoredBlock):
            layers.append(_layer(block))
            _add_factors(totals, layers[-1], block, R, unmoved, constant, largest)
        else:
            _add_squares(squares, block, R)
    rest = uncovered(tuple(layers), plan.total, squares.device)
    if len(rest):
        totals[REST] = squares[rest]
    return totals


def step_curvature(model: nn.Module, x: Tensor, Y: Tensor, change: Tensor, loss: AnyLoss, plan: JacobianPlan) -> Tensor:
    """N Δᵀ C Δ = Σ_i ‖R_iᵀ J_i Δ‖² over the rows of x, []: the curvature that a change Δ [d] of the weights meets."""
    rows, criterion = _rows(plan, x), find_loss(loss)
    total = change.new_zeros((), dtype=torch.float64)
    for few, own in zip(torch.split(x, rows), torch.split(Y, rows), strict=True):
        with evaluating(model), torch.no_grad():
            R = criterion.hessian_root(model(few), own)
        moved = jacobian(model, few, plan=plan).jvp(change)
        total += (R.mT @ moved.unsqueeze(2)).square().sum(dtype=torch.float64)
    return total


def _rows(plan: JacobianPlan, x: Tensor) -> int:
    """Rows whose derivatives are held at once."""
    return max(1, numbers_at_once(x) // plan.working)


def _layer(block: FactoredBlock) -> Layer:
    assert block.weight is not None
    bias = None if block.bias is None else (block.bias.start, block.bias.stop)
    return Layer((block.weight.start, block.weight.stop), bias, isinstance(block, EmbeddingBlock))


def _add_factors(
    totals: dict[str, Tensor],
    layer: Layer,
    block: FactoredBlock,
    R: Tensor,
    unmoved: set[int],
    constant: bool,
    largest: int,
) -> None:
    name, outputs = layer.name, f"{layer.name}/{OUTPUTS}"
    if isinstance(block, ScaleBlock):
        # A channel's own 2×2 block, exact (unit-wise, Osawa et al. 2020): its weights are too few for more.
        both = [block.weight_values()] + ([] if block.bias is None else [block.bias_values()])
        back = R.mT @ torch.stack(both, dim=-1).flatten(2)
        _add_gram(totals, f"{name}/{INPUTS}", back.view(*back.shape[:2], -1, len(both)), largest)
        return
    if not isinstance(block, EmbeddingBlock) and _positions(block) > 1:
        D = _derivatives(block, R)  # [N·c, groups, n, m]
        _add_gram(totals, f"{name}/{SHARED}", D.transpose(1, 2).flatten(0, 1), largest)
        _add_gram(totals, outputs, D.permute(0, 3, 1, 2).flatten(0, 1), largest)
        return
    never_changes = layer.weight[0] in unmoved
    if not never_changes or constant:
        inputs = f"{name}/{CONSTANT if never_changes else INPUTS}"
        if isinstance(block, EmbeddingBlock):  # one-hot inputs: their second moments are counts
            tokens = (layer.weight[1] - layer.weight[0]) // block.E
            counts = torch.bincount(block.a.flatten(), minlength=tokens).unsqueeze(0)
            _add(totals, inputs + DIAGONAL, counts.to(R.dtype))
        else:
            _add_gram(totals, inputs, _inputs(block), largest)
    T, back = _positions(block), R.mT @ block.g  # b: [N, c, q]
    back = back.reshape(-1, _groups(block), back.shape[2] // (T * _groups(block)))
    _add_gram(totals, outputs, back, largest, 1 / T)


def _positions(block: FactoredBlock) -> int:
    """At how many positions of a sample the weights are used."""
    if isinstance(block, ConvolutionBlock):
        return block.U * block.P
    assert isinstance(block, LinearBlock | EmbeddingBlock)
    return block.T


def _groups(block: FactoredBlock) -> int:
    return block.geometry.groups if isinstance(block, ConvolutionBlock) else 1


def _derivatives(block: FactoredBlock, R: Tensor) -> Tensor:
    """D = Rᵀ ∂f/∂W of every sample and column, a bias as the last input: [N·c, groups, outputs, inputs]."""
    groups, outputs = _groups(block), block.g.shape[2] // _positions(block)
    weight = R.mT @ block.weight_values()
    D = weight.view(-1, groups, outputs // groups, weight.shape[2] // outputs)
    if block.bias is None:
        return D
    return torch.cat([D, (R.mT @ block.bias_values()).reshape(*D.shape[:3], 1)], dim=-1)


def _inputs(block: FactoredBlock) -> Tensor:
    """What the layer sees at each of its positions, with a 1 where a bias trains: [N·positions, groups, m]."""
    if isinstance(block, ConvolutionBlock):
        seen = block.geometry.patches(block.a.flatten(0, 1)).permute(0, 3, 1, 2).flatten(0, 1)
    else:
        assert isinstance(block, LinearBlock)
        seen = block.a.flatten(0, 1).unsqueeze(1)
    return seen if block.bias is None else torch.cat([seen, seen.new_ones(*seen.shape[:2], 1)], dim=-1)


def _add_gram(totals: dict[str, Tensor], name: str, rows: Tensor, largest: int, scale: float = 1.0) -> None:
    """Add Σ v vᵀ over rows [..., groups, n]: for every group a triangle, or a sketch where n is too large."""
    by_group = rows.flatten(0, -3).transpose(0, 1)
    n = by_group.shape[2]
    if n <= largest:
        i, j = torch.triu_indices(n, n, device=rows.device)
        _add(totals, name, (by_group.mT @ by_group)[:, i, j] * scale)
        return
    probed = by_group.mT @ (by_group @ probe_matrix(n, sketch_rank(n)).to(rows))
    _add(totals, name + SKETCH, torch.cat([probed, by_group.square().sum(1).unsqueeze(2)], dim=2) * scale)


def _add_squares(squares: Tensor, block: Block, R: Tensor) -> None:
    """Add C's diagonal at the columns of a dense block, to squares [d]."""
    assert isinstance(block, DenseBlock)
    values = (R.mT @ block.values).square().sum((0, 1))
    for span, part in zip(block.columns, torch.split(values, [s.stop - s.start for s in block.columns]), strict=True):
        squares[span] += part


def _add(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
    totals[name] = totals[name] + value if name in totals else value
