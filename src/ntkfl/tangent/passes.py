"""The passes behind a Jacobian: forward with known layers on tape, backward for all outputs, blocks from both.

There is one way to each form: known layers from the tape of `trace`, every other parameter by `torch.func`
(`dense_block`). A `JacobianPlan` says which parameter goes which way; `build.py` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from ntkfl.errors import ModelError
from ntkfl.tangent.blocks import Block, DenseBlock, FactoredBlock, Tape, Tensors, Use, Uses
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.layers import LAYERS
from ntkfl.tangent.parameters import column_slices, trainable, with_values

Values = Mapping[str, Tensor]  # tensors by parameter name


@dataclass(frozen=True)
class Part:
    """One block to be: a use of a module's weights, where samples lie in each of its calls, and its columns."""

    use: Use
    sample_dims: tuple[int, ...]
    weight: slice | None
    bias: slice | None
    constant: bool = False  # its inputs do not depend on any trained weight
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
    """How a model's columns are covered: parts through known layers, loose parameters of which every sample is given a
    copy (a position that is added to sequences), and those left for `torch.func`.

    `modules` and `parameters` (names and shapes of those that train) say of which model.
    """

    modules: dict[str, nn.Module]
    parameters: dict[str, torch.Size]
    known: dict[str, nn.Module]  # the layers of `LAYERS`
    parts: list[Part]
    copied: list[str]
    left: list[str]
    outputs: int  # d2
    total: int  # d
    working: int  # numbers alive while a row is differentiated

    def check(self, model: nn.Module) -> None:
        """`ModelError` unless the plan was made for this very model, with the same parameters to train."""
        if dict(model.named_modules()) != self.modules:
            raise ModelError("the plan is of another model: a copy, or one with a module replaced, needs its own plan")
        if {name: p.shape for name, p in trainable(model).items()} != self.parameters:
            raise ModelError("the plan is of other parameters: those that train have changed since it was made")

    def factored(self) -> JacobianPlan:
        """The same with the factors of every known layer, also where its derivatives are smaller."""
        return replace(self, parts=[replace(part, dense=False) for part in self.parts])

    def constant(self) -> set[int]:
        """First columns of the weights whose inputs do not depend on any trained weight."""
        return {part.weight.start for part in self.parts if part.weight is not None and part.constant}


class Pass(NamedTuple):
    """What is differentiated: the model's output for rows x, at `values` in place of its trainable parameters.

    `graph`: keep what gradients of the derivatives need. `contract`: S [N, c, d2], for the outputs S f [N, c] in place
    of f [N, d2].
    """

    model: nn.Module
    x: Tensor
    values: Values
    graph: bool = False
    contract: Tensor | None = None

    def contracted(self, f: Tensor) -> Tensor:
        """S_i f_i of every sample."""
        return f if self.contract is None else (self.contract @ f.unsqueeze(2)).squeeze(2)


class Trace(NamedTuple):
    """A forward pass: the recorded uses of weights, the trainable parameters it took, the model's output [N, d2]."""

    uses: Uses
    leaves: Values
    f: Tensor


def trace(own: Pass, known: Mapping[str, nn.Module], recorded: Iterable[str], live: bool = False) -> Trace:
    """The model's output f, the `recorded` of the `known` layers on tape.

    Recorded layers hold their parameters fixed and all parameters are leaves of the graph, so that a leaf with a
    gradient is one that is used outside these layers. With `live`, parameters and x stay part of the caller's graph.
    """
    leaves = own.values if live else {name: value.detach().requires_grad_() for name, value in own.values.items()}
    names, uses = {id(leaf): name for name, leaf in leaves.items()}, Uses()
    with substituted(known, {name: Tape(name, names, uses, live) for name in recorded}), torch.enable_grad():
        f = with_values(own.model, leaves)(own.x)
    if not f.requires_grad:
        raise ModelError("the model's output depends on none of its trainable parameters")
    return Trace(uses, leaves, f)


@contextmanager
def substituted(known: Mapping[str, nn.Module], tapes: Mapping[str, Tape]) -> Iterator[None]:
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


def used_outside(run: Trace, names: Sequence[str]) -> set[str]:
    """Which of these parameters are used outside the recorded layers. A search of the graph, no pass through it."""
    if not names:
        return set()
    leaves = [run.leaves[name] for name in names]
    with torch.enable_grad():
        gradients = torch.autograd.grad(run.f.sum(), leaves, retain_graph=True, allow_unused=True)
    return {name for name, g in zip(names, gradients, strict=True) if g is not None}


