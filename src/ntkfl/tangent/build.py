"""Building a Jacobian: a plan made on two samples and proved on them, then passes over a few rows at a time.

The plan decides which form each parameter's derivatives take. A known layer (`layers/`) runs with its parameters fixed
and its outputs tapped. A parameter that still has a gradient after that is used in some other way (an unknown layer, a
functional call) and goes, like a tied weight, to a dense block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from ntkfl.errors import ModelError, NumericalError, unknown
from ntkfl.tangent.blocks import Use
from ntkfl.tangent.jacobian import Jacobian
from ntkfl.tangent.layers import LAYERS
from ntkfl.tangent.parameters import column_slices, eager, evaluating, full_precision, refuses_autocast, trainable
from ntkfl.tangent.passes import (
    JacobianPlan,
    OtherPaths,
    Part,
    Pass,
    Values,
    agrees_with_autograd,
    piece,
    taped,
    trace,
    used_outside,
)

FORMS = ("auto", "factored", "dense")
_Calls = list[tuple[Tensor, Tensor]]
COUPLED = (
    "a sample's output depends on the other samples of its batch (or the model reorders them), so there is no "
    "sample-wise Jacobian: remove the coupling (batch statistics, sorting) or freeze it"
)
_RANDOM = (
    "the model gives different outputs for the same x: it draws random numbers in eval mode (dropout or noise by a "
    "function that does not ask whether the model trains), so it has no Jacobian"
)


def jacobian(
    model: nn.Module,
    x: Tensor,
    form: str = "auto",
    chunk: int | None = None,
    plan: JacobianPlan | None = None,
    params: Mapping[str, Tensor] | None = None,
    create_graph: bool = False,
    contract: Tensor | None = None,
) -> Jacobian:
    """Per-sample Jacobian J [N, d2, d] of `model`: [N, …] -> [N, d2] for the rows of x, in eval mode.

    Columns are the trainable parameters in the order of `named_parameters()`. x is of the weights' type, or holds
    integer tokens. The model is left as it was, and x is not part of the result: it may be written to afterwards.

    form: "factored" (every parameter through a known layer, else an error), "dense" (every derivative stored), or
        "auto" (of each known layer the smaller of factors and derivatives, a dense block for all other parameters).
    chunk: rows differentiated at a time; by default as many as keep the working memory near 32 MiB (512 on an
        accelerator).
    plan: `plan_jacobian(model, x, form)`, made once for many calls. Without it each call looks at the model on two
        rows and checks the result on them against autograd.
    params: tensors by parameter name that take the place of the model's own, as in `torch.func.functional_call`;
        those not named keep their values.
    create_graph: gradients flow through J to `params`, to the model's parameters and to x, wherever they require them,
        from all that J gives (`kernel`, `jvp`, `vjp`, `product`, `gram`, `dense`). All rows are differentiated at once.
    contract: S [N, c, d2]; the result is then S_i J_i of every sample, [N, c, d], in c backward passes in place of d2.
        All rows are differentiated at once.

    Cost: a forward pass and d2 backward passes. Memory: N·(n_in + d2·n_out) numbers for a linear layer's factors, in
    place of N·d2·n_in·n_out, and at most N·d2·d; with `create_graph` also the graph of all passes.
    """
    _check_arguments(model, x, chunk)
    if not create_graph:
        x = x.clone() if x.is_inference() else x.detach()  # what inference mode made cannot be part of a graph
    if x.device.type == "cpu":
        _keep_freed_memory()
    with eager(model) as model, differentiable(model):
        own = Pass(model, x, _values(model, params or {}), create_graph, contract)
        if create_graph and not (x.requires_grad or any(value.requires_grad for value in own.values.values())):
            raise ModelError("create_graph=True needs params, or x, with requires_grad: nothing else gets a gradient")
        if plan is not None:
            plan.check(model)
        try:
            J = _in_chunks(own, plan or _make_plan(model, x.detach(), form), chunk)
        except OtherPaths:  # a plan of two samples does not hold for all
            if plan is not None or form != "auto":
                raise
            J = _in_chunks(own, _make_plan(model, x.detach(), "dense"), chunk)
    # A sum is finite unless an element is not (or it overflows: then the elements decide), and several times cheaper.
    sums = torch.stack([t.sum().isfinite() for t in J.tensors()])
    if not bool(sums.all()) and not all(bool(t.isfinite().all()) for t in J.tensors()):
        bad = torch.stack([~t.isfinite().reshape(len(t), -1).all(1) for t in J.tensors()]).any(0)
        raise NumericalError(
            "the Jacobian has values that are not finite: look for NaN in the inputs or the weights (the first in row "
            f"{int(bad.nonzero()[0])})"
        )
    return J


def unchecked_jacobian(model: nn.Module, x: Tensor, plan: JacobianPlan, contract: Tensor | None = None) -> Jacobian:
    """`jacobian` by a plan, all rows at once, of whatever numbers come out: also those that are not finite."""
    with differentiable(model):
        plan.check(model)
        return _in_chunks(Pass(model, x, trainable(model), contract=contract), plan, len(x))


def plan_jacobian(model: nn.Module, x: Tensor, form: str = "auto") -> JacobianPlan:
    """How `jacobian` covers this model's parameters, decided on two rows of x and proved on them against autograd.

    It holds for this model object, not for a copy of it, at any weights, and for inputs of the same shape and type.
    Costs about two Jacobians of two rows.
    """
    _check_arguments(model, x)
    with eager(model) as model, differentiable(model):
        return _make_plan(model, x.detach(), form)


def numbers_at_once(x: Tensor) -> int:
    """Numbers alive while a chunk of x is differentiated: 32 MiB in float32, beyond which a CPU gains nothing, and
    512 MiB to keep an accelerator busy.
    """
    return 2**23 if x.device.type == "cpu" else 2**27


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep what chunk after chunk allocates and frees, where it would give it back each time.

    glibc hands out arrays above a size as fresh pages, and trims its heap at twice that size; the size is that of the
    largest such array freed so far, up to 32 MiB. Fresh pages took a third of a CNN's Jacobian. None is touched here.
    """
    torch.empty(2**25 - 2**14, dtype=torch.uint8)


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Eval mode, and no cuDNN where there are recurrent layers: in eval mode its cells have no backward pass. No
    autocast, whose precision is not the weights'. Embeddings that shorten their vectors as they are used get them back.
    """
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    fused = torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()
    shortened = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm]
    before = [weight.detach().clone() for weight in shortened]
    with evaluating(model), torch.no_grad(), fused, full_precision():
        try:
            yield
        finally:
            for weight, own in zip(shortened, before, strict=True):
                weight.copy_(own)


def _values(model: nn.Module, params: Values) -> Values:
    """The trainable parameters by name, with `params` in place of the model's own of those names."""
    own = trainable(model)
    for name, value in params.items():
        if name not in own:
            raise unknown("trainable parameter in params", name, tuple(own))
        if value.shape != own[name].shape:
            raise ModelError(f"params[{name!r}] must have shape {list(own[name].shape)}, got {list(value.shape)}")
    return {**own, **params}


