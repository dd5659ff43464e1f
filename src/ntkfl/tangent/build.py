"""Building a Jacobian: a plan made on two samples (`planning.py`), then passes over a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor, nn

from ntkfl.errors import ModelError, NumericalError, unknown
from ntkfl.tangent.jacobian import BlockJacobian, Jacobian
from ntkfl.tangent.model_check import check_arguments
from ntkfl.tangent.parameters import eager, evaluating, full_precision, trainable
from ntkfl.tangent.passes import JacobianPlan, OtherPaths, Values, compact, piece
from ntkfl.tangent.planning import make_plan

FORMS = ("auto", "factored", "dense")


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
    check_arguments(model, x, chunk)
    if not create_graph:
        x = x.clone() if x.is_inference() else x.detach()  # what inference mode made cannot be part of a graph
    if x.device.type == "cpu":
        _keep_freed_memory()
    with eager(model) as model, _differentiable(model):
        _check_params(model, params or {})
        if plan is not None:
            plan.check(model)
        try:
            J = _in_chunks(
                model, x, plan or _checked_plan(model, x.detach(), form), chunk, params, create_graph, contract
            )
        except OtherPaths:  # a plan of two samples does not hold for all
            if plan is not None or form != "auto":
                raise
            J = _in_chunks(model, x, _checked_plan(model, x.detach(), "dense"), chunk, params, create_graph, contract)
    # A sum is finite unless an element is not (or it overflows: then the elements decide), and several times cheaper.
    sums = torch.stack([t.sum().isfinite() for t in J.tensors()])
    if not bool(sums.all()) and not all(bool(t.isfinite().all()) for t in J.tensors()):
        bad = torch.stack([~t.isfinite().reshape(len(t), -1).all(1) for t in J.tensors()]).any(0)
        raise NumericalError(
            "the Jacobian has values that are not finite: look for NaN in the inputs or the weights (the first in row "
            f"{int(bad.nonzero()[0])})"
        )
    return J


def unchecked_jacobian(model: nn.Module, x: Tensor, plan: JacobianPlan) -> BlockJacobian:
    """`jacobian` by a plan, all rows at once, of whatever numbers come out: also those that are not finite."""
    with _differentiable(model):
        plan.check(model)
        return _in_chunks(model, x, plan, len(x))


def plan_jacobian(model: nn.Module, x: Tensor, form: str = "auto") -> JacobianPlan:
    """How `jacobian` covers this model's parameters, decided on two rows of x and proved on them against autograd.

    It holds for this model object, not for a copy of it, at any weights, and for inputs of the same shape and type.
    Costs about two Jacobians of two rows.
    """
    check_arguments(model, x)
    with eager(model) as model, _differentiable(model):
        return _checked_plan(model, x.detach(), form)


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep what chunk after chunk allocates and frees, where it would give it back each time.

    glibc hands out arrays above a size as fresh pages, and trims its heap at twice that size; the size is that of the
    largest such array freed so far, up to 32 MiB. Fresh pages took a third of a CNN's Jacobian. None is touched here.
    """
    torch.empty(2**25 - 2**14, dtype=torch.uint8)


def numbers_at_once(x: Tensor) -> int:
    """Numbers alive while a chunk of x is differentiated: 32 MiB in float32, beyond which a CPU gains nothing, and
    512 MiB to keep an accelerator busy.
    """
    return 2**23 if x.device.type == "cpu" else 2**27


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
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


def _checked_plan(model: nn.Module, x: Tensor, form: str) -> JacobianPlan:
    """The plan for a form that there is."""
    if form not in FORMS:
        raise unknown("Jacobian form", form, FORMS)
    return make_plan(model, x, form)


def _check_params(model: nn.Module, params: Values) -> None:
    """An error for a name that trains nothing, or a tensor of another shape."""
    own = trainable(model) if params else {}
    for name, value in params.items():
        if name not in own:
            raise unknown("trainable parameter in params", name, tuple(own))
        if value.shape != own[name].shape:
            raise ModelError(f"params[{name!r}] must have shape {list(own[name].shape)}, got {list(value.shape)}")


def _in_chunks(
    model: nn.Module,
    x: Tensor,
    plan: JacobianPlan,
    chunk: int | None,
    params: Values | None = None,
    graph: bool = False,
    contract: Tensor | None = None,
) -> BlockJacobian:
    """Piece after piece into tensors of the final size, so that no moment holds the Jacobian, or two pieces, twice."""
    fit = max(1, numbers_at_once(x) // plan.working)
    # All rows where they fit, for then nothing is copied; else for a chain half of what fits, which a cache likes.
    rows = chunk or (fit if plan.chain is None or len(x) <= fit else max(1, fit // 2))
    if graph:
        with torch.enable_grad():
            return compact(piece(model, x, plan, params, graph, contract))
    if len(x) <= rows or contract is not None:
        inputs = x.untyped_storage().data_ptr()
        J = compact(piece(model, x, plan, params, contract=contract))
        return J.mapped(lambda t: t.clone() if t.untyped_storage().data_ptr() == inputs else t)
    whole: list[Tensor] = []
    for at in range(0, len(x), rows):
        part = piece(model, x[at : at + rows], plan, params)
        whole = whole or [t.new_empty((len(x), *t.shape[1:])) for t in part.tensors()]
        for target, t in zip(whole, part.tensors(), strict=True):
            target[at : at + rows] = t
        form = part[:0].mapped(torch.clone)  # what it is made of, none of its rows
        del part, t
    tensors = iter(whole)
    return form.mapped(lambda _: next(tensors))
