"""Whether a model and its inputs have a sample-wise Jacobian; where not, an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

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
        several = isinstance(x, list | tuple | dict)
        hint = "wrap a model of several inputs so that it takes one tensor" if several else "see torch.as_tensor"
        raise ModelError(f"x must be one tensor of samples [N, …], got {type(x).__name__}: {hint}")
    if x.ndim < 1 or x.shape[0] == 0:
        raise ModelError(f"x must hold at least one sample, got shape {list(x.shape)}")
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ModelError(f"chunk must be a whole number of rows from 1 on, or None, got {chunk!r}")
    if torch.is_inference_mode_enabled():
        raise ModelError("nothing can be differentiated inside torch.inference_mode: use torch.no_grad, or neither")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError("a module of torch.jit cannot be differentiated sample by sample: use the model it is made of")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(f"{type(model).__name__} spreads samples over devices: use the model inside it, model.module")
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        raise ModelError("the model has lazy parameters that have no shape yet: run it once on a few samples")


def check_outputs(model: nn.Module, probe: Tensor) -> int:
    """d2, of a model that gives a finite [N, d2] in which every row is its own sample's."""
    try:
        with refuses_autocast(model):
            f = model(probe)
    except (RuntimeError, IndexError, ValueError) as error:
        raise ModelError(_unfit(model, probe, error)) from error
    if not isinstance(f, Tensor) or f.ndim != 2 or f.shape[0] != len(probe):
        raise ModelError(_unlike(f))
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


def _unlike(f: Any) -> str:
    """What an output should have been, by what it is for two samples."""
    wanted = "the model must map N samples to [N, d2]; two samples gave"
    if not isinstance(f, Tensor):
        return f"{wanted} a {type(f).__name__}: wrap the model so that it returns the outputs alone, as one tensor"
    if f.ndim > 2 and f.shape[0] == 2:
        return f"{wanted} {list(f.shape)}: append nn.Flatten(), or take the outputs of one position"
    return f"{wanted} {list(f.shape)}" + (": let it return outputs.unsqueeze(1)" if f.shape == (2,) else "")


def _unfit(model: nn.Module, probe: Tensor, error: Exception) -> str:
    """Why a model fails on x, as far as types and shape tell."""
    reason = str(error).split("\n")[0]
    kinds = sorted({f"{p.dtype} on {p.device}" for p in model.parameters()})
    whole = not probe.is_floating_point()
    if len(kinds) > 1:
        return f"the model fails on x, and its weights are of several kinds: {', '.join(kinds)} ({reason})"
    if isinstance(error, IndexError):
        return f"the model fails on x: {reason}" + (", a token beyond the end of an embedding?" if whole else "")
    if not whole and "indices" in reason and "Long" in reason:
        return f"tokens of an embedding must be whole numbers: try x.long() ({reason})"
    known = next(model.parameters(), probe)
    if probe.device != known.device:
        return f"x is on {probe.device}, and the model on {known.device}: try x.to({str(known.device)!r}) ({reason})"
    if probe.dtype != known.dtype:
        fit = f"x.to({known.dtype})" if whole else f"x.to({known.dtype}), or model.to({probe.dtype})"
        return f"the model fails on x of {probe.dtype}, and its weights are {known.dtype}: try {fit} ({reason})"
    shape = ", ".join(["N", *map(str, probe.shape[1:])])
    return (
        f"the model fails on samples x [{shape}]: the first dimension of x counts samples, so one sample is x[:1] or "
        f"x[0].unsqueeze(0), not x[0] ({reason})"
    )