def piece(own: Pass, plan: JacobianPlan) -> Jacobian:
    """The Jacobian [N, d2, d] of a few rows by the plan, or S J [N, c, d].

    Its tensors may be views in any order: make them contiguous, or copy them to their place. Dense parts become one
    block, in the order of their columns whichever way they were made, so that one matrix product is for all of them.
    """
    try:
        found = list(taped(own, plan)) if plan.parts or plan.copied else []
    except (RuntimeError, IndexError):
        if not plan.copied:
            raise
        # With more samples than the plan was proved on, `position[:T]` takes samples where it means positions.
        both = [name for name in plan.parameters if name in (*plan.copied, *plan.left)]
        return piece(own, replace(plan, copied=[], left=both))
    blocks: list[Block] = [block for block in found if not isinstance(block, DenseBlock)]
    dense = [block for block in found if isinstance(block, DenseBlock)]
    if plan.left:
        with substituted(plan.known, {}):
            dense.append(dense_block(own, plan.left))
    if len(dense) > 1:
        split = (torch.split(block.values, [s.stop - s.start for s in block.columns], -1) for block in dense)
        pieces = zip((s for block in dense for s in block.columns), chain(*split), strict=True)
        columns, values = zip(*sorted(pieces, key=lambda piece: piece[0].start), strict=True)
        dense = [DenseBlock(torch.cat(values, dim=-1), columns)]
    blocks += dense
    return Jacobian(blocks, plan.outputs if own.contract is None else own.contract.shape[1], plan.total)


def taped(own: Pass, plan: JacobianPlan) -> Iterator[FactoredBlock | DenseBlock]:
    """A block for each part, in order, and for each copied parameter. `OtherPaths` unless every part was used by all
    samples, as often as planned, and in no other way.
    """
    recorded, slices = {part.use.module for part in plan.parts}, column_slices(own.values)
    own = own._replace(values={**own.values, **{name: _copies(own.values[name], len(own.x)) for name in plan.copied}})
    run = trace(own, plan.known, recorded)
    for part in plan.parts:
        calls = run.uses.get(part.use, [])
        if len(calls) != len(part.sample_dims) or any(
            t.shape[dim] != len(own.x) for call, dim in zip(calls, part.sample_dims, strict=True) for t in call
        ):
            raise OtherPaths
    if used_outside(run, [name for name in run.leaves if name not in (*plan.left, *plan.copied)]):
        raise OtherPaths
    if own.graph:
        run = trace(own, plan.known, recorded, live=True)
    uses = [run.uses[part.use] for part in plan.parts]
    inputs = [[a if own.graph else a.detach() for a, _ in calls] for calls in uses]
    with torch.enable_grad():
        f = own.contracted(run.f)
    copies = [run.leaves[name] for name in plan.copied]
    sensitivities = _sensitivities(f, [*(out for calls in uses for _, out in calls), *copies], own.graph)
    del run, f, uses  # and the graph, so that each call's sensitivities are free once their block holds them
    for part, seen in zip(plan.parts, inputs, strict=True):
        g = [sensitivities.pop(0).movedim(dim + 1, 0) for dim in part.sample_dims]
        yield _block(part, [a.movedim(dim, 0) for a, dim in zip(seen, part.sample_dims, strict=True)], g)
    for name, derivatives in zip(plan.copied, sensitivities, strict=True):
        yield DenseBlock(derivatives.transpose(0, 1).flatten(2), (slices[name],))


def _copies(parameter: Tensor, N: int) -> Tensor:
    """The parameter for each of N samples, as it broadcasts with them: [N, ...], in place of a first dimension of 1."""
    alone = parameter if parameter.shape[:1] == (1,) else parameter.unsqueeze(0)
    return alone.expand(N, *alone.shape[1:])


def _block(part: Part, inputs: Tensors, sensitivities: Tensors) -> FactoredBlock | DenseBlock:
    """All uses' derivatives summed: as factors, or dense where that is smaller or they have no factors in common."""
    kind = part.use.block
    factors = kind.factors(inputs, sensitivities, part.use.settings)
    if factors is None:
        each = [_block(part, [a], [g]).densify() for a, g in zip(inputs, sensitivities, strict=True)]
        return each[0].with_tensors((torch.stack([block.values for block in each]).sum(0),))
    a, g, settings = factors
    block = kind(a, g, part.weight, part.bias, settings)
    return block.densify() if part.dense or part.weight is None else block


