"""Gradients clipped sample by sample, and second moments of inputs of one norm: sums that one sample changes little.

A sample's gradient in a layer's weights is Σ_t b_t ⊗ a_t over the layer's T positions (a: inputs with a 1 where a bias
trains, b = −g_tᵀ r: the residual brought back to the layer's outputs). Whoever announces the weights can let positions
cancel, Σ_t b_t ⊗ a_t ≈ 0 with |b_t| |a_t| huge: then ‖Σ_t b_t ⊗ a_t‖² = Σ_ts ⟨b_t, b_s⟩ ⟨a_t, a_s⟩ is rounding errors,
and so is the sum. So what is measured are the very numbers that are added:

- T = 1: the norm is ‖a‖ ‖b‖, a product of positive numbers, where nothing cancels.
- T > 1: the sample's gradient is formed, and its numbers, however they were rounded on the way, are what is measured.

With u = 2⁻⁵³, norms of n numbers are made in float64 within (n/2 + 8) u of themselves, and a sample's numbers are
multiplied by 1/max(1, norm/clip), each within 4u. So for n weights a sample adds at most 1 + (n/2 + 12) u clips, 1e-9
above one for ten million. The sum over N samples, in float64 too, is off by at most N u Σ_i ‖what i adds‖ ≤ N² u clips,
1e-6 for 100,000 samples. All of it is far below the 1.001 clips that the noise is for.

A sample's forward and backward passes are in the weights' own type, and at weights that amplify roundings they may be
anything. They may not depend on what the other samples are, and matrix products take other kernels for other numbers of
rows. So passes are over chunks of one size, the last one filled up with zeros: a sample gives the same wherever the
others are, as long as it keeps its place. (Kernels round the rows of one matrix differently by their place: without a
sample in the middle those behind it move up, and at such weights they may change too. Simulated noise hides nothing
anyway; where private methods are to run between machines, samples have to go through the network one at a time.) What
is not finite adds nothing, and no error tells of it.

Where a layer is whitened, weights V with W = V P take the place of W: the inputs are P a, the gradient is the old one
times P, and what is clipped is the norm in V.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ntkfl.errors import MessageError
from ntkfl.tangent.build import numbers_at_once, unchecked_jacobian
from ntkfl.tangent.constant_inputs import constant_inputs
from ntkfl.tangent.curvature import LARGEST
from ntkfl.tangent.dense import DenseBlock
from ntkfl.tangent.factored import FactoredBlock, LinearBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian
from ntkfl.tangent.layers import ConvolutionBlock, EmbeddingBlock
from ntkfl.tangent.layers.geometry import Geometry
from ntkfl.tangent.linear_product import rowwise
from ntkfl.tangent.losses import AnyLoss, find_loss
from ntkfl.tangent.parameters import evaluating
from ntkfl.tangent.passes import JacobianPlan
from ntkfl.tangent.sums import Layer

_CPU_ROWS, _ACCELERATOR_ROWS = 64, 1024  # most samples in a chunk: the last one is filled up
_TINY = 1e-30
Whitening = Mapping[Layer, Tensor]  # P [m, m], symmetric, for a layer of m inputs (the bias's 1 among them)


def clipped_gradient(
    model: nn.Module, x: Tensor, Y: Tensor, loss: AnyLoss, plan: JacobianPlan, clip: float, whitening: Whitening
) -> Tensor:
    """Σ_i g_i · min(1, clip / ‖g_i‖) over the rows of x for targets Y [N, d2], g_i = ∂ℓ_i/∂w: float64 [d]. A sample
    whose gradient is not finite adds nothing.

    Columns of whitened layers are gradients in V. `plan` is `plan_jacobian(model, x)`; chunk by chunk.
    """
    if strange := whitening.keys() - _can_be_whitened(plan):
        raise MessageError(f"whitening of columns {next(iter(strange)).name}, where this network has no such layer")
    criterion, total = find_loss(loss), torch.zeros(plan.total, dtype=torch.float64, device=Y.device)
    for start, inputs, J in _chunks(model, x, plan):
        with evaluating(model), torch.no_grad():
            r = criterion.residual(model(inputs), _filled(Y[start : start + len(J)], len(J)))
        rows = max(1, numbers_at_once(x) // max(1, sum(_formed(block) for block in J.blocks)))
        for at in range(0, len(J), rows):
            part, own = J[at : at + rows], r[at : at + rows]
            shares = [_share(block, own, whitening) for block in part.blocks]
            norms = lengths(torch.stack([share.norms() for share in shares], dim=1))
            there = torch.arange(start + at, start + at + len(norms), device=norms.device) < len(x)
            factors = torch.where(there & norms.isfinite(), 1 / (norms / clip).clamp_min(1), 0.0)
            for share in shares:
                share.add(total, factors)
    return total


def whitened(gradient: Tensor, whitening: Whitening) -> Tensor:
    """A gradient [d] in W as one in V, or once more, a step in V as one in W: times P in both."""
    out = gradient.clone()
    for layer, P in whitening.items():
        outputs = (layer.weight[1] - layer.weight[0]) // (len(P) - (layer.bias is not None))
        layer.write(out, layer.matrices(gradient, 1, outputs) @ P)
    return out


def lengths(rows: Tensor) -> Tensor:
    """2-norm of each of rows [N, ...], float64 [N]: squares neither overflow nor vanish. Not finite where a number is
    not.
    """
    rows = rows.flatten(1).double()
    largest = rows.abs().amax(dim=1)
    scale = torch.where(largest == 0, 1.0, largest)
    found: Tensor = scale * (rows / scale.unsqueeze(1)).norm(dim=1)
    return found


def input_moments(model: nn.Module, x: Tensor, plan: JacobianPlan, largest: int = LARGEST) -> dict[Layer, Tensor]:
    """Σ_i Σ_t a_it a_itᵀ of layers that no trained weight is before, each sample brought to Σ_t ‖a_it‖² = 1: [m, m].

    So a sample adds a matrix of Frobenius norm at most 1. Linear layers and convolutions without groups, of at most
    `largest` inputs; inputs have mean square 1 beside the 1 of a bias.
    """
    unmoved, found = constant_inputs(model, x[:1], plan), dict[Layer, Tensor]()
    for start, _, J in _chunks(model, x, plan):
        for block in J[: len(x) - start].blocks:
            if not isinstance(block, LinearBlock | ConvolutionBlock) or block.weight is None:
                continue
            if block.weight.start not in unmoved or (a := _inputs(block, unit=True)).shape[1] > 1:
                continue
            if a.shape[3] > largest:
                continue
            norms = lengths(a)
            factors = torch.where(norms.isfinite(), 1 / norms.clamp_min(_TINY), 0.0).view(-1, 1, 1, 1)
            rows = (_finite(a) * factors).flatten(0, 2)
            layer = _layer(block.weight, block.bias)
            found[layer] = found.get(layer, 0) + rows.T @ rows
    return found


def _chunks(model: nn.Module, x: Tensor, plan: JacobianPlan) -> Iterator[tuple[int, Tensor, BlockJacobian]]:
    """(start, rows of x from there on, their factored Jacobian), always as many rows, zeros behind the last of x."""
    plan = replace(plan, parts=[replace(part, dense=False) for part in plan.parts])
    most = _CPU_ROWS if x.device.type == "cpu" else _ACCELERATOR_ROWS
    rows = max(1, min(most, numbers_at_once(x) // plan.working))
    for at in range(0, len(x), rows):
        inputs = _filled(x[at : at + rows], rows)
        yield at, inputs, unchecked_jacobian(model, inputs, plan)


def _filled(rows: Tensor, count: int) -> Tensor:
    """With zeros behind, so that there are `count`."""
    missing = count - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _finite(numbers: Tensor) -> Tensor:
    """In float64, with 0 for what is not finite: 0 times infinity is not 0."""
    return numbers.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _layer(weight: slice, bias: slice | None) -> Layer:
    return Layer((weight.start, weight.stop), None if bias is None else (bias.start, bias.stop), False)


def _can_be_whitened(plan: JacobianPlan) -> set[Layer]:
    """Linear layers, and convolutions without groups."""
    found = set()
    for part in plan.parts:
        groups = Geometry.of(part.use.settings).groups if part.use.block is ConvolutionBlock else 1
        if part.weight is not None and part.use.block in (LinearBlock, ConvolutionBlock) and groups == 1:
            found.add(_layer(part.weight, part.bias))
    return found


class _Share(Protocol):
    """What a chunk's samples have in some columns."""

    def norms(self) -> Tensor:
        """Of each sample, float64 [n]."""

    def add(self, total: Tensor, factors: Tensor) -> None:
        """total [d] += Σ_i factors_i g_i, of the samples whose factor is not 0."""


