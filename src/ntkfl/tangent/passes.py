"""The passes behind a Jacobian: forward with known layers on tape, backward once per output, blocks from both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ntkfl.errors import ModelError
from ntkfl.tangent.chain import Cotangents, backward, filter_derivatives, made
from ntkfl.tangent.dense import DenseBlock, dense_block, pull_back
from ntkfl.tangent.factored import Call, FactoredBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian
from ntkfl.tangent.layers import LAYERS, ConvolutionBlock
from ntkfl.tangent.layers.geometry import Geometry
from ntkfl.tangent.layers.tape import Tape, Use, Uses
from ntkfl.tangent.parameters import call_with, column_slices, trainable


@dataclass(frozen=True)
class Part:
    """One block to be: a use of a module's weights, where samples lie in each of its calls, and its columns."""

    use: Use
    sample_dims: tuple[int, ...]
    weight: slice | None
    bias: slice | None
    dense: bool = False  # keep every derivative, where that is smaller than the factors


class OtherPaths(ModelError):
    """Samples use other weights, or weights for other samples, than those on which the plan was made."""

    def __init__(self) -> None:
        super().__init__(
            "samples take different paths through the network (experts, early exits), so that its layers have no "
            "factors for all samples alike: use form='dense'"
        )


@dataclass(frozen=True)
class JacobianPlan:
    """How a model's columns are covered: parts through known layers, and the parameters left for `torch.func`.

    `modules` and `parameters` (names and shapes of those that train) say of which model.
    """

    modules: dict[str, nn.Module]
    parameters: dict[str, torch.Size]
    known: dict[str, nn.Module]
    parts: list[Part]
    left: list[str]
    outputs: int
    total: int
    stored: int = 0  # numbers a row of the Jacobian holds
    working: int = 1  # numbers alive while a row is differentiated
    chain: list[tuple[str, nn.Module]] | None = None  # the layers in order, where `chain.py` knows all of them
    copied: tuple[str, ...] = ()  # parameters outside known layers that may come as a copy for each sample

    def check(self, model: nn.Module) -> None:
        """`ModelError` unless the plan was made for this very model, with the same parameters to train."""
        if dict(model.named_modules()) != self.modules:
            raise ModelError("the plan is of another model: a copy, or one with a module replaced, needs its own plan")
        if {name: p.shape for name, p in trainable(model).items()} != self.parameters:
            raise ModelError("the plan is of other parameters: those that train have changed since it was made")


def piece(model: nn.Module, x: Tensor, plan: JacobianPlan) -> BlockJacobian:
    """The Jacobian of a few rows by the plan, or without its copies where they do not fit this many rows.

    Its tensors may be views in any order: `compact` it, or copy it to its place.
    """
    try:
        return follow(model, x, plan)
    except RuntimeError:
        if not plan.copied:
            raise
        # Positions cut to a sequence's length, `position[:T]`, have no room for the copies of more than T samples.
        return follow(model, x, replace(plan, left=[*plan.left, *plan.copied], copied=()))


def follow(model: nn.Module, x: Tensor, plan: JacobianPlan) -> BlockJacobian:
    """The Jacobian of a few rows, exactly as planned. Dense parts become one block: one matrix product for all."""
    blocks: list[Block] = []
    dense: list[DenseBlock] = []
    for block in _blocks(model, x, plan):
        if isinstance(block, DenseBlock):
            dense.append(block)
        else:
            blocks.append(block)
    if plan.left:
        with substituted(plan.known, {}):
            dense.append(dense_block(model, x, plan.left))
    if dense:
        columns = tuple(s for block in dense for s in block.columns)
        values = dense[0].values if len(dense) == 1 else torch.cat([block.values for block in dense], dim=-1)
        blocks.append(DenseBlock(values, columns))
    return BlockJacobian(blocks, plan.outputs, plan.total)


def compact(J: BlockJacobian) -> BlockJacobian:
    """The same in memory of its own, as blocks want it."""
    return J.mapped(torch.Tensor.contiguous)


def _blocks(model: nn.Module, x: Tensor, plan: JacobianPlan) -> Iterator[Block]:
    """A block for each part, in order, and one for each copied parameter."""
    if not plan.parts and not plan.copied:
        return
    if plan.chain is not None:
        parts = {part.use.module: part for part in plan.parts}
        blocks = {
            name: _chained(parts[name], input, at)
            for name, input, at in backward(plan.chain, x, {*parts}, plan.outputs)
        }
        yield from (blocks.pop(name) for name in parts)
        return
    recorded = {part.use.module for part in plan.parts}
    taped, leaves, f = tapped_forward(model, x, plan.known, recorded, plan.copied)
    _check_paths(taped, leaves, f, len(x), plan)
    calls = [taped[part.use] for part in plan.parts]
    outputs = [out for uses in calls for _, out in uses]
    sensitivities = _sensitivities(f, outputs + [leaves[name] for name in plan.copied])
    del f, outputs, taped, leaves
    for part, uses in zip(plan.parts, calls, strict=True):
        # An iterator, so that each call's sensitivities are free once their block holds them.
        pairs = zip(uses, part.sample_dims, strict=True)
        yield _block(part, [Call(a.movedim(dim, 0), next(sensitivities).movedim(dim + 1, 0)) for (a, _), dim in pairs])
    slices = column_slices(trainable(model))
    for name, values in zip(plan.copied, sensitivities, strict=True):
        yield DenseBlock(values.transpose(0, 1).flatten(2).contiguous(), (slices[name],))


