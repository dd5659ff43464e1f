"""Sums that curvature is made of: the gradient and the Kronecker factors of the Gauss–Newton matrix, over samples.

C = (1/N) Σ_i J_iᵀ H_i J_i with H_i = ∂²ℓ/∂f² = R_i R_iᵀ. A layer's block of C is taken for A ⊗ G (K-FAC, Martens &
Grosse 2015; KFC for convolutions, Grosse & Martens 2016), over the T positions of a sample

    A = (1/N) Σ_i Σ_t a_it a_itᵀ,   G = (1/N) Σ_i (1/T) Σ_tc b_itc b_itcᵀ

with the layer's inputs a (and a 1 behind them where a bias trains) and b = R_iᵀ ∂f/∂out. All are sums over samples:
those of clients add up to those of their pooled data. `sums.py` holds them, `flow.py` evolves weights along them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ntkfl.tangent.build import jacobian
from ntkfl.tangent.dense import DenseBlock
from ntkfl.tangent.factored import FactoredBlock, LinearBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian
from ntkfl.tangent.layers import ConvolutionBlock, EmbeddingBlock, ScaleBlock
from ntkfl.tangent.layers.tape import Slot, Tape, Use
from ntkfl.tangent.losses import AnyLoss, find_loss
from ntkfl.tangent.parameters import evaluating, trainable
from ntkfl.tangent.passes import JacobianPlan, substituted
from ntkfl.tangent.sums import CONSTANT, GRADIENT, INPUTS, OUTPUTS, REST, SAMPLES, Layer, Sums, uncovered

LARGEST = 1024  # rows of a factor; of a larger one only the diagonal is kept
CPU_NUMBERS, _NUMBERS = 2**23, 2**27  # alive at once while a chunk is differentiated, as in `tracing.py`


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
    before; `largest` is the most rows of a factor that is kept whole. C's H is the loss's own `hessian_root`, squared.
    """
    plan = replace(plan, parts=[replace(part, dense=False) for part in plan.parts])
    unmoved = constant_inputs(model, x[:1], plan)
    criterion = find_loss(loss)
    rows = max(1, (CPU_NUMBERS if x.device.type == "cpu" else _NUMBERS) // plan.working)
    totals: dict[str, Tensor] = {}
    squares = Y.new_zeros(plan.total)
    layers: list[Layer] = []
    for at in range(0, len(x), rows):
        few = x[at : at + rows]
        J = jacobian(model, few, plan=plan)
        assert isinstance(J, BlockJacobian)
        with evaluating(model), torch.no_grad():
            f = model(few)
        own = Y[at : at + rows]
        _add(totals, GRADIENT, -J.vjp(criterion.residual(f, own)))
        R = criterion.hessian_root(f, own)
        layers = []
        for block in J.blocks:
            if isinstance(block, FactoredBlock):
                layers.append(_layer(block))
                _add_factors(totals, layers[-1], block, R, unmoved, constant, largest)
            else:
                _add_squares(squares, block, R)
    rest = uncovered(layers, plan.total, squares.device)
    if len(rest):
        totals[REST] = squares[rest]
    return Sums({SAMPLES: Y.new_tensor(len(x)), **totals})


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
    never_changes = layer.weight[0] in unmoved and not isinstance(block, ScaleBlock)  # whose factor has sensitivities
    inputs = f"{layer.name}/{CONSTANT if never_changes else INPUTS}"
    if isinstance(block, ScaleBlock):
        # A channel's own 2×2 block, exact (unit-wise, Osawa et al. 2020): its weights are too few for more.
        both = [block.weight_values()] + ([] if block.bias is None else [block.bias_values()])
        back = R.mT @ torch.stack(both, dim=-1).flatten(2)
        _add_gram(totals, inputs, back.view(*back.shape[:2], -1, len(both)), largest)
        return
    if not never_changes or constant:
        if isinstance(block, EmbeddingBlock):  # one-hot inputs: their second moments are counts
            counts = torch.bincount(block.a.reshape(-1), minlength=(layer.weight[1] - layer.weight[0]) // block.E)
            _add(totals, f"{inputs}.diagonal", counts.to(R.dtype).unsqueeze(0))
        else:
            _add_gram(totals, inputs, _inputs(block), largest)
    back = R.mT @ block.g  # b: [N, c, q]
    positions, rows = _outputs(block, back)
    _add_gram(totals, f"{layer.name}/{OUTPUTS}", rows, largest, 1 / positions)


def _inputs(block: FactoredBlock) -> Tensor:
    """What the layer sees at every position, with a 1 where a bias trains: [rows, groups, m]."""
    if isinstance(block, ConvolutionBlock):
        seen = block.geometry.patches(block.a.flatten(0, 1)).permute(0, 3, 1, 2).flatten(0, 1)
    else:
        assert isinstance(block, LinearBlock)
        seen = block.a.reshape(-1, 1, block.n_in)
    return seen if block.bias is None else torch.cat([seen, seen.new_ones(*seen.shape[:2], 1)], dim=-1)


def _outputs(block: FactoredBlock, back: Tensor) -> tuple[int, Tensor]:
    """(positions of a sample, b at each of them: [rows, groups, n])."""
    if isinstance(block, ConvolutionBlock):
        groups = block.geometry.groups
        split = back.view(*back.shape[:2], block.U, groups, block.C_out // groups, block.P)
        return block.U * block.P, split.permute(0, 1, 2, 5, 3, 4).flatten(0, 3)
    assert isinstance(block, LinearBlock | EmbeddingBlock)
    return block.T, back.reshape(-1, 1, back.shape[2] // block.T)


def _add_gram(totals: dict[str, Tensor], name: str, rows: Tensor, largest: int, scale: float = 1.0) -> None:
    """Add Σ v vᵀ over rows [..., groups, n]: for every group a triangle, or a diagonal where n is too large."""
    rows = rows.reshape(-1, *rows.shape[-2:])
    n = rows.shape[2]
    if n > largest:
        _add(totals, f"{name}.diagonal", rows.square().sum(0) * scale)
        return
    by_group = rows.transpose(0, 1)
    i, j = torch.triu_indices(n, n, device=rows.device)
    _add(totals, name, (by_group.mT @ by_group)[:, i, j] * scale)


def _add_squares(squares: Tensor, block: Block, R: Tensor) -> None:
    """Add C's diagonal at the columns of a dense block."""
    assert isinstance(block, DenseBlock)
    values = (R.mT @ block.values).square().sum(dim=(0, 1))
    sizes = [span.stop - span.start for span in block.columns]
    for span, part in zip(block.columns, torch.split(values, sizes), strict=True):
        squares[span] += part


def _add(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
    totals[name] = totals[name] + value if name in totals else value


def constant_inputs(model: nn.Module, x: Tensor, plan: JacobianPlan) -> set[int]:
    """First columns of the layers whose input no trained weight is before: their A is the same in every round."""
    moved: set[Use] = set()
    tapes: dict[str, Tape] = {part.use.module: _Origins(part.use.module, moved) for part in plan.parts}
    leaves = {name: p.detach().requires_grad_() for name, p in trainable(model).items()}
    with evaluating(model), substituted(plan.known, tapes), torch.enable_grad():
        functional_call(model, leaves, (x,))
    return {part.weight.start for part in plan.parts if part.weight is not None and part.use not in moved}


class _Origins(Tape):
    """Notes which uses of weights have trained weights before them."""

    def __init__(self, module: str, moved: set[Use]) -> None:
        super().__init__(module, {})
        self.moved = moved

    def tap(
        self,
        block: type[FactoredBlock],
        input: Tensor,
        output: Tensor,
        weight: Slot | str,
        bias: Slot | str | None = None,
        settings: tuple[int, ...] = (),
    ) -> Tensor:
        result = super().tap(block, input, output, weight, bias, settings)
        if input.requires_grad:
            self.moved |= {use for use, calls in (self.uses or {}).items() if calls[-1][1] is output}
        return result
