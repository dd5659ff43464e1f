"""Deciding, on two samples, which form each parameter's derivatives take, and proving the decision against autograd.

A known layer runs with its parameters fixed, its outputs tapped. A parameter that still has a gradient after that is
used in some other way (an unknown layer, a functional call) and goes, like a tied weight, to a dense block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ntkfl.errors import ModelError
from ntkfl.tangent.chain import find_chain
from ntkfl.tangent.dense import agree, pull_back, random_cotangent
from ntkfl.tangent.jacobian import BlockJacobian
from ntkfl.tangent.layers.tape import Slot, Use, Uses
from ntkfl.tangent.model_check import COUPLED, check_outputs
from ntkfl.tangent.parameters import call_with, column_slices, trainable
from ntkfl.tangent.passes import (
    JacobianPlan,
    Part,
    compact,
    follow,
    piece,
    row_numbers,
    substitutable,
    tapped_forward,
    untouched,
)


def make_plan(model: nn.Module, x: Tensor, form: str) -> JacobianPlan:
    """The cheapest exact cover of all columns (`form` "auto"), factors wherever known ("factored"), or no factors."""
    probe = two_samples(x)
    outputs = check_outputs(model, probe)
    parameters, modules = trainable(model), dict(model.named_modules())
    known = {name: m for name, m in modules.items() if substitutable(m)}
    shapes = {name: p.shape for name, p in parameters.items()}
    total = sum(p.numel() for p in parameters.values())
    stored = outputs * total
    dense = JacobianPlan(modules, shapes, known, [], list(parameters), outputs, total, stored, 3 * stored)
    if form != "dense":
        try:
            plan, J = _by_layers(model, x, probe, dense, form)
        except RuntimeError:
            if form == "factored":
                raise
        else:
            if _agrees_with_autograd(model, probe, J):
                return plan
            if form == "factored":
                raise ModelError(COUPLED)
        # What surrounds a known layer may hide it from autograd: one that is run again in the backward pass.
    if not _agrees_with_autograd(model, probe, compact(piece(model, probe, dense))):
        raise ModelError(COUPLED)
    return dense


def _by_layers(
    model: nn.Module, x: Tensor, probe: Tensor, dense: JacobianPlan, form: str
) -> tuple[JacobianPlan, BlockJacobian]:
    """Of each known layer the smaller of factors and derivatives, or ("factored") its factors; with the Jacobian of
    the probe.
    """
    parameters, known, outputs = trainable(model), dense.known, dense.outputs
    alone = tapped_forward(model, probe[:1], known, set(known))[0]
    pair, leaves, f = tapped_forward(model, probe, known, set(known))
    gradients = pull_back(f, list(leaves.values()), torch.ones_like(f), zeros=False)
    leaking = {name for name, g in zip(leaves, gradients, strict=True) if g is not None}

    slots = _slots(parameters, known, pair)
    dims = {use: _sample_dims(use, alone.get(use, []), pair[use]) for use in slots}
    refused = leaking | _shared(slots) | {p for use in slots if dims[use] is None for p, _ in slots[use]}
    names = [{p for p, _ in named} for named in slots.values()]
    while more := {p for same in names if refused & same for p in same} - refused:
        refused |= more  # a layer is factored in all its parameters or in none
    slices = column_slices(parameters)
    parts = []
    for use, named in slots.items():
        sample_dims = dims[use]
        if sample_dims is not None and not any(p in refused for p, _ in named):
            columns = {slot: _columns(slices[p], parameters[p], slot) for p, slot in named}
            bias = None if use.bias is None else columns.get(use.bias)
            part = Part(use, sample_dims, columns.get(use.weight), bias)
            parts.append(replace(part, dense=form == "auto" and _dense_is_smaller(part, pair[use], outputs)))
    left = [p for p in parameters if p in refused]
    if form == "factored" and left:
        raise ModelError(
            f"no factored form is known for {', '.join(left[:4])}{' …' if len(left) > 4 else ''}: "
            "use form='auto' (a dense block for those alone) or form='dense'"
        )
    chain = None if left else find_chain(model, probe, untouched)
    plan = replace(dense, parts=parts, left=left, chain=chain)
    copied = replace(plan, left=[], copied=tuple(left))
    if left and _takes_copies(model, x, copied):
        plan = copied
    J = compact(piece(model, probe, plan))
    stored = row_numbers(J)
    return replace(plan, stored=stored, working=stored + _working(plan, pair, slices)), J


def two_samples(x: Tensor) -> Tensor:
    """The first of x and the first that is unlike it, or itself twice: equal samples would not show that a model makes
    them depend on each other.
    """
    other = 1 % len(x)
    if torch.equal(x[0], x[other]):
        unlike = (x != x[:1]).reshape(len(x), -1).any(1)
        other = int(unlike.to(torch.uint8).argmax()) if len(x) > 2 else other
    return x[[0, other]]


_Slots = dict[Use, list[tuple[str, Slot]]]


def _slots(parameters: dict[str, nn.Parameter], known: dict[str, nn.Module], uses: Uses) -> _Slots:
    """The uses of weights that train, each with the names of its trainable parameters in the model."""
    names = {id(p): name for name, p in parameters.items()}
    # Under every name that a parameter has in a module: two names may be one tensor.
    own = {
        module: {role: id(p) for role, p in known[module].named_parameters(remove_duplicate=False)}
        for module in {use.module for use in uses}
    }
    found: _Slots = {}
    for use in uses:
        identities = [(own[use.module][slot.name], slot) for slot in (use.weight, use.bias) if slot is not None]
        named = [(names[identity], slot) for identity, slot in identities if identity in names]
        if named:
            found[use] = named
    return found


def _shared(uses: _Slots) -> set[str]:
    """Parameters of which some rows are used through more than one module or in more than one way."""
    seen: dict[str, list[Slot]] = {}
    shared = set()
    for p, slot in (both for named in uses.values() for both in named):
        if any(slot.start < _stop(other) and other.start < _stop(slot) for other in seen.get(p, [])):
            shared.add(p)
        seen.setdefault(p, []).append(slot)
    return shared


def _stop(slot: Slot) -> float:
    return float("inf") if slot.stop is None else slot.stop


def _columns(span: slice, parameter: Tensor, slot: Slot) -> slice:
    """The columns of some rows of a parameter."""
    if slot.stop is None:
        return span
    width = parameter.numel() // parameter.shape[0]
    return slice(span.start + slot.start * width, span.start + slot.stop * width)


_Calls = list[tuple[Tensor, Tensor]]


def _sample_dims(use: Use, one: _Calls, two: _Calls) -> tuple[int, ...] | None:
    """Where samples lie in each call: the one dimension that is 1 for one sample and 2 for two. None: nowhere."""
    if len(one) != len(two):
        return None
    found = []
    for (a1, out1), (a2, out2) in zip(one, two, strict=True):
        dims = {_growing(a1, a2), _growing(out1, out2)}
        dim = dims.pop()
        if dims or dim is None or not use.block.admits(dim, a2.ndim, use.settings):
            return None
        found.append(dim)
    return tuple(found)


def _growing(one: Tensor, two: Tensor) -> int | None:
    if one.ndim != two.ndim:
        return None
    differ = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    return differ[0] if len(differ) == 1 and (one.shape[differ[0]], two.shape[differ[0]]) == (1, 2) else None


def _dense_is_smaller(part: Part, pair: _Calls, outputs: int) -> bool:
    """By numbers a row: all derivatives, or inputs and sensitivities."""
    factors = sum(a.numel() + outputs * out.numel() for a, out in pair) // 2
    columns = sum(_width(s) for s in (part.weight, part.bias) if s is not None)
    return outputs * columns <= factors


def _width(span: slice) -> int:
    return int(span.stop - span.start)


def _working(plan: JacobianPlan, pair: Uses, slices: dict[str, slice]) -> int:
    """Numbers a row needs while it is differentiated: activations, sensitivities and a copy of them, dense values."""
    calls = [call for part in plan.parts for call in pair[part.use]]
    taps = sum(a.numel() + 2 * (1 + plan.outputs) * out.numel() for a, out in calls) // 2
    func = 3 * plan.outputs * sum(_width(slices[p]) for p in (*plan.left, *plan.copied))
    return taps + func


def _takes_copies(model: nn.Module, x: Tensor, plan: JacobianPlan) -> bool:
    """Whether the model gives the same Jacobian when a parameter that it uses itself comes as a copy for each sample.

    So it is with learned positions that are added to [N, T, E], or weights of a batched product; then one backward
    pass has all derivatives, where `torch.func` would run the network again. Tried with two and three samples, for
    where a parameter's size is by chance the number of samples, wrong shapes may fit.
    """
    for count in (2, 3):
        probe = x[torch.arange(count, device=x.device) % len(x)]
        try:
            if not _agrees_with_autograd(model, probe, compact(follow(model, probe, plan))):
                return False
        except Exception:  # a user's own forward pass says in its own way that a shape is not what it expects
            return False
    return True


def _agrees_with_autograd(model: nn.Module, probe: Tensor, J: BlockJacobian) -> bool:
    """Jᵀ R against a plain backward pass, R random: catches a missed use, coupled rows and reordered rows alike."""
    leaves = {name: p.detach().requires_grad_() for name, p in trainable(model).items()}
    with torch.enable_grad():
        f = call_with(model, leaves, probe)
    cotangent = random_cotangent(J.shape[:2], f)
    gradients = pull_back(f, list(leaves.values()), cotangent)
    expected = torch.cat([g.to_dense().reshape(-1) for g in gradients])
    return agree(J.vjp(cotangent), expected)
