"""Building a Jacobian from a model: a forward pass with taps on known layers, and a backward pass per output.

A known layer runs with its parameters detached, its output tapped; the tap's derivative is the layer's sensitivity.
A parameter that still has a gradient after that is used in some other way (an unknown layer, a functional call, a
tied weight) and gets a dense block instead. What was built is then checked against autograd on two rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ntkfl.errors import ModelError, NumericalError, unknown
from ntkfl.tangent.dense import dense_block
from ntkfl.tangent.factored import LAYERS, Call
from ntkfl.tangent.jacobian import Block, BlockJacobian, Jacobian, concatenate
from ntkfl.tangent.parameters import column_slices, evaluating, trainable

FORMS = ("auto", "factored", "dense")
_WORKING_NUMBERS = 2**25  # numbers alive at once while a chunk is differentiated: 128 MiB in float32


@dataclass(frozen=True)
class _Plan:
    """How a model's columns are covered: modules in factored form, and the parameters left for a dense block."""

    modules: dict[str, nn.Module]
    columns: dict[str, tuple[slice | None, ...]]
    dense: list[str]
    outputs: int
    total: int
    numbers_per_row: int  # numbers alive while one row is differentiated


def jacobian(model: nn.Module, x: Tensor, form: str = "auto", chunk: int | None = None) -> Jacobian:
    """Sample-wise Jacobian of `model` at its current weights, in eval mode, for the rows of x.

    form: "factored" (every parameter through a known layer, else an error), "dense" (every derivative stored,
    N·d2·d numbers), or "auto" (factored where known, dense blocks for the rest). `chunk` rows are differentiated at
    a time; by default as many as keep the working memory near 128 MiB. The model is left as it was.
    """
    if form not in FORMS:
        raise unknown("Jacobian form", form, FORMS)
    if x.ndim < 1 or x.shape[0] == 0:
        raise ModelError(f"x must hold at least one sample, got shape {list(x.shape)}")
    with evaluating(model), torch.no_grad():
        plan = _plan(model, x, form)
        rows = chunk or max(1, _WORKING_NUMBERS // plan.numbers_per_row)
        pieces = [_piece(model, part, plan) for part in torch.split(x, rows)]
    J = concatenate(pieces)
    # A sum is finite unless an element is not (or it overflows: then the elements decide), and several times cheaper.
    if not all(bool(t.sum().isfinite()) or bool(t.isfinite().all()) for t in J.tensors()):
        raise NumericalError("the Jacobian has values that are not finite: look for NaN in the inputs or the weights")
    return J


def _plan(model: nn.Module, x: Tensor, form: str) -> _Plan:
    """Decide, on two rows, which layers are factored and what is left, and prove the decision against autograd."""
    probe = x[:2]
    parameters = trainable(model)
    slices = column_slices(parameters)
    total = sum(p.numel() for p in parameters.values())
    f = model(probe)
    if not isinstance(f, Tensor) or f.ndim != 2 or f.shape[0] != probe.shape[0]:
        shape = list(f.shape) if isinstance(f, Tensor) else type(f).__name__
        raise ModelError(f"the model must map {probe.shape[0]} samples to [{probe.shape[0]}, d2]; it gave {shape}")
    if not bool(f.isfinite().all()):
        raise NumericalError("the model's output is not finite: look for NaN in the inputs or the weights")
    _check_rows_alone(model, probe, f)
    outputs = f.shape[1]
    if form == "dense":
        return _Plan({}, {}, list(parameters), outputs, total, 3 * outputs * total)

    known = {name: m for name, m in model.named_modules() if type(m) in LAYERS and not _hooked(m)}
    single = _tapped_forward(model, probe[:1], known)[0]
    taps, leaves, f = _tapped_forward(model, probe, known)
    gradients = torch.autograd.grad(f, list(leaves.values()), torch.ones_like(f), allow_unused=True)
    leaking = {name for name, g in zip(leaves, gradients, strict=True) if g is not None}
    owner = _owners(parameters, known)
    # A layer is factored when each of its parameters is used through it alone and its calls keep one row a sample.
    factored = {
        name: module
        for name, module in known.items()
        if taps.get(name)
        and owner[name]
        and all(owner_of == name and p not in leaking for p, owner_of in owner[name].items())
        and all(a.shape[0] == out.shape[0] == probe.shape[0] for a, out in taps[name])
        and all(a.shape[0] == out.shape[0] == 1 for a, out in single[name])
    }
    columns = {}
    for name, module in factored.items():
        by_role = {role: p for p, role in _roles(module, parameters).items()}
        columns[name] = tuple(slices[by_role[r]] if r in by_role else None for r in LAYERS[type(module)].parameters)
    covered = {p for name in factored for p in owner[name]}
    touched = covered | leaking | {p for name in known if taps.get(name) for p in owner[name]}
    dense = [name for name in parameters if name in touched and name not in covered]
    if form == "factored" and dense:
        raise ModelError(
            f"no factored form is known for {', '.join(dense[:4])}{' …' if len(dense) > 4 else ''}: "
            "use form='auto' (a dense block for those alone) or form='dense'"
        )
    tap_numbers = sum(a[0].numel() + 3 * outputs * out[0].numel() for calls in taps.values() for a, out in calls)
    dense_numbers = 3 * outputs * sum(parameters[name].numel() for name in dense)
    plan = _Plan(factored, columns, dense, outputs, total, max(1, tap_numbers + dense_numbers))
    _check_against_autograd(model, probe, plan, _piece(model, probe, plan))
    return plan


def _piece(model: nn.Module, x: Tensor, plan: _Plan) -> BlockJacobian:
    """The Jacobian of a few rows, following the plan."""
    blocks: list[Block] = []
    if plan.modules:
        taps, _, f = _tapped_forward(model, x, plan.modules)
        outs = [out for calls in taps.values() for _, out in calls]
        seeds = torch.eye(plan.outputs, dtype=f.dtype, device=f.device).unsqueeze(1).expand(-1, *f.shape)
        gradients = torch.autograd.grad(f, outs, seeds, is_grads_batched=True, allow_unused=True)
        sensitivities = iter(  # an output that nothing uses has none: zero
            out.new_zeros(plan.outputs, *out.shape) if g is None else g for out, g in zip(outs, gradients, strict=True)
        )
        for name, calls in taps.items():
            layer = LAYERS[type(plan.modules[name])]
            recorded = [Call(a.detach(), next(sensitivities).movedim(0, 1).detach()) for a, _ in calls]
            blocks.append(layer.from_calls(recorded, plan.columns[name]))
    if plan.dense:
        blocks.append(dense_block(model, x, plan.dense))
    return BlockJacobian(blocks, plan.outputs, plan.total)


_Taps = dict[str, list[tuple[Tensor, Tensor]]]


def _tapped_forward(
    model: nn.Module, x: Tensor, modules: dict[str, nn.Module]
) -> tuple[_Taps, dict[str, Tensor], Tensor]:
    """A forward pass with `modules` run on detached parameters; (input, output) of each of their calls, in order."""
    taps: _Taps = {}
    leaves = {name: p.detach().requires_grad_() for name, p in trainable(model).items()}

    def tap(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], _: Any) -> Tensor:
            out = LAYERS[type(module)].run_fixed(module, args[0])
            if not out.requires_grad:
                out.requires_grad_()
            taps.setdefault(name, []).append((args[0], out))
            return out.clone()  # an in-place activation behind the layer must not overwrite the tap

        return hook

    with _hooks({m: tap(name) for name, m in modules.items()}), torch.enable_grad():
        f: Tensor = functional_call(model, leaves, (x,))
    if not f.requires_grad:
        raise ModelError("the model's output depends on none of its trainable parameters")
    return taps, leaves, f