def _in_chunks(own: Pass, plan: JacobianPlan, chunk: int | None) -> Jacobian:
    """Piece after piece into tensors of the final size, so that no moment holds the Jacobian, or two pieces, twice."""
    x = own.x
    rows = chunk or max(1, numbers_at_once(x) // plan.working)
    if len(x) <= rows or own.graph or own.contract is not None:
        inputs = x.untyped_storage().data_ptr()
        with torch.set_grad_enabled(own.graph):
            J = piece(own, plan).mapped(torch.Tensor.contiguous)
            return J.mapped(lambda t: t.clone() if t.untyped_storage().data_ptr() == inputs else t)
    whole: list[Tensor] = []
    for at in range(0, len(x), rows):
        part = piece(own._replace(x=x[at : at + rows]), plan)
        whole = whole or [t.new_empty((len(x), *t.shape[1:])) for t in part.tensors()]
        for target, t in zip(whole, part.tensors(), strict=True):
            target[at : at + rows] = t
        form = part[:0].mapped(torch.clone)  # what it is made of, none of its rows
        del part, t
    tensors = iter(whole)
    return form.mapped(lambda _: next(tensors))


def _make_plan(model: nn.Module, x: Tensor, form: str) -> JacobianPlan:
    """The cheapest exact cover of all columns (`form` "auto"), factors wherever known ("factored"), or no factors."""
    if form not in FORMS:
        raise unknown("Jacobian form", form, FORMS)
    own = Pass(model, _two_samples(x), trainable(model))
    outputs, modules = _check_outputs(model, own.x), dict(model.named_modules())
    known = {name: m for name, m in modules.items() if type(m) in LAYERS and _untouched(m)}
    shapes = {name: p.shape for name, p in own.values.items()}
    total = sum(p.numel() for p in own.values.values())
    dense = JacobianPlan(modules, shapes, known, [], [], [*shapes], outputs, total, 3 * outputs * total)
    if form != "dense":
        try:
            plan, J = _by_layers(own, dense, form)
        except RuntimeError:
            if form == "factored":
                raise
        else:
            if agrees_with_autograd(own, J.vjp):
                return plan
            if form == "factored":
                raise ModelError(COUPLED)
        # What surrounds a known layer may hide it from autograd: one that is run again in the backward pass.
    if not agrees_with_autograd(own, piece(own, dense).mapped(torch.Tensor.contiguous).vjp):
        raise ModelError(COUPLED)
    return dense


def _by_layers(own: Pass, dense: JacobianPlan, form: str) -> tuple[JacobianPlan, Jacobian]:
    """Of each known layer the smaller of factors and derivatives, or ("factored") its factors; with the Jacobian of
    the two samples.
    """
    parameters, known = own.values, dense.known
    # Layers without trained weights are not recorded, so an input with a gradient is one behind a trained weight.
    recorded = [name for name, module in known.items() if any(p.requires_grad for p in module.parameters())]
    alone, pair = (trace(own._replace(x=x), known, recorded) for x in (own.x[:1], own.x))
    dims = {use: _sample_dims(use, alone.uses.get(use, []), calls) for use, calls in pair.uses.items()}
    counts = Counter(name for use in dims for name in (use.weight, use.bias) if name is not None)
    left = used_outside(pair, [*parameters]) | {name for name, count in counts.items() if count > 1}
    left |= {name for use, dim in dims.items() if dim is None for name in use.names}
    while more := {name for use in dims if left & use.names for name in use.names} - left:
        left |= more  # a layer is factored in all its parameters or in none
    if form == "factored" and left:
        raise ModelError(
            f"no factored form is known for {', '.join(name for name in parameters if name in left)}: "
            "use form='auto' (a dense block for those alone) or form='dense'"
        )
    slices, parts, taps = column_slices(parameters), [], 0
    for use, calls in pair.uses.items():
        if left & use.names:
            continue
        inputs, outputs = (sum(call[i].numel() for call in calls) // 2 for i in (0, 1))
        width = sum(parameters[name].numel() for name in use.names)
        smaller = form == "auto" and dense.outputs * width <= inputs + dense.outputs * outputs
        constant = not any(a.requires_grad for a, _ in calls)
        weight, bias = (None if name is None else slices[name] for name in (use.weight, use.bias))
        parts.append(Part(use, dims[use] or (), weight, bias, constant, smaller))
        taps += inputs + 2 * (1 + dense.outputs) * outputs  # activations, sensitivities and a copy of them
    copied = [name for name in parameters if name in left and _admits_copies(own, dense, name)]
    left -= {*copied}
    plan = replace(dense, parts=parts, copied=copied, left=[name for name in parameters if name in left])
    J = piece(own, plan).mapped(torch.Tensor.contiguous)
    stored = sum(math.prod(t.shape[1:]) for t in J.tensors())
    working = stored + taps + 3 * plan.outputs * sum(parameters[name].numel() for name in left)
    return replace(plan, working=working), J


def _admits_copies(own: Pass, dense: JacobianPlan, name: str) -> bool:
    """Whether the network takes a copy of this parameter for every sample, each used by its own sample alone: a plain
    backward pass for each output then gives all samples' derivatives. Tried on a random combination of the outputs,
    with two samples and with three, so that no other dimension is taken for theirs.
    """
    value, columns = own.values[name], column_slices(own.values)[name]

    def exact(rows: list[int]) -> bool:
        S = torch.randn(len(rows), 1, dense.outputs, generator=torch.Generator().manual_seed(1)).to(value)
        some = own._replace(x=own.x[rows], contract=S)
        try:
            J = Jacobian([*taped(some, replace(dense, copied=[name]))], 1, dense.total)
        except Exception:  # whatever a network says to a parameter of another shape
            return False
        return agrees_with_autograd(some._replace(values={name: value}), lambda R: J.vjp(R)[columns])

    return exact([0, 1]) and exact([0, 1, 0])


def _two_samples(x: Tensor) -> Tensor:
    """The first of x and the first that is unlike it, or itself twice: equal samples would not show that a model makes
    them depend on each other.
    """
    other = 1 % len(x)
    if torch.equal(x[0], x[other]):
        unlike = (x != x[:1]).reshape(len(x), -1).any(1).to(torch.uint8)
        other = int(unlike.argmax()) or other
    return x[[0, other]]


def _untouched(module: nn.Module) -> bool:
    """A user's hooks or own `forward` may compute something else than the module's class."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


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


def _check_arguments(model: nn.Module, x: Tensor, chunk: int | None = None) -> None:
    """`ModelError` for what can be seen without running the model."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model must be an nn.Module, got {type(model).__name__}: jacobian(model, x)")
    if not isinstance(x, Tensor):
        raise ModelError(
            f"x must be one tensor of samples [N, …], got {type(x).__name__}: wrap a model of several inputs so that "
            "it takes one tensor"
        )
    if x.ndim < 1 or x.shape[0] == 0:
        raise ModelError(f"x must hold at least one sample, got shape {list(x.shape)}")
    if chunk is not None and chunk < 1:
        raise ModelError(f"chunk must be a whole number of rows from 1 on, or None, got {chunk!r}")
    if torch.is_inference_mode_enabled():
        raise ModelError("nothing can be differentiated inside torch.inference_mode: use torch.no_grad, or neither")


def _check_outputs(model: nn.Module, probe: Tensor) -> int:
    """d2, of a model that gives a finite [N, d2] in which every row is its own sample's."""
    try:
        with refuses_autocast(model):
            f = model(probe)
    except (RuntimeError, IndexError, ValueError) as error:
        kinds = sorted({f"{p.dtype} on {p.device}" for p in model.parameters()})
        raise ModelError(
            f"the model fails on samples x [{', '.join(['N', *map(str, probe.shape[1:])])}] of {probe.dtype} on "
            f"{probe.device}: the first dimension of x counts samples (one sample is x[:1]), and x has the type of the "
            f"weights ({', '.join(kinds)}) or holds tokens ({str(error).splitlines()[0]})"
        ) from error
    if not isinstance(f, Tensor) or f.ndim != 2 or f.shape[0] != len(probe):
        given = list(f.shape) if isinstance(f, Tensor) else f"a {type(f).__name__}"
        raise ModelError(
            f"the model must map N samples to [N, d2]; two samples gave {given}: wrap it so that it returns one matrix"
        )
    if not bool(f.isfinite().all()):
        raise NumericalError("the model's output is not finite: look for NaN in the inputs or the weights")
    tolerance = 1e-3 if f.dtype in (torch.float32, torch.bfloat16, torch.float16) else 1e-8

    def differs(other: Tensor) -> bool:
        return float((other - f).norm()) > tolerance * max(float(f.norm()), 1e-6)

    try:
        alone = torch.cat([model(row.unsqueeze(0)) for row in probe])
    except (RuntimeError, ValueError) as error:  # two samples work and one does not: statistics of the batch
        raise ModelError(COUPLED) from error
    if differs(alone):
        raise ModelError(_RANDOM if differs(model(probe)) else COUPLED)
    return f.shape[1]
