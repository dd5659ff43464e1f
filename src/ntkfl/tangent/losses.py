"""Losses ℓ(f, Y) of a sample's outputs, their residuals r = −∂ℓ/∂f, and what labels may look like.

`ce`: cross-entropy, r = Y − softmax(f). `mse`: (1/d2) Σ_j ½(f_j − Y_j)², r = (Y − f)/d2. The training loss is the mean
over samples, so that −∇L = (1/N) Jᵀ r. A loss of the user's own is a `Loss`, a function (f, Y) ↦ ℓ, or the name of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, DataError, NumericalError, unknown
from ntkfl.user_code import GIVEN, find_factory

LOSSES = ("ce", "mse")


class Loss:
    """What a loss must provide: `value`, of each sample, convex in the outputs.

    Derivatives in the outputs follow from `value` by autograd; override them where you know something faster. FedAvg
    and its relatives need `value` alone, NTK-FL also `residual` and `curvature_product`, NTK-FL from sums also
    `residual` and `hessian_root`. f and Y are [..., N, d2]: outputs, and targets as `targets` makes them.

    `scale`: a difference of losses that is large whatever the data, where the loss has a unit of its own.
    """

    scale: float = math.inf

    def value(self, f: Tensor, Y: Tensor) -> Tensor:
        """ℓ(f_i, Y_i), [..., N]: one value per sample, not negative, of operations that autograd can differentiate."""
        raise NotImplementedError(f"{type(self).__name__} must define value(f, Y)")

    def __call__(self, f: Tensor, Y: Tensor) -> Tensor:
        return self.value(f, Y)

    def residual(self, f: Tensor, Y: Tensor) -> Tensor:
        """r = −∂ℓ/∂f, [..., N, d2]."""
        with torch.enable_grad():
            leaf = f.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(per_sample(self, leaf, Y).sum(), leaf)
        return -gradient

    def curvature_product(self, f: Tensor, Y: Tensor, v: Tensor) -> Tensor:
        """(∂²ℓ/∂f²) v for each sample, [..., N, d2]."""
        with torch.enable_grad():
            leaf = f.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(per_sample(self, leaf, Y).sum(), leaf, create_graph=True)
            if not gradient.requires_grad:  # linear in the outputs
                return torch.zeros_like(f)
            product: Tensor = torch.autograd.grad((gradient * v).sum(), leaf, materialize_grads=True)[0]
        return product

    def hessian_root(self, f: Tensor, Y: Tensor) -> Tensor:
        """R with R Rᵀ = ∂²ℓ/∂f², [..., N, d2, c] for any c."""
        units = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        H = torch.stack([self.curvature_product(f, Y, unit.expand_as(f)) for unit in units], dim=-1)
        eigenvalues, vectors = torch.linalg.eigh(H)
        rounding = 1e3 * torch.finfo(f.dtype).eps * eigenvalues.abs().amax(-1, keepdim=True)
        if bool((eigenvalues < -rounding).any()):
            raise NumericalError(f"loss {loss_name(self)!r} is not convex in the outputs: its Hessian is not positive")
        root: Tensor = vectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)
        return root

    def drawn_root(self, f: Tensor, Y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One random column r [..., N, d2, 1] with E r rᵀ = ∂²ℓ/∂f²: `hessian_root` times a vector of random signs."""
        R = self.hessian_root(f, Y)
        return R @ _signs(R[..., 0, :], generator).unsqueeze(-1)

    def targets(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Y [N, d2] of labels y: classes [N] become one-hot rows; real y [N, d2] is taken as it is."""
        if not y.is_floating_point():
            if y.ndim != 1:
                raise DataError(f"integer labels must have shape [N], got {list(y.shape)}")
            least, most = torch.stack(torch.aminmax(y)).tolist() if y.numel() else (0, 0)  # a GPU is waited for once
            if least < 0 or most >= outputs:
                raise DataError(
                    f"labels run from {least} to {most}, but the model has {outputs} outputs: "
                    f"they must be in 0 … {outputs - 1}"
                )
            return y.new_zeros(len(y), outputs, dtype=dtype).scatter_(1, y.long().unsqueeze(1), 1)
        if y.ndim != 2 or y.shape[1] != outputs:
            raise DataError(f"real-valued targets must have shape [N, {outputs}], got {list(y.shape)}")
        if not bool(y.isfinite().all()):
            raise DataError("targets have values that are not finite")
        return y.to(dtype)


class CrossEntropy(Loss):
    """`ce`: −Σ_j Y_j log softmax(f)_j."""

    scale = 1.0  # nat

    def value(self, f: Tensor, Y: Tensor) -> Tensor:
        return -(Y * f.log_softmax(dim=-1)).sum(dim=-1)

    def residual(self, f: Tensor, Y: Tensor) -> Tensor:
        """Y − softmax(f)."""
        return Y - _softmax(f)

    def curvature_product(self, f: Tensor, Y: Tensor, v: Tensor) -> Tensor:
        """(diag(p) − ppᵀ) v."""
        p = f.softmax(dim=-1)
        return p * (v - (p * v).sum(dim=-1, keepdim=True))

    def hessian_root(self, f: Tensor, Y: Tensor) -> Tensor:
        """diag(√p) − p √pᵀ."""
        p = f.softmax(dim=-1)
        return torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)

    def drawn_root(self, f: Tensor, Y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """√p ∘ z − p (√pᵀ z) for random signs z.

        K-FAC usually draws a label from p instead, and takes its gradient. Where predictions are confident, that is
        nearly 0 for most samples and large for a few: a mean over few samples would be far too small, or too large.
        """
        p = f.softmax(dim=-1)
        signed = p.sqrt() * _signs(p, generator)
        return (signed - p * signed.sum(-1, keepdim=True)).unsqueeze(-1)

    def targets(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Real y are probabilities."""
        if outputs == 1:
            raise DataError(
                "cross-entropy over one output is always 0, so nothing would be learnt: give the model two outputs, "
                "or use loss 'mse' with real-valued targets [N, 1]"
            )
        Y = super().targets(y, outputs, dtype)
        if y.is_floating_point() and (float(y.min()) < 0 or not torch.allclose(y.sum(1), y.new_ones(()), atol=1e-4)):
            raise DataError("with loss 'ce', real-valued targets must be probabilities: nonnegative rows that sum to 1")
        return Y


class MeanSquared(Loss):
    """`mse`: (1/d2) Σ_j ½(f_j − Y_j)²."""

    def value(self, f: Tensor, Y: Tensor) -> Tensor:
        return 0.5 * (f - Y).square().mean(dim=-1)

    def residual(self, f: Tensor, Y: Tensor) -> Tensor:
        """(Y − f) / d2."""
        return (Y - f) / f.shape[-1]

    def curvature_product(self, f: Tensor, Y: Tensor, v: Tensor) -> Tensor:
        """v / d2."""
        return v / f.shape[-1]

    def hessian_root(self, f: Tensor, Y: Tensor) -> Tensor:
        """I/√d2."""
        d2 = f.shape[-1]
        return (torch.eye(d2, dtype=f.dtype, device=f.device) / math.sqrt(d2)).expand(*f.shape[:-1], d2, d2)


class _Function(Loss):
    """A function (f, Y) ↦ [N] as a loss."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def value(self, f: Tensor, Y: Tensor) -> Tensor:
        return self.function(f, Y)


AnyLoss: TypeAlias = str | Callable[[Tensor, Tensor], Tensor]  # a `Loss` can be called
_BUILT_IN: dict[str, Loss] = {"ce": CrossEntropy(), "mse": MeanSquared()}


def check_loss(loss: AnyLoss) -> None:
    """`ConfigError` where it can be no loss; code that it names is not run here."""
    if isinstance(loss, type) and issubclass(loss, Loss):
        raise ConfigError(f"loss must be an instance, such as {loss.__name__}(), not the class")
    if isinstance(loss, str) and loss.startswith(GIVEN):
        raise ConfigError(
            f"loss {loss.removeprefix(GIVEN)!r} was given as a Python object and cannot be made from its name: "
            "give it again, or name one as package.module:name"
        )
    if not (callable(loss) or loss in LOSSES or (isinstance(loss, str) and ":" in loss)):
        raise unknown("loss", loss, (*LOSSES, "package.module:name"))


def find_loss(loss: AnyLoss) -> Loss:
    """The loss itself. A name `package.module:name` is imported: of a `Loss`, its class, or a function."""
    if isinstance(loss, Loss):
        return loss
    check_loss(loss)
    if isinstance(loss, str):
        return _BUILT_IN.get(loss) or _named(loss)
    return _Function(loss)


def _named(name: str) -> Loss:
    """The loss of a name `package.module:name`."""
    found: Any = find_factory(name)
    if isinstance(found, type) and issubclass(found, Loss):
        return found()
    return found if isinstance(found, Loss) else _Function(found)


def loss_name(loss: AnyLoss) -> str:
    """As settings record it: the name that was given, or for an object what it is called."""
    if isinstance(loss, str):
        return loss
    if isinstance(loss, _Function):
        return loss_name(loss.function)
    plain = "__repr__" not in {name for kind in type(loss).__mro__[:-1] for name in vars(kind)}
    return GIVEN + str(getattr(loss, "__name__", type(loss).__name__ if plain else repr(loss)))


def targets(y: Tensor, outputs: int, loss: AnyLoss, dtype: torch.dtype = torch.float32) -> Tensor:
    """Targets [N, d2]: classes [N] become one-hot rows; real y [N, d2] is taken as it is (`ce`: probabilities)."""
    return find_loss(loss).targets(y, outputs, dtype)


def per_sample(loss: AnyLoss, f: Tensor, Y: Tensor) -> Tensor:
    """ℓ(f_i, Y_i), [..., N]: a mean over samples, of one's own or PyTorch's, is refused."""
    value = find_loss(loss).value(f, Y)
    if value.shape != f.shape[:-1]:
        raise ConfigError(
            f"loss {loss_name(loss)!r} gives values of shape {list(value.shape)} for outputs {list(f.shape)}: it must "
            f'give one per sample, {list(f.shape[:-1])} (reduction="none", then a sum or mean over outputs if need be)'
        )
    return value


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random signs z of the shape [..., N, c] and type given, E z zᵀ = I for every row.

    Rows are dealt those of a Hadamard matrix, with columns turned by signs that all rows share: Σ z zᵀ over as many
    rows as it has is a multiple of I exactly, so that samples with similar roots add up to nearly the exact sum.
    """
    n, c = like.shape[-2:]
    rows = torch.randperm(n, generator=generator, device=like.device) % (1 << (c - 1).bit_length())
    both = rows.unsqueeze(1) & torch.arange(c, device=like.device)
    odd = torch.zeros_like(both)  # whether an odd number of bits is set: Sylvester's matrix
    for bit in range(c.bit_length()):
        odd ^= (both >> bit) & 1
    turned = torch.randint(0, 2, (c,), generator=generator, device=like.device)
    return (1 - 2 * (odd ^ turned)).to(like).expand(like.shape)


def _softmax(f: Tensor) -> Tensor:
    """By hand: on a CPU PyTorch's own takes three times as long for rows as short as classes are."""
    powers = (f - f.amax(dim=-1, keepdim=True)).exp_()
    return powers.div_(powers.sum(dim=-1, keepdim=True))
