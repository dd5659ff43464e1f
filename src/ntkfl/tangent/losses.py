"""The two losses, their residuals r = −∂ℓ/∂f, and what labels may look like.

`ce`: cross-entropy, r = y − softmax(f). `mse`: (1/d2) Σ_j ½(f_j − y_j)², r = (y − f)/d2. The training loss is the mean
over samples, so that −∇L = (1/N) Jᵀ r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntkfl.errors import DataError, unknown

LOSSES = ("ce", "mse")


def check_loss(loss: str) -> str:
    if loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    return loss


def targets(y: Tensor, outputs: int, loss: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Targets [N, d2]: classes [N] become one-hot rows; real y [N, d2] is taken as it is (`ce`: probabilities)."""
    if loss == "ce" and outputs == 1:
        raise DataError(
            "cross-entropy over one output is always 0, so nothing would be learnt: give the model two outputs, or use "
            "loss 'mse' with real-valued targets [N, 1]"
        )
    if not y.is_floating_point():
        if y.ndim != 1:
            raise DataError(f"integer labels must have shape [N], got {list(y.shape)}")
        if y.numel() and (int(y.min()) < 0 or int(y.max()) >= outputs):
            raise DataError(
                f"labels run from {int(y.min())} to {int(y.max())}, but the model has {outputs} outputs: "
                f"they must be in 0 … {outputs - 1}"
            )
        return torch.nn.functional.one_hot(y.long(), outputs).to(dtype)
    if y.ndim != 2 or y.shape[1] != outputs:
        raise DataError(f"real-valued targets must have shape [N, {outputs}], got {list(y.shape)}")
    if not bool(y.isfinite().all()):
        raise DataError("targets have values that are not finite")
    if loss == "ce" and (float(y.min()) < 0 or not torch.allclose(y.sum(1), y.new_ones(()), atol=1e-4)):
        raise DataError("with loss 'ce', real-valued targets must be probabilities: nonnegative rows that sum to 1")
    return y.to(dtype)


def _softmax(f: Tensor) -> Tensor:
    """By hand on a CPU, where PyTorch's own takes three times as long for rows as short as classes are."""
    if f.device.type != "cpu":
        return f.softmax(dim=-1)
    powers = (f - f.amax(dim=-1, keepdim=True)).exp_()
    return powers.div_(powers.sum(dim=-1, keepdim=True))


def residual(loss: str, f: Tensor, Y: Tensor) -> Tensor:
    """r = −∂ℓ/∂f, [..., N, d2]."""
    if loss == "ce":
        return Y - _softmax(f)
    return (Y - f) / f.shape[-1]


def beyond_rounding(loss: str, f: Tensor, Y: Tensor) -> Tensor:
    """r, with 0 where the prediction is the target up to the rounding of f and a softmax. All 0: nothing to learn."""
    r = residual(loss, f, Y)
    apart = r.abs() * (1 if loss == "ce" else f.shape[-1])
    return r.masked_fill(apart <= 16 * torch.finfo(f.dtype).eps * Y.abs(), 0.0)


def per_sample(loss: str, f: Tensor, Y: Tensor) -> Tensor:
    """ℓ(f_i, y_i), [..., N]."""
    if loss == "ce":
        return -(Y * f.log_softmax(dim=-1)).sum(dim=-1)
    return 0.5 * (f - Y).square().mean(dim=-1)


def curvature_product(loss: str, f: Tensor, v: Tensor) -> Tensor:
    """(∂²ℓ/∂f²) v for each sample: diag(p) − ppᵀ for `ce`, 1/d2 for `mse`; [..., N, d2]."""
    if loss == "ce":
        p = f.softmax(dim=-1)
        return p * (v - (p * v).sum(dim=-1, keepdim=True))
    return v / f.shape[-1]
