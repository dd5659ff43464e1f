"""Building a Jacobian: a plan made on two samples (`planning.py`), then passes over a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor, nn

from ntkfl.errors import NumericalError, unknown
from ntkfl.tangent.jacobian import BlockJacobian, Jacobian
from ntkfl.tangent.model_check import check_arguments
from ntkfl.tangent.parameters import eager, evaluating, full_precision
from ntkfl.tangent.passes import JacobianPlan, OtherPaths, compact, piece
from ntkfl.tangent.planning import make_plan

FORMS = ("auto", "factored", "dense")


def jacobian(
    model: nn.Module, x: Tensor, form: str = "auto", chunk: int | None = None, plan: JacobianPlan | None = None
) -> Jacobian:
    """Sample-wise Jacobian of `model` at its current weights, in eval mode, for the rows of x (integer tokens too).

    form: "factored" (every parameter through a known layer, else an error), "dense" (every derivative stored,
    N·d2·d numbers), or "auto" (of each known layer the smaller of factors and derivatives, a dense block for all other
    parameters). `chunk` rows are differentiated at a time; by default as many as keep the working memory near 32 MiB
    (512 on an accelerator). `plan` is `plan_jacobian(model, x, form)`, made once for many calls. The model is left as
    it was, and x is not part of the result: it may be written to afterwards.
    """
    check_arguments(model, x, chunk)
    x = x.clone() if x.is_inference() else x.detach()  # what inference mode made cannot be part of a graph
    if x.device.type == "cpu":
        _keep_freed_memory()
    with eager(model) as model, _differentiable(model, x):
        if plan is not None:
            plan.check(model)
            J = _in_chunks(model, x, plan, chunk)
        else:
            J = _planned(model, x, form, chunk)
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
    with _differentiable(model, x):
        plan.check(model)
        return _in_chunks(model, x, plan, len(x))


def plan_jacobian(model: nn.Module, x: Tensor, form: str = "auto") -> JacobianPlan:
    """How `jacobian` covers this model's parameters, decided on two rows of x and proved on them against autograd.

    It holds for this model object, not for a copy of it, at any weights, and for inputs of the same shape and type.
    """
    check_arguments(model, x)
    with eager(model) as model, _differentiable(model, x):
        return _checked_plan(model, x, form)


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


def _chunk_rows(x: Tensor, plan: JacobianPlan) -> int:
    """All rows where they fit, for then nothing is copied; else for a chain half of what fits, which a cache likes."""
    fit = max(1, numbers_at_once(x) // plan.working)
    return fit if plan.chain is None or len(x) <= fit else max(1, fit // 2)


@contextmanager
def _differentiable(model: nn.Module, x: Tensor) -> Iterator[None]:
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
    if form not in FORMS:
        raise unknown("Jacobian form", form, FORMS)
    return make_plan(model, x, form)


def _planned(model: nn.Module, x: Tensor, form: str, chunk: int | None) -> BlockJacobian:
    """By a plan of its own; dense, where factors were tried and samples turn out to take different paths."""
    try:
        return _in_chunks(model, x, _checked_plan(model, x, form), chunk)
    except OtherPaths:
        if form != "auto":
            raise
        return _in_chunks(model, x, _checked_plan(model, x, "dense"), chunk)


def _in_chunks(model: nn.Module, x: Tensor, plan: JacobianPlan, chunk: int | None) -> BlockJacobian:
    """Piece after piece into tensors of the final size, so that no moment holds the Jacobian, or two pieces, twice."""
    rows = chunk or _chunk_rows(x, plan)
    if len(x) <= rows:
        inputs = x.untyped_storage().data_ptr()
        J = compact(piece(model, x, plan))
        return J.mapped(lambda t: t.clone() if t.untyped_storage().data_ptr() == inputs else t)
    whole: list[Tensor] = []
    for at in range(0, len(x), rows):
        part = piece(model, x[at : at + rows], plan)
        whole = whole or [t.new_empty((len(x), *t.shape[1:])) for t in part.tensors()]
        for target, t in zip(whole, part.tensors(), strict=True):
            target[at : at + rows] = t
        form = part[:0].mapped(torch.clone)  # what it is made of, none of its rows
        del part, t
    tensors = iter(whole)
    return form.mapped(lambda _: next(tensors))
