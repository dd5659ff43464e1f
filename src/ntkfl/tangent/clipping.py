"""Gradients clipped sample by sample, and second moments of inputs of one norm: sums that one sample changes little.

A sample's gradient in a layer's weights is Σ_t b_t ⊗ a_t over the layer's T positions (a: inputs with a 1 where a bias
trains, b = −g_tᵀ r: the residual brought back to the layer's outputs). Whoever announces the weights can let positions
cancel, Σ_t b_t ⊗ a_t ≈ 0 with |b_t| |a_t| huge: then ‖Σ_t b_t ⊗ a_t‖² = Σ_ts ⟨b_t, b_s⟩ ⟨a_t, a_s⟩ is rounding errors,
and so is the sum. So what is measured are the very numbers that are added:

- T = 1: the norm is ‖a‖ ‖b‖, a product of positive numbers, where nothing cancels.
- T > 1: the sample's gradient is formed, and its numbers, however they were rounded on the way, are what is measured.

So the gradients of a chunk are a Jacobian with one output, −rᵀJ, whose stored numbers are measured (`_measurable`);
what is added is its product with the clipping factors.

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

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ntkfl.errors import MessageError
from ntkfl.tangent.blocks import Block, FactoredBlock
from ntkfl.tangent.build import numbers_at_once, unchecked_jacobian
from ntkfl.tangent.curvature import LARGEST, layer_of, with_ones
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.layers import ConvolutionBlock, EmbeddingBlock, LinearBlock
from ntkfl.tangent.losses import AnyLoss, find_loss
from ntkfl.tangent.parameters import evaluating, flatten
from ntkfl.tangent.passes import JacobianPlan
from ntkfl.tangent.sums import Layer

_CPU_ROWS, _ACCELERATOR_ROWS = 64, 1024  # most samples in a chunk: the last one is filled up
_TINY = 1e-30
Whitening = Mapping[Layer, Tensor]  # P [m, m], symmetric, for a layer of m inputs (the bias's 1 among them)


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
    ten times the time. Cost: two forward passes and one backward pass, and the gradients of layers with positions.
    """
    if strange := whitening.keys() - _can_be_whitened(plan):
        raise MessageError(f"whitening of columns {next(iter(strange)).name}, where this network has no such layer")
    criterion, plan = find_loss(loss), plan.factored()
    total = torch.zeros(plan.total, dtype=torch.float64, device=Y.device)
    for start, inputs in _chunks(x, plan, alone):
        with evaluating(model), torch.no_grad():
            r = criterion.residual(model(inputs), _filled(Y[start : start + len(inputs)], len(inputs)))
        J = unchecked_jacobian(model, inputs, plan, -r.unsqueeze(1))  # g_i = −J_iᵀ r_i: [n, 1, d]
        rows = max(1, numbers_at_once(x) // max(1, sum(_formed(block) for block in J.blocks)))
        for at in range(0, len(J), rows):
            blocks = [own for block in J[at : at + rows].blocks for own in _measurable(block, whitening)]
            norms = lengths(torch.stack([_norms(block) for block in blocks], dim=1))
            real = torch.arange(start + at, start + at + len(norms), device=norms.device) < len(x)
            factors = torch.where(real & norms.isfinite(), 1 / (norms / clip).clamp_min(1), 0.0)
            total += Jacobian(blocks, 1, plan.total).mapped(_finite).vjp(factors.unsqueeze(1))
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


def input_moments(model: nn.Module, x: Tensor, plan: JacobianPlan, alone: bool = False) -> dict[Layer, Tensor]:
    """Σ_i Σ_t a_it a_itᵀ of layers whose inputs do not depend on any trained weight, each sample brought to
    Σ_t ‖a_it‖² = 1: [m, m].

    So a sample adds a matrix of Frobenius norm at most 1. Linear layers and convolutions without groups, of at most
    LARGEST inputs; inputs have mean square 1 beside the 1 of a bias.
    """
    found: dict[Layer, Tensor] = {}
    plan, unmoved = plan.factored(), plan.constant()
    nothing = flatten(model).new_zeros(1, 1, plan.outputs)  # nothing but inputs is needed
    for start, inputs in _chunks(x, plan, alone):
        J = unchecked_jacobian(model, inputs, plan, nothing.expand(len(inputs), -1, -1))
        for block in J[: len(x) - start].blocks:
            if not isinstance(block, LinearBlock | ConvolutionBlock) or block.weight is None or block.groups > 1:
                continue
            seen = block.seen()
            if block.weight.start not in unmoved or seen.shape[3] + (block.bias is not None) > LARGEST:
                continue
            size = seen.flatten(1).square().mean(1).sqrt().clamp_min(_TINY).view(-1, 1, 1, 1)
            a = with_ones(seen / size, block)
            norms = lengths(a)
            factors = torch.where(norms.isfinite(), 1 / norms.clamp_min(_TINY), 0.0).view(-1, 1, 1, 1)
            rows = (_finite(a) * factors).flatten(0, 2)
            layer = layer_of(block)
            found[layer] = found.get(layer, 0) + rows.T @ rows
    return found


def _chunks(x: Tensor, plan: JacobianPlan, alone: bool) -> Iterator[tuple[int, Tensor]]:
    """(start, rows of x from there on), always as many rows, zeros behind the last of x."""
    most = _CPU_ROWS if x.device.type == "cpu" else _ACCELERATOR_ROWS
    rows = 1 if alone else max(1, min(most, numbers_at_once(x) // plan.working))
    for at in range(0, len(x), rows):
        yield at, _filled(x[at : at + rows], rows)


def _filled(rows: Tensor, count: int) -> Tensor:
    """With zeros behind, so that there are `count`."""
    missing = count - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _finite(numbers: Tensor) -> Tensor:
    """In float64, with 0 for what is not finite: 0 times infinity is not 0. Tokens stay integers."""
    if not numbers.is_floating_point():
        return numbers
    return numbers.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _can_be_whitened(plan: JacobianPlan) -> set[Layer]:
    """Linear layers, and convolutions without groups."""
    found = set()
    for part in plan.parts:
        groups = part.use.settings[-1] if part.use.block is ConvolutionBlock else 1
        if part.weight is not None and part.use.block in (LinearBlock, ConvolutionBlock) and groups == 1:
            found.add(Layer.at(part.weight, part.bias))
    return found


def _measurable(block: Block, whitening: Whitening) -> list[Block]:
    """The block's gradients [n, 1, k], in V where it is whitened, as blocks whose stored numbers are what is added."""
    if not isinstance(block, FactoredBlock):
        return [block]
    if isinstance(block, EmbeddingBlock):  # of a token that a sample has several times, the sum stands once
        b = block.g.view(-1, block.positions, block.n_out)
        first = (block.a.unsqueeze(1) == block.a.unsqueeze(2)).to(torch.uint8).argmax(dim=2)
        once = torch.zeros_like(b).scatter_add_(1, first.unsqueeze(2).expand_as(b), b)
        return [block.with_tensors((block.a, once.view_as(block.g)))]
    P = whitening.get(layer_of(block))
    if _used_once(block):
        if P is None:
            return [block]
        n_in = block.a.shape[2]
        a = with_ones(block.a, block) @ P  # mixes the 1 of the bias with the inputs: the columns of both are weights
        parts = [(a[..., :n_in], block.weight), (a[..., n_in:], block.bias)]
        return [LinearBlock(inputs, block.g, span, None) for inputs, span in parts if span is not None]
    formed = block.densify()
    if P is not None:
        weight, *bias = torch.split(formed.values.squeeze(1), [b - a for a, b in formed.layout[1]], dim=1)
        matrices = torch.cat([weight.view(len(weight), block.n_out, -1), *(b.unsqueeze(2) for b in bias)], dim=2) @ P
        m = len(P) - len(bias)
        values = torch.cat([matrices[..., :m].flatten(1), matrices[..., m:].flatten(1)], dim=1)
        formed = formed.with_tensors((values.unsqueeze(1),))
    return [formed]


def _norms(block: Block) -> Tensor:
    """2-norm of each of the gradients [n, 1, k] that `_measurable` gives: float64 [n]."""
    if isinstance(block, LinearBlock):
        return lengths(block.g) * lengths(with_ones(block.a, block))
    return lengths(block.tensors()[-1])  # values, or the rows of tokens that are there once


def _used_once(block: Block) -> bool:
    """Whether samples use the layer at one position: their gradients are outer products."""
    return isinstance(block, LinearBlock) and block.positions == 1


def _formed(block: Block) -> int:
    """Numbers of a sample's gradient that are formed."""
    return 0 if isinstance(block, EmbeddingBlock) or _used_once(block) else sum(b - a for a, b in block.layout[1])