@contextmanager
def _hooks(hooks: dict[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooked(module: nn.Module) -> bool:
    """A user's own hooks may change what the layer computes, so such a layer is treated as unknown."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _roles(module: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """The module's own trainable parameters: global name -> role ("weight", "bias")."""
    names = {id(p): name for name, p in parameters.items()}
    own = module.named_parameters(recurse=False)
    return {names[id(p)]: role for role, p in own if id(p) in names}


def _owners(parameters: dict[str, nn.Parameter], known: dict[str, nn.Module]) -> dict[str, dict[str, str]]:
    """For each known layer its trainable parameters, each with the one layer that owns it ("" where several do)."""
    users: dict[str, list[str]] = {}
    for name, module in known.items():
        for p in _roles(module, parameters):
            users.setdefault(p, []).append(name)
    return {
        name: {p: users[p][0] if len(users[p]) == 1 else "" for p in _roles(module, parameters)}
        for name, module in known.items()
    }


def _check_rows_alone(model: nn.Module, probe: Tensor, f: Tensor) -> None:
    alone = torch.cat([model(row.unsqueeze(0)) for row in probe])
    tolerance = 1e-3 if f.dtype in (torch.float32, torch.bfloat16, torch.float16) else 1e-8
    if float((alone - f).norm()) > tolerance * max(float(f.norm()), 1e-6):
        raise ModelError(_COUPLED)


def _check_against_autograd(model: nn.Module, probe: Tensor, plan: _Plan, J: BlockJacobian) -> None:
    """Jᵀ R against a plain backward pass, R random: catches a missed use, coupled rows and reordered rows alike."""
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(J.shape[:2], generator=generator, dtype=torch.float64).to(J.dtype).to(J.device)
    leaves = {name: p.detach().requires_grad_() for name, p in trainable(model).items()}
    with torch.enable_grad():
        f = functional_call(model, leaves, (probe,))
    gradients = torch.autograd.grad(f, list(leaves.values()), cotangent, materialize_grads=True)
    expected = torch.cat([g.reshape(-1) for g in gradients])
    difference = float((J.vjp(cotangent) - expected).norm())
    tolerance = 1e-8 if J.dtype == torch.float64 else 1e-3
    if not difference <= tolerance * max(float(expected.norm()), 1e-6):
        raise ModelError(_COUPLED)


_COUPLED = (
    "a sample's output depends on the other samples of its batch (or the model reorders them), so there is no "
    "sample-wise Jacobian: remove the coupling (batch statistics, sorting) or freeze it"
)
