"""Building a Jacobian: a plan made on two samples (`planning.py`), then passes over a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor, nn

from ntkfl.errors import ModelError, NumericalError, unknown
from ntkfl.tangent.jacobian import BlockJacobian, Jacobian
from ntkfl.tangent.parameters import evaluating
from ntkfl.tangent.passes import JacobianPlan, compact, piece
from ntkfl.tangent.planning import make_plan

FORMS = ("auto", "factored", "dense")
# Numbers alive at once while a chunk is differentiated: 32 MiB in float32, beyond which a CPU gains nothing, and
# 512 MiB to keep an accelerator busy.
_CPU_NUMBERS, _NUMBERS = 2**23, 2**27


def jacobian(
    model: nn.Module, x: Tensor, form: str = "auto", chunk: int | None = None, plan: JacobianPlan | None = None
) -> Jacobian:
    """Sample-wise Jacobian of `model` at its current weights, in eval mode, for the rows of x (integer tokens too).

    form: "factored" (every parameter through a known layer, else an error), "dense" (every derivative stored,
    N·d2·d numbers), or "auto" (of each known layer the smaller of factors and derivatives, a dense block for all other
    parameters). `chunk` rows are differentiated at a time; by default as many as keep the working memory near 32 MiB
    (512 on an accelerator). `plan` is `plan_jacobian(model, x, form)`, made once for many calls. The model is left as
    it was.
    """
    if x.device.type == "cpu":
        _keep_freed_memory()
    with _differentiable(model):
        plan = plan or _checked_plan(model, x, form)
        J = _in_chunks(model, x, plan, chunk or _chunk_rows(x, plan))
    # A sum is finite unless an element is not (or it overflows: then the elements decide), and several times cheaper.
    sums = torch.stack([t.sum().isfinite() for t in J.tensors()])
    if not bool(sums.all()) and not all(bool(t.isfinite().all()) for t in J.tensors()):
        raise NumericalError("the Jacobian has values that are not finite: look for NaN in the inputs or the weights")
    return J


def plan_jacobian(model: nn.Module, x: Tensor, form: str = "auto") -> JacobianPlan:
    """How `jacobian` covers this model's parameters, decided on two rows of x and proved on them against autograd.

    It holds for the same model object at any weights and for inputs of the same shape and type.
    """
    with _differentiable(model):
        return _checked_plan(model, x, form)


def jacobian_numbers(model: nn.Module, x: Tensor, form: str = "auto") -> int:
    """Numbers that `jacobian(model, x, form)` holds for each row of x, exactly; one or two rows of x suffice."""
    with _differentiable(model):
        return _checked_plan(model, x, form).stored


def working_numbers(model: nn.Module, x: Tensor, form: str = "auto") -> int:
    """Numbers alive at most, beside the Jacobian itself, while `jacobian` differentiates its chunks of x."""
    with _differentiable(model):
        return max(_budget(x), _checked_plan(model, x, form).working)


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep what chunk after chunk allocates and frees, where it would give it back each time.

    glibc hands out arrays above a size as fresh pages, and trims its heap at twice that size; the size is that of the
    largest such array freed so far, up to 32 MiB. Fresh pages took a third of a CNN's Jacobian. None is touched here.
    """
    torch.empty(2**25 - 2**14, dtype=torch.uint8)


def _budget(x: Tensor) -> int:
    return _CPU_NUMBERS if x.device.type == "cpu" else _NUMBERS


def _chunk_rows(x: Tensor, plan: JacobianPlan) -> int:
    """All rows where they fit, for then nothing is copied; else for a chain half of what fits, which a cache likes."""
    fit = max(1, _budget(x) // plan.working)
    return fit if plan.chain is None or len(x) <= fit else max(1, fit // 2)


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Eval mode, and no cuDNN where there are recurrent layers: in eval mode its cells have no backward pass."""
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    fused = torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()
    with evaluating(model), torch.no_grad(), fused:
        yield


def _checked_plan(model: nn.Module, x: Tensor, form: str) -> JacobianPlan:
    if form not in FORMS:
        raise unknown("Jacobian form", form, FORMS)
    if x.ndim < 1 or x.shape[0] == 0:
        raise ModelError(f"x must hold at least one sample, got shape {list(x.shape)}")
    return make_plan(model, x, form)


def _in_chunks(model: nn.Module, x: Tensor, plan: JacobianPlan, rows: int) -> BlockJacobian:
    """Piece after piece into tensors of the final size, so that no moment holds the Jacobian, or two pieces, twice."""
    if len(x) <= rows:
        return compact(piece(model, x, plan))
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