def _check_paths(taped: Uses, leaves: dict[str, Tensor], f: Tensor, rows: int, plan: JacobianPlan) -> None:
    """Every part was used by all samples, as often as planned; and no weights of a part in any other way, nor those
    that the plan found unused. Costs a search of the graph, no pass through it.
    """
    for part in plan.parts:
        calls = taped.get(part.use, [])
        if len(calls) != len(part.sample_dims) or any(
            t.shape[dim] != rows for call, dim in zip(calls, part.sample_dims, strict=True) for t in call
        ):
            raise OtherPaths
    fixed = [leaf for name, leaf in leaves.items() if name not in (*plan.left, *plan.copied)]
    if fixed and any(g is not None for g in pull_back(f, fixed, torch.ones_like(f), retain_graph=True, zeros=False)):
        raise OtherPaths


def _block(part: Part, calls: Sequence[Call]) -> FactoredBlock | DenseBlock:
    block = part.use.block.from_calls(calls, part.weight, part.bias, part.use.settings)
    dense = part.dense or part.weight is None
    return block.densify() if dense and isinstance(block, FactoredBlock) else block


def _chained(part: Part, input: Tensor, at: Cotangents) -> Block:
    if part.use.block is not ConvolutionBlock or not part.dense or part.weight is None:
        return _block(part, [Call(input, made(at))])
    values = filter_derivatives(input, at, Geometry.of(part.use.settings), part.bias is not None)
    return DenseBlock(values, (part.weight,) if part.bias is None else (part.weight, part.bias))


def tapped_forward(
    model: nn.Module, x: Tensor, known: dict[str, nn.Module], recorded: set[str], copied: Sequence[str] = ()
) -> tuple[Uses, dict[str, Tensor], Tensor]:
    """A forward pass, the `recorded` of the known layers on tape: their uses, the parameters as leaves, the output.

    Those in `copied` go in as [N, *shape], so that their gradient is each sample's own.
    """
    uses: Uses = {}
    tapes = {name: Tape(name, uses) for name in recorded}
    leaves = {name: p.detach().requires_grad_() for name, p in trainable(model).items()}
    for name in copied:
        leaves[name] = leaves[name].detach().expand(len(x), *leaves[name].shape).requires_grad_()
    with substituted(known, tapes), torch.enable_grad():
        f = call_with(model, leaves, x)
    if not f.requires_grad:
        raise ModelError("the model's output depends on none of its trainable parameters")
    return uses, leaves, f


@contextmanager
def substituted(known: dict[str, nn.Module], tapes: dict[str, Tape]) -> Iterator[None]:
    """Known layers run by `LAYERS`, on their tape where they have one, so that no fused kernel is in the way."""

    def forward(module: nn.Module, tape: Tape) -> Callable[..., Any]:
        run, own = LAYERS[type(module)], module.forward

        def run_or_own(*args: Any, **kwargs: Any) -> Any:
            result = run(module, tape, *args, **kwargs)
            return own(*args, **kwargs) if result is NotImplemented else result

        return run_or_own

    with ExitStack() as stack:
        for name, module in known.items():
            # In the instance's own dictionary, in front of the class's method: nothing is computed twice, as in a hook.
            module.__dict__["forward"] = forward(module, tapes.get(name) or Tape())
            stack.callback(module.__dict__.pop, "forward")
        yield


def substitutable(module: nn.Module) -> bool:
    """A known layer that nobody has changed."""
    return type(module) in LAYERS and untouched(module)


def untouched(module: nn.Module) -> bool:
    """A user's hooks or own `forward` may compute something else than the module's class."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _sensitivities(f: Tensor, outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """∂f_j/∂out, [d2, *out.shape], for each tapped output in turn; zero for one that nothing uses."""

    def backward(seed: Tensor) -> tuple[Tensor, ...]:
        return pull_back(f, outputs, seed.expand(f.shape), retain_graph=True)

    seeds = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
    try:
        # Not `is_grads_batched`: its older rules take the seeds one by one in a convolution and stack the results.
        gradients = list(torch.vmap(backward)(seeds))
    except RuntimeError:  # an operation whose backward pass does not batch: an output at a time
        gradients = [torch.stack(same) for same in zip(*[backward(seed) for seed in seeds], strict=True)]

    def one_by_one() -> Iterator[Tensor]:
        while gradients:
            yield gradients.pop(0).detach()

    return one_by_one()


def row_numbers(J: BlockJacobian) -> int:
    """Numbers that a row of J holds."""
    return sum(math.prod(t.shape[1:]) for t in J.tensors())
