"""Whether a model and its inputs have a sample-wise Jacobian; where not, an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ntkfl.errors import ModelError, NumericalError

COUPLED = (
    "a sample's output depends on the other samples of its batch (or the model reorders them), so there is no "
    "sample-wise Jacobian: remove the coupling (batch statistics, sorting) or freeze it"
)
_RANDOM = (
    "the model gives different outputs for the same x: it draws random numbers in eval mode (dropout or noise by a "
    "function that does not ask whether the model trains), so it has no Jacobian"
)


def check_arguments(model: nn.Module, x: Tensor, chunk: int | None = None) -> None:
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


def check_outputs(model: nn.Module, probe: Tensor) -> int:
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


@contextmanager
def refuses_autocast(model: nn.Module) -> Iterator[None]:
    """`ModelError` where a part of the model runs under an autocast of the model's own: what it gives is rounded to
    another type than the weights', and derivatives of it are not those of the function that the weights make.
    """

    def check(module: nn.Module, inputs: object) -> None:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ModelError(
                f"the model runs {type(module).__name__} under torch.autocast in its forward: take that out, as "
                "everything here is computed in the weights' own type"
            )

    handles = [module.register_forward_pre_hook(check) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