@dataclass(frozen=True)
class _Formed:
    """Gradients [n, k] as they are."""

    values: Tensor
    columns: tuple[slice, ...]

    def norms(self) -> Tensor:
        return lengths(self.values)

    def add(self, total: Tensor, factors: Tensor) -> None:
        _add(total, self.columns, factors @ _finite(self.values))


@dataclass(frozen=True)
class _Outer:
    """b_i ⊗ a_i with b [n, outputs] and a [n, inputs], a bias's 1 behind them."""

    b: Tensor
    a: Tensor
    columns: tuple[slice, ...]

    def norms(self) -> Tensor:
        return lengths(self.b) * lengths(self.a)

    def add(self, total: Tensor, factors: Tensor) -> None:
        product = (_finite(self.b) * factors.unsqueeze(1)).T @ _finite(self.a)
        _add(total, self.columns, _flat(product.unsqueeze(0), len(self.columns) > 1)[0])


@dataclass(frozen=True)
class _Tokens:
    """Rows [n, T, features] of an embedding's weight [tokens, features], each token of a sample once and else zeros."""

    values: Tensor
    tokens: Tensor  # [n, T]
    columns: tuple[slice, ...]

    def norms(self) -> Tensor:
        return lengths(self.values)

    def add(self, total: Tensor, factors: Tensor) -> None:
        rows = (_finite(self.values) * factors.view(-1, 1, 1)).flatten(0, 1)
        total[self.columns[0]].view(-1, rows.shape[1]).index_add_(0, self.tokens.reshape(-1), rows)


