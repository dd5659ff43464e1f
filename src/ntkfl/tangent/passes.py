"""The passes behind a Jacobian: forward with known layers on tape, backward for all outputs, blocks from both.

There is one way to each form: a chain of layers by `chain.py`, the known layers of any other network from the tape of
`trace`, and every other parameter by `torch.func` (`dense_block`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ntkfl.errors import ModelError
from ntkfl.tangent.chain import Chain, Cotangents, backward, filter_derivatives, made
from ntkfl.tangent.dense import DenseBlock, dense_block, pull_back
from ntkfl.tangent.factored import Call, FactoredBlock
from ntkfl.tangent.jacobian import Block, BlockJacobian
from ntkfl.tangent.layers import LAYERS, ConvolutionBlock
from ntkfl.tangent.layers.geometry import Geometry
from ntkfl.tangent.layers.tape import Tape, Use, Uses
from ntkfl.tangent.parameters import call_with, trainable

Values = Mapping[str, Tensor]  # tensors by parameter name


@dataclass(frozen=True)
class Part:
    """One block to be: a use of a module's weights, where samples lie in each of its calls, and its columns."""

    use: Use
    sample_dims: tuple[int, ...]
    weight: slice | None
    bias: slice | None
    dense: bool = False  # keep every derivative, where that is smaller than the factors
    constant: bool = False  # its inputs do not depend on any trained weight


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
    chain: Chain | None = None  # the layers in order, where `chain.py` knows all of them

    def check(self, model: nn.Module) -> None:
        """`ModelError` unless the plan was made for this very model, with the same parameters to train."""
        if dict(model.named_modules()) != self.modules:
            raise ModelError("the plan is of another model: a copy, or one with a module replaced, needs its own plan")
        if {name: p.shape for name, p in trainable(model).items()} != self.parameters:
            raise ModelError("the plan is of other parameters: those that train have changed since it was made")


class Trace(NamedTuple):
    """A forward pass: the recorded uses of weights, the trainable parameters it took, the model's output [N, d2]."""

    uses: Uses
    leaves: Values
    f: Tensor


def trace(
    model: nn.Module, x: Tensor, known: dict[str, nn.Module], recorded: set[str], values: Values, live: bool = False
) -> Trace:
    """The model's output for x at these parameters, the `recorded` of the `known` layers on tape.

    Recorded layers hold their parameters fixed and all parameters are leaves of the graph, so that a leaf with a
    gradient is one that is used outside these layers. With `live`, parameters and x stay part of the caller's graph.
    """
    uses: Uses = {}
    tapes = {name: Tape(name, uses, live) for name in recorded}
    leaves = values if live else {name: value.detach().requires_grad_() for name, value in values.items()}
    with substituted(known, tapes), torch.enable_grad():
        f = call_with(model, leaves, x)
    if not f.requires_grad:
        raise ModelError("the model's output depends on none of its trainable parameters")
    return Trace(uses, leaves, f)


def piece(
    model: nn.Module,
    x: Tensor,
    plan: JacobianPlan,
    params: Values | None = None,
    graph: bool = False,
    contract: Tensor | None = None,
) -> BlockJacobian:
    """The Jacobian of a few rows by the plan, at `params` in place of the model's own of those names.

    Its tensors may be views in any order: `compact` it, or copy it to its place. Dense parts become one block, so that
    one matrix product is for all of them. `graph`: keep what gradients of the derivatives need. `contract`: S
    [N, c, d2], for S J [N, c, d] in place of J.
    """
    values = {**trainable(model), **(params or {})}
    blocks: list[Block] = []
    dense: list[DenseBlock] = []
    if plan.parts:
        by_hand = plan.chain is not None and not params and not graph and contract is None
        for block in _chained(x, plan) if by_hand else _taped(model, x, plan, values, graph, contract):
            if isinstance(block, DenseBlock):
                dense.append(block)
            else:
                blocks.append(block)
    if plan.left:
        with substituted(plan.known, {}):
            dense.append(dense_block(model, x, plan.left, values, graph, contract))
    if dense:
        columns = tuple(s for block in dense for s in block.columns)
        blocks.append(DenseBlock(torch.cat([b.values for b in dense], -1) if dense[1:] else dense[0].values, columns))
    return BlockJacobian(blocks, plan.outputs if contract is None else contract.shape[1], plan.total)


def compact(J: BlockJacobian) -> BlockJacobian:
    """The same in memory of its own, as blocks want it."""
    return J.mapped(torch.Tensor.contiguous)


