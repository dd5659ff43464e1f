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
others are, as long as it keeps its place. Kernels round the rows of one matrix differently by their place: without a
sample in the middle those behind it move up, and at such weights they may change too. So where the noise is real,
samples go through the network one at a time (`alone`): what one adds then depends on nothing but itself. What is not
finite adds nothing, and no error tells of it.

Where a layer is whitened, weights V with W = V P take the place of W: the inputs are P a, the gradient is the old one
times P, and what is clipped is the norm in V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ntkfl.errors import MessageError
from ntkfl.tangent.build import numbers_at_once, unchecked_jacobian
from ntkfl.tangent.curvature import LARGEST, layer_of, with_ones
from ntkfl.tangent.dense import DenseBlock
from ntkfl.tangent.factored import FactoredBlock, LinearBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian
from ntkfl.tangent.layers import ConvolutionBlock, EmbeddingBlock
from ntkfl.tangent.losses import AnyLoss, find_loss
from ntkfl.tangent.parameters import evaluating
from ntkfl.tangent.passes import JacobianPlan
from ntkfl.tangent.products import rowwise
from ntkfl.tangent.sums import Layer

_CPU_ROWS, _ACCELERATOR_ROWS = 64, 1024  # most samples in a chunk: the last one is filled up
_TINY = 1e-30
Whitening = Mapping[Layer, Tensor]  # P [m, m], symmetric, for a layer of m inputs (the bias's 1 among them)
# Of a chunk's n samples in some columns: norms, float64 [n], and total [d], factors [n] ↦ total += Σ_i factors_i g_i.
_Share = tuple[Tensor, Callable[[Tensor, Tensor], None]]