def _share(block: Block, r: Tensor, whitening: Whitening) -> _Share:
    """What a block contributes to the gradients −Jᵀ r."""
    if isinstance(block, DenseBlock):
        return _Formed(-rowwise(r, block.values), block.columns)
    assert isinstance(block, FactoredBlock)
    assert block.weight is not None
    columns = (block.weight,) if block.bias is None else (block.weight, block.bias)
    b = -rowwise(r, block.g)
    if isinstance(block, EmbeddingBlock):
        b = b.view(len(b), block.T, block.E)
        first = (block.a.unsqueeze(1) == block.a.unsqueeze(2)).to(torch.uint8).argmax(dim=2)
        values = torch.zeros_like(b).scatter_add_(1, first.unsqueeze(2).expand_as(b), b)
        return _Tokens(values, block.a, columns)
    P = whitening.get(_layer(block.weight, block.bias))
    if _used_once(block):
        a = _inputs(block).flatten(1)
        return _Outer(b, a if P is None else a @ P, columns)
    values = block.with_tensors((block.a, b.unsqueeze(1))).densify().values.squeeze(1)
    if P is not None:
        weights = block.weight.stop - block.weight.start
        outputs = weights // (len(P) - (block.bias is not None))
        matrices = values[:, :weights].view(len(values), outputs, -1)
        if block.bias is not None:
            matrices = torch.cat([matrices, values[:, weights:].unsqueeze(2)], dim=2)
        values = _flat(matrices @ P, block.bias is not None)
    return _Formed(values, columns)


def _used_once(block: Block) -> bool:
    """Whether samples use the layer at one position: their gradients are outer products."""
    return isinstance(block, LinearBlock) and block.T == 1


def _formed(block: Block) -> int:
    """Numbers of a sample's gradient that are formed."""
    if isinstance(block, DenseBlock):
        return block.values.shape[2]
    assert isinstance(block, FactoredBlock)
    return int(block.g.shape[2]) if isinstance(block, EmbeddingBlock) or _used_once(block) else block.columns


def _add(total: Tensor, columns: tuple[slice, ...], values: Tensor) -> None:
    """total [d] += values [k], which lie at these columns."""
    for span, own in zip(columns, torch.split(values, [s.stop - s.start for s in columns]), strict=True):
        total[span] += own


def _flat(matrices: Tensor, bias: bool) -> Tensor:
    """[n, outputs, inputs] as [n, columns]: of the weight, then of the bias, which is the last input."""
    return torch.cat([matrices[..., :-1].flatten(1), matrices[..., -1]], dim=1) if bias else matrices.flatten(1)


def _inputs(block: FactoredBlock, unit: bool = False) -> Tensor:
    """What a layer sees at each position, with a 1 where a bias trains; `unit`: at mean square 1. [N, groups, T, m]"""
    N = len(block.a)
    if isinstance(block, ConvolutionBlock):
        patches = block.geometry.patches(block.a.flatten(0, 1))  # [N·U, groups, m, P]
        seen = patches.view(N, block.U, *patches.shape[1:]).permute(0, 2, 1, 4, 3).flatten(2, 3)
    else:
        assert isinstance(block, LinearBlock)
        seen = block.a.unsqueeze(1)
    if unit:
        seen = seen / seen.flatten(1).square().mean(1).sqrt().clamp_min(_TINY).view(-1, 1, 1, 1)
    return seen if block.bias is None else torch.cat([seen, seen.new_ones(*seen.shape[:3], 1)], dim=3)
