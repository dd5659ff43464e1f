"""Gradients clipped sample by sample, and second moments of inputs of one norm: sums that one sample changes little.

A sample's gradient in a layer's weights is Σ_t b_t ⊗ a_t over the layer's T positions (a: inputs with a 1 where a bias
trains, b = −g_tᵀ r: the residual brought back to the layer's outputs). Its squared norm is

    ‖Σ_t b_t ⊗ a_t‖² = Σ_ts ⟨b_t, b_s⟩ ⟨a_t, a_s⟩,

so no sample's gradient is formed: at T = 1 it is ‖a‖² ‖b‖². Where a layer is whitened, weights V with W = V P take the
place of W: the inputs are P a, the gradient is the old one times P, and what is clipped is the norm in V.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ntkfl.tangent.build import jacobian, numbers_at_once
from ntkfl.tangent.constant_inputs import constant_inputs
from ntkfl.tangent.curvature import LARGEST
from ntkfl.tangent.dense import DenseBlock
from ntkfl.tangent.factored import FactoredBlock, LinearBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian
from ntkfl.tangent.layers import ConvolutionBlock, EmbeddingBlock, ScaleBlock
from ntkfl.tangent.losses import AnyLoss, find_loss
from ntkfl.tangent.parameters import evaluating
from ntkfl.tangent.passes import JacobianPlan
from ntkfl.tangent.sums import Layer

_TINY = 1e-30
Whitening = Mapping[Layer, Tensor]  # P [m, m], symmetric, for a layer of m inputs (the bias's 1 among them)


def clipped_gradient(
    model: nn.Module, x: Tensor, Y: Tensor, loss: AnyLoss, plan: JacobianPlan, clip: float, whitening: Whitening
) -> Tensor:
    """Σ_i g_i · min(1, clip / ‖g_i‖) over the rows of x for targets Y [N, d2], g_i = ∂ℓ_i/∂w: [d]. A sample whose
    gradient is not finite adds nothing.

    Columns of whitened layers are gradients in V. `plan` is `plan_jacobian(model, x)`; chunk by chunk.
    """
    criterion, total = find_loss(loss), Y.new_zeros(plan.total)
    for few, J in _chunks(model, x, plan):
        with evaluating(model), torch.no_grad():
            f = model(x[few])
        r = criterion.residual(f, Y[few])
        norms = squared_norms(J, r, whitening).sqrt()
        usable = norms.isfinite()
        if not bool(usable.all()):  # beyond what numbers can hold, as at extreme weights: such a sample adds nothing
            J, r, norms = J[usable.nonzero()[:, 0]], r[usable], norms[usable]
        if len(r):
            total -= J.vjp(r * (clip / norms.clamp_min(clip)).unsqueeze(1))
    return whitened(total, whitening)


def whitened(gradient: Tensor, whitening: Whitening) -> Tensor:
    """A gradient [d] in W as one in V, or once more, a step in V as one in W: times P in both."""
    out = gradient.clone()
    for layer, P in whitening.items():
        outputs = (layer.weight[1] - layer.weight[0]) // (len(P) - (layer.bias is not None))
        layer.write(out, layer.matrices(gradient, 1, outputs) @ P)
    return out


def squared_norms(J: BlockJacobian, r: Tensor, whitening: Whitening) -> Tensor:
    """‖J_iᵀ r_i‖² of every sample, with the inputs of whitened layers whitened: [N]."""
    total = r.new_zeros(len(r))
    for block in J.blocks:
        total += _squares(block, r, whitening)
    return total.clamp_min_(0)


def input_moments(model: nn.Module, x: Tensor, plan: JacobianPlan, largest: int = LARGEST) -> dict[Layer, Tensor]:
    """Σ_i Σ_t a_it a_itᵀ of layers that no trained weight is before, each sample brought to Σ_t ‖a_it‖² = 1: [m, m].

    So a sample adds a matrix of Frobenius norm at most 1. Linear layers and convolutions without groups, of at most
    `largest` inputs; inputs have mean square 1 beside the 1 of a bias.
    """
    unmoved, found = constant_inputs(model, x[:1], plan), dict[Layer, Tensor]()
    for _, J in _chunks(model, x, plan):
        for block in J.blocks:
            if not isinstance(block, LinearBlock | ConvolutionBlock) or block.weight is None:
                continue
            if block.weight.start not in unmoved or (a := _inputs(block, unit=True)).shape[1] > 1:
                continue
            if a.shape[3] > largest:
                continue
            rows = (a / a.flatten(1).norm(dim=1).clamp_min(_TINY).view(-1, 1, 1, 1)).flatten(0, 2)
            layer = layer_of(block)
            found[layer] = found.get(layer, 0) + rows.T @ rows
    return found


def _chunks(model: nn.Module, x: Tensor, plan: JacobianPlan) -> Iterator[tuple[slice, BlockJacobian]]:
    """Rows of x and their factored Jacobian, so few at a time that memory does not grow with N."""
    plan = replace(plan, parts=[replace(part, dense=False) for part in plan.parts])
    rows = max(1, numbers_at_once(x) // plan.working)
    for at in range(0, len(x), rows):
        J = jacobian(model, x[at : at + rows], plan=plan)
        assert isinstance(J, BlockJacobian)
        yield slice(at, at + rows), J


def layer_of(block: FactoredBlock) -> Layer:
    assert block.weight is not None
    bias = None if block.bias is None else (block.bias.start, block.bias.stop)
    return Layer((block.weight.start, block.weight.stop), bias, isinstance(block, EmbeddingBlock))


def _squares(block: Block, r: Tensor, whitening: Whitening) -> Tensor:
    """A block's share of the squared norms, [N]."""
    if isinstance(block, DenseBlock):  # no factors: the rows are there already
        return torch.einsum("nj,njk->nk", r, block.values).square().sum(1)
    assert isinstance(block, FactoredBlock)
    if isinstance(block, ScaleBlock):  # two numbers per channel: as few as their factors
        both = [block.weight_values()] + ([] if block.bias is None else [block.bias_values()])
        return sum((torch.einsum("nj,njk->nk", r, own).square().sum(1) for own in both), start=r.new_zeros(len(r)))
    back = torch.einsum("nj,njq->nq", r, block.g)
    if isinstance(block, EmbeddingBlock):
        b = back.view(len(r), block.T, block.E)
        same = block.a.unsqueeze(1) == block.a.unsqueeze(2)
        return ((b @ b.mT) * same).sum(dim=(1, 2))
    a = _inputs(block)
    P = whitening.get(layer_of(block))
    a = a if P is None else a @ P
    b = _brought_back(block, back)
    if a.shape[2] == 1:  # one position: no pairs
        return (a.square().sum(3) * b.square().sum(3)).sum(dim=(1, 2))
    return ((a @ a.mT) * (b @ b.mT)).sum(dim=(1, 2, 3))


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


def _brought_back(block: FactoredBlock, back: Tensor) -> Tensor:
    """b at each position: [N, q] as [N, groups, T, n]."""
    N = len(back)
    if isinstance(block, ConvolutionBlock):
        groups = block.geometry.groups
        split = back.view(N, block.U, groups, block.C_out // groups, block.P)
        return split.permute(0, 2, 1, 4, 3).flatten(2, 3)
    assert isinstance(block, LinearBlock)
    return back.view(N, 1, block.T, block.n_out)