def clipped_gradient(
    model: nn.Module,
    x: Tensor,
    Y: Tensor,
    loss: AnyLoss,
    plan: JacobianPlan,
    clip: float,
    whitening: Whitening,
    alone: bool = False,
) -> Tensor:
    """Σ_i g_i · min(1, clip / ‖g_i‖) over the rows of x for targets Y [N, d2], g_i = ∂ℓ_i/∂w: float64 [d]. A sample
    whose gradient is not finite adds nothing.

    Columns of whitened layers are gradients in V. `plan` is `plan_jacobian(model, x)`; chunk by chunk, or `alone`: some
    ten times the time.
    """
    if strange := whitening.keys() - _can_be_whitened(plan):
        raise MessageError(f"whitening of columns {next(iter(strange)).name}, where this network has no such layer")
    criterion, total = find_loss(loss), torch.zeros(plan.total, dtype=torch.float64, device=Y.device)
    for start, inputs, J in _chunks(model, x, plan, alone):
        with evaluating(model), torch.no_grad():
            r = criterion.residual(model(inputs), _filled(Y[start : start + len(J)], len(J)))
        rows = max(1, numbers_at_once(x) // max(1, sum(_formed(block) for block in J.blocks)))
        for at in range(0, len(J), rows):
            part, own = J[at : at + rows], r[at : at + rows]
            shares = [_share(block, own, whitening) for block in part.blocks]
            norms = lengths(torch.stack([of_block for of_block, _ in shares], dim=1))
            real = torch.arange(start + at, start + at + len(norms), device=norms.device) < len(x)
            factors = torch.where(real & norms.isfinite(), 1 / (norms / clip).clamp_min(1), 0.0)
            for _, add in shares:
                add(total, factors)
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


def input_moments(
    model: nn.Module, x: Tensor, plan: JacobianPlan, largest: int = LARGEST, alone: bool = False
) -> dict[Layer, Tensor]:
    """Σ_i Σ_t a_it a_itᵀ of layers whose inputs do not depend on any trained weight, each sample brought to
    Σ_t ‖a_it‖² = 1: [m, m].

    So a sample adds a matrix of Frobenius norm at most 1. Linear layers and convolutions without groups, of at most
    `largest` inputs; inputs have mean square 1 beside the 1 of a bias.
    """
    unmoved = {part.weight.start for part in plan.parts if part.weight is not None and part.constant}
    found: dict[Layer, Tensor] = {}
    for start, _, J in _chunks(model, x, plan, alone):
        for block in J[: len(x) - start].blocks:
            if not isinstance(block, LinearBlock | ConvolutionBlock) or block.weight is None or block.groups > 1:
                continue
            seen = block.seen()
            if block.weight.start not in unmoved or seen.shape[3] + (block.bias is not None) > largest:
                continue
            size = seen.flatten(1).square().mean(1).sqrt().clamp_min(_TINY).view(-1, 1, 1, 1)
            a = with_ones(seen / size, block)
            norms = lengths(a)
            factors = torch.where(norms.isfinite(), 1 / norms.clamp_min(_TINY), 0.0).view(-1, 1, 1, 1)
            rows = (_finite(a) * factors).flatten(0, 2)
            layer = layer_of(block)
            found[layer] = found.get(layer, 0) + rows.T @ rows
    return found


def _chunks(
    model: nn.Module, x: Tensor, plan: JacobianPlan, alone: bool
) -> Iterator[tuple[int, Tensor, BlockJacobian]]:
    """(start, rows of x from there on, their factored Jacobian), always as many rows, zeros behind the last of x."""
    plan = replace(plan, parts=[replace(part, dense=False) for part in plan.parts])
    most = _CPU_ROWS if x.device.type == "cpu" else _ACCELERATOR_ROWS
    rows = 1 if alone else max(1, min(most, numbers_at_once(x) // plan.working))
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


def _can_be_whitened(plan: JacobianPlan) -> set[Layer]:
    """Linear layers, and convolutions without groups."""
    found = set()
    for part in plan.parts:
        groups = part.use.settings[-1] if part.use.block is ConvolutionBlock else 1
        if part.weight is not None and part.use.block in (LinearBlock, ConvolutionBlock) and groups == 1:
            bias = None if part.bias is None else (part.bias.start, part.bias.stop)
            found.add(Layer((part.weight.start, part.weight.stop), bias, False))
    return found


def _share(block: Block, r: Tensor, whitening: Whitening) -> _Share:
    """What a block contributes to the gradients −Jᵀ r."""
    if isinstance(block, DenseBlock):
        return _of_formed(-rowwise(r, block.values), block)
    assert isinstance(block, FactoredBlock)
    layer, b = layer_of(block), -rowwise(r, block.g)
    if isinstance(block, EmbeddingBlock):
        return _of_tokens(block, layer, b.view(-1, block.positions, block.n_out))
    P = whitening.get(layer)
    if _used_once(block):
        a = with_ones(block.seen(), block).flatten(1)
        return _of_outer(b, a if P is None else a @ P, layer)
    formed = block.with_tensors((block.a, b.unsqueeze(1))).densify()
    values = formed.values.squeeze(1)
    if P is not None:
        k = layer.weight[1] - layer.weight[0]
        matrices = values[:, :k].view(len(values), k // (len(P) - (layer.bias is not None)), -1)
        if layer.bias is None:
            values = (matrices @ P).flatten(1)
        else:
            moved = torch.cat([matrices, values[:, k:].unsqueeze(2)], dim=2) @ P
            values = torch.cat([moved[..., :-1].flatten(1), moved[..., -1]], dim=1)
    return _of_formed(values, formed)


def _of_formed(values: Tensor, block: DenseBlock) -> _Share:
    """Gradients [n, k] as they are, at the columns of a block."""
    return lengths(values), lambda total, factors: block.scatter(total, factors @ _finite(values))


def _of_outer(b: Tensor, a: Tensor, layer: Layer) -> _Share:
    """b_i ⊗ a_i with b [n, outputs] and a [n, inputs], a bias's 1 behind them: of one layer used once."""

    def add(total: Tensor, factors: Tensor) -> None:
        product = (_finite(b) * factors.unsqueeze(1)).T @ _finite(a)
        layer.write(total, layer.matrices(total, 1, b.shape[1]) + product)

    return lengths(b) * lengths(a), add


def _of_tokens(block: EmbeddingBlock, layer: Layer, b: Tensor) -> _Share:
    """Rows [n, T, features] of an embedding's weight: of a token that a sample has several times their sum, once."""
    first = (block.a.unsqueeze(1) == block.a.unsqueeze(2)).to(torch.uint8).argmax(dim=2)
    values = torch.zeros_like(b).scatter_add_(1, first.unsqueeze(2).expand_as(b), b)

    def add(total: Tensor, factors: Tensor) -> None:
        rows = (_finite(values) * factors.view(-1, 1, 1)).flatten(0, 1)
        total[slice(*layer.weight)].view(-1, block.n_out).index_add_(0, block.a.reshape(-1), rows)

    return lengths(values), add


def _used_once(block: Block) -> bool:
    """Whether samples use the layer at one position: their gradients are outer products."""
    return isinstance(block, LinearBlock) and block.positions == 1


def _formed(block: Block) -> int:
    """Numbers of a sample's gradient that are formed."""
    if isinstance(block, DenseBlock):
        return block.values.shape[2]
    assert isinstance(block, FactoredBlock)
    return int(block.g.shape[2]) if isinstance(block, EmbeddingBlock) or _used_once(block) else block.columns
