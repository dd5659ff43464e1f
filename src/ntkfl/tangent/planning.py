"""Deciding, on two samples, which form each parameter's derivatives take, and proving the decision against autograd.

A known layer runs with its parameters fixed, its outputs tapped. A parameter that still has a gradient after that is
used in some other way (an unknown layer, a functional call) and goes, like a tied weight, to a dense block.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, nn

from ntkfl.errors import ModelError
from ntkfl.tangent.chain import find_chain
from ntkfl.tangent.dense import agree, plain_product, pull_back
from ntkfl.tangent.jacobian import BlockJacobian
from ntkfl.tangent.layers import LAYERS
from ntkfl.tangent.layers.tape import Use, Uses
from ntkfl.tangent.model_check import COUPLED, check_outputs
from ntkfl.tangent.parameters import column_slices, trainable
from ntkfl.tangent.passes import JacobianPlan, Part, compact, piece, trace

_Calls = list[tuple[Tensor, Tensor]]


def make_plan(model: nn.Module, x: Tensor, form: str) -> JacobianPlan:
    """The cheapest exact cover of all columns (`form` "auto"), factors wherever known ("factored"), or no factors."""
    probe = two_samples(x)
    outputs = check_outputs(model, probe)
    parameters, modules = trainable(model), dict(model.named_modules())
    known = {name: m for name, m in modules.items() if type(m) in LAYERS and untouched(m)}
    shapes = {name: p.shape for name, p in parameters.items()}
    total = sum(p.numel() for p in parameters.values())
    stored = outputs * total
    dense = JacobianPlan(modules, shapes, known, [], list(parameters), outputs, total, stored, 3 * stored)
    if form != "dense":
        try:
            plan, J = _by_layers(model, probe, dense, form)
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


def _by_layers(model: nn.Module, probe: Tensor, dense: JacobianPlan, form: str) -> tuple[JacobianPlan, BlockJacobian]:
    """Of each known layer the smaller of factors and derivatives, or ("factored") its factors; with the Jacobian of
    the probe.
    """
    parameters, known, outputs = trainable(model), dense.known, dense.outputs
    alone = trace(model, probe[:1], known, set(known), parameters).uses
    pair, leaves, f = trace(model, probe, known, set(known), parameters)
    gradients = pull_back(f, list(leaves.values()), torch.ones_like(f), zeros=False)
    leaking = {name for name, g in zip(leaves, gradients, strict=True) if g is not None}

    named = _trained(parameters, known, pair)
    counts = Counter(p for roles in named.values() for p in roles.values())
    dims = {use: _sample_dims(use, alone.get(use, []), pair[use]) for use in named}
    refused = leaking | {p for p in counts if counts[p] > 1}  # used outside known layers, or in more than one way
    refused |= {p for use in named if dims[use] is None for p in named[use].values()}
    while more := {p for roles in named.values() if refused & {*roles.values()} for p in roles.values()} - refused:
        refused |= more  # a layer is factored in all its parameters or in none
    slices = column_slices(parameters)
    parts = []
    for use, roles in named.items():
        sample_dims = dims[use]
        if sample_dims is not None and not refused & {*roles.values()}:
            weight, bias = (slices[roles[role]] if role in roles else None for role in ("weight", "bias"))
            part = Part(use, sample_dims, weight, bias)
            parts.append(replace(part, dense=form == "auto" and _dense_is_smaller(part, pair[use], outputs)))
    left = [p for p in parameters if p in refused]
    if form == "factored" and left:
        raise ModelError(
            f"no factored form is known for {', '.join(left[:4])}{' …' if len(left) > 4 else ''}: "
            "use form='auto' (a dense block for those alone) or form='dense'"
        )
    # Only layers with trained weights are recorded now, so an input with a gradient is one behind such a weight.
    uses = trace(model, probe, known, {part.use.module for part in parts}, parameters).uses
    parts = [replace(part, constant=not any(a.requires_grad for a, _ in uses[part.use])) for part in parts]
    plan = replace(dense, parts=parts, left=left, chain=None if left else find_chain(model, probe, untouched))
    J = compact(piece(model, probe, plan))
    stored = sum(math.prod(t.shape[1:]) for t in J.tensors())
    return replace(plan, stored=stored, working=stored + _working(plan, pair)), J


def two_samples(x: Tensor) -> Tensor:
    """The first of x and the first that is unlike it, or itself twice: equal samples would not show that a model makes
    them depend on each other.
    """
    other = 1 % len(x)
    if torch.equal(x[0], x[other]):
        unlike = (x != x[:1]).reshape(len(x), -1).any(1).to(torch.uint8)
        other = int(unlike.argmax()) or other
    return x[[0, other]]


def untouched(module: nn.Module) -> bool:
    """A user's hooks or own `forward` may compute something else than the module's class."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _trained(parameters: dict[str, nn.Parameter], known: dict[str, nn.Module], uses: Uses) -> dict[Use, dict[str, str]]:
    """The uses of weights that train: names in the model of its trainable "weight" and "bias"."""
    names = {id(p): name for name, p in parameters.items()}
    found = {}
    for use in uses:
        # Under every name that a parameter has in a module: two names may be one tensor.
        own = {role: id(p) for role, p in known[use.module].named_parameters(remove_duplicate=False)}
        parameters_of = {"weight": own[use.weight]} | ({} if use.bias is None else {"bias": own[use.bias]})
        if roles := {role: names[p] for role, p in parameters_of.items() if p in names}:
            found[use] = roles
    return found


def _sample_dims(use: Use, one: _Calls, two: _Calls) -> tuple[int, ...] | None:
    """Where samples lie in each call: the one dimension that is 1 for one sample and 2 for two. None: nowhere."""
    if len(one) != len(two):
        return None
    found = []
    for (a1, out1), (a2, out2) in zip(one, two, strict=True):
        dim = _growing(a1, a2)
        if dim is None or dim != _growing(out1, out2) or not use.block.admits(dim, a2.ndim, use.settings):
            return None
        found.append(dim)
    return tuple(found)


def _growing(one: Tensor, two: Tensor) -> int | None:
    """The one dimension that is 1 in the first and 2 in the second."""
    if one.ndim != two.ndim:
        return None
    differ = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    return differ[0] if len(differ) == 1 and (one.shape[differ[0]], two.shape[differ[0]]) == (1, 2) else None


def _dense_is_smaller(part: Part, pair: _Calls, outputs: int) -> bool:
    """By numbers a row: all derivatives, or inputs and sensitivities."""
    factors = sum(a.numel() + outputs * out.numel() for a, out in pair) // 2
    columns = sum(int(s.stop - s.start) for s in (part.weight, part.bias) if s is not None)
    return outputs * columns <= factors


def _working(plan: JacobianPlan, pair: Uses) -> int:
    """Numbers a row needs while it is differentiated: activations, sensitivities and a copy of them, dense values."""
    calls = [call for part in plan.parts for call in pair[part.use]]
    taps = sum(a.numel() + 2 * (1 + plan.outputs) * out.numel() for a, out in calls) // 2
    return taps + 3 * plan.outputs * sum(math.prod(plan.parameters[p]) for p in plan.left)


def _agrees_with_autograd(model: nn.Module, probe: Tensor, J: BlockJacobian) -> bool:
    """Jᵀ R against a plain backward pass, R random: catches a missed use, coupled rows and reordered rows alike."""
    cotangent, expected = plain_product(model, probe, trainable(model))
    return agree(J.vjp(cotangent), expected)