def _chained(x: Tensor, plan: JacobianPlan) -> list[Block]:
    """A block for each part of a chain, in order."""
    assert plan.chain is not None
    parts = {part.use.module: part for part in plan.parts}
    blocks = {name: _of_chain(parts[name], a, at) for name, a, at in backward(plan.chain, x, {*parts}, plan.outputs)}
    return [blocks[name] for name in parts]


def _of_chain(part: Part, input: Tensor, at: Cotangents) -> Block:
    """A block from inputs [N, …] and cotangents [N, d2, …] that a chain gave."""
    if part.use.block is not ConvolutionBlock or not part.dense or part.weight is None:
        return _block(part, [Call(input, made(at))])
    values = filter_derivatives(input, at, Geometry.of(part.use.settings), part.bias is not None)
    return DenseBlock(values, (part.weight,) if part.bias is None else (part.weight, part.bias))


def _taped(
    model: nn.Module, x: Tensor, plan: JacobianPlan, values: Values, graph: bool, contract: Tensor | None
) -> Iterator[Block]:
    """A block for each part, in order."""
    recorded = {part.use.module for part in plan.parts}
    run = trace(model, x, plan.known, recorded, values)
    _check_paths(run, len(x), plan)
    if graph:
        run = trace(model, x, plan.known, recorded, values, live=True)
    calls = [run.uses[part.use] for part in plan.parts]
    sensitivities = _sensitivities(run.f, [out for uses in calls for _, out in uses], graph, contract)
    inputs = [[a if graph else a.detach() for a, _ in uses] for uses in calls]
    del run, calls  # and the graph, so that each call's sensitivities are free once their block holds them
    for part, own in zip(plan.parts, inputs, strict=True):
        pairs = zip(own, part.sample_dims, strict=True)
        yield _block(part, [Call(a.movedim(dim, 0), sensitivities.pop(0).movedim(dim + 1, 0)) for a, dim in pairs])


def _check_paths(run: Trace, rows: int, plan: JacobianPlan) -> None:
    """Every part was used by all samples, as often as planned; and no weights of a part in any other way, nor those
    that the plan found unused. Costs a search of the graph, no pass through it.
    """
    for part in plan.parts:
        calls = run.uses.get(part.use, [])
        if len(calls) != len(part.sample_dims) or any(
            t.shape[dim] != rows for call, dim in zip(calls, part.sample_dims, strict=True) for t in call
        ):
            raise OtherPaths
    fixed = [leaf for name, leaf in run.leaves.items() if name not in plan.left]
    f = run.f
    if fixed and any(g is not None for g in pull_back(f, fixed, torch.ones_like(f), retain_graph=True, zeros=False)):
        raise OtherPaths


def _block(part: Part, calls: Sequence[Call]) -> FactoredBlock | DenseBlock:
    """All calls' derivatives summed: as factors, or dense where that is smaller or they have no factors in common."""
    kind, columns = part.use.block, (part.weight, part.bias)
    factors = kind.factors(calls, part.use.settings)
    if factors is None:
        total, *more = [_block(replace(part, dense=True), [call]) for call in calls]
        assert isinstance(total, DenseBlock)
        return DenseBlock(sum((block.tensors()[0] for block in more), total.values), total.columns)
    a, g, settings = factors
    block = kind(a, g, *columns, settings)
    return block.densify() if part.dense or part.weight is None else block


def _sensitivities(f: Tensor, outputs: Sequence[Tensor], graph: bool, contract: Tensor | None) -> list[Tensor]:
    """∂f_j/∂out, [d2, *out.shape], for each tapped output in turn; zero for one that nothing uses. With S [N, c, d2],
    ∂(S f)_j/∂out, [c, *out.shape].
    """

    def backward(seed: Tensor) -> tuple[Tensor, ...]:
        return pull_back(f, outputs, seed, retain_graph=True, graph=graph)

    if contract is None:
        seeds = torch.eye(f.shape[1], dtype=f.dtype, device=f.device).unsqueeze(1).expand(-1, *f.shape)
    else:
        seeds = contract.transpose(0, 1)
    if not graph and len(seeds) > 1:
        try:
            # Not `is_grads_batched`: its older rules take the seeds one by one in a convolution and stack the results.
            return [gradient.detach() for gradient in torch.vmap(backward)(seeds)]
        except RuntimeError:  # an operation whose backward pass does not batch
            pass
    return [torch.stack(same) for same in zip(*[backward(seed) for seed in seeds], strict=True)]


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