def _sensitivities(f: Tensor, outputs: Tensors, graph: bool) -> list[Tensor]:
    """∂f_j/∂out, [d2, *out.shape], for each tapped output in turn; zero for one that nothing uses.

    One pass after the other: `torch.vmap` over them is slower on a CPU, where its arrays leave the cache.
    """
    # Samples before outputs in memory, as blocks have them.
    found = [out.new_empty(len(out), f.shape[1], *out.shape[1:]).transpose(0, 1) for out in outputs]
    for j in range(f.shape[1]):
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                f[:, j].sum(), outputs, retain_graph=True, create_graph=graph, allow_unused=True, materialize_grads=True
            )
        for target, g in zip(found, gradients, strict=True):
            target[j] = g
    return found


def dense_block(own: Pass, names: Sequence[str]) -> DenseBlock:
    """∂f/∂(the parameters in `names`) for each row of x; cost and memory N·d2·k.

    `torch.func` maps a backward pass over samples, for one output after the other, and not all of PyTorch's rules for
    that are right or there. So its result is compared with a plain backward pass over the same rows, which costs a
    d2-th as much, before it is used; else every output of every sample takes a backward pass of its own.
    """
    S = torch.empty(len(own.x), 0) if own.contract is None else own.contract
    chosen = {name: own.values[name] if own.graph else own.values[name].detach() for name in names}
    slices = column_slices(own.values)

    def output(chosen: Values, sample: Tensor, S: Tensor) -> Tensor:
        f = with_values(own.model, {**own.values, **chosen})(sample.unsqueeze(0)).squeeze(0)
        return f if own.contract is None else S @ f

    def block(derivatives: Values) -> DenseBlock:
        flat = [derivatives[name].flatten(start_dim=2) for name in names]
        return DenseBlock(torch.cat(flat, dim=-1), tuple(slices[name] for name in names))

    try:
        found = block(vmap(jacrev(output, chunk_size=1), in_dims=(None, 0, 0))(chosen, own.x, S))
        few = slice(None if own.contract is None else 2)  # where the check would cost as much as what it checks
        part = own._replace(x=own.x[few], values=chosen, contract=None if own.contract is None else S[few])
        if agrees_with_autograd(part, lambda R: R.reshape(-1) @ found.values[few].flatten(0, 1)):
            return found
    except RuntimeError:  # an operation without a rule (fused recurrent cells)
        pass
    with torch.enable_grad():
        leaves = {name: value if own.graph else value.requires_grad_() for name, value in chosen.items()}
        rows = [[_gradients(f, leaves, own.graph) for f in output(leaves, *row)] for row in zip(own.x, S, strict=True)]
    return block({name: torch.stack([torch.stack([g[name] for g in row]) for row in rows]) for name in names})


def _gradients(f: Tensor, leaves: Values, graph: bool) -> dict[str, Tensor]:
    """∂f/∂leaf of one number f, by name."""
    found = torch.autograd.grad(f, [*leaves.values()], retain_graph=True, create_graph=graph, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def agrees_with_autograd(own: Pass, vjp: Callable[[Tensor], Tensor]) -> bool:
    """Whether `vjp`, R ↦ Jᵀ R of these values, is a plain backward pass over all rows, up to the rounding of a few
    layers. R is random, so that a missed use, coupled rows and reordered rows show alike; the same in every process.

    True where autograd's is not finite: the error to report is then another.
    """
    leaves = {name: value.detach().clone().requires_grad_() for name, value in own.values.items()}
    with torch.enable_grad():
        f = own.contracted(with_values(own.model, leaves)(own.x))
        R = torch.randn(f.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(f)
        gradients = torch.autograd.grad((f * R).sum(), [*leaves.values()], materialize_grads=True)
    plain = torch.cat([g.to_dense().reshape(-1) for g in gradients])
    tolerance = 1e-8 if plain.dtype == torch.float64 else 1e-3
    scale = float(plain.norm())
    return not math.isfinite(scale) or float((vjp(R).detach() - plain).norm()) <= tolerance * max(scale, 1e-6)
