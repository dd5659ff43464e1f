"""Normalisation layers: what follows the normalisation, `out = γ ⊙ x̂ + β`, is all that trains."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.tangent.blocks import FactoredBlock, Factors, Settings, Tape, Tensors, joined


class ScaleBlock(FactoredBlock):
    """`out_t = γ ⊙ a_t + β` at T positions a sample: rows Σ_t [g_t ⊙ a_t, g_t]. Worth its factors at T = 1 alone.

    a: [N, T, C], the normalised inputs; g: [N, d2, T·C]; γ, β: [C].
    """

    kind = "scale"

    def count_positions(self) -> int:
        self.groups = self.a.shape[2]  # each channel sees itself alone
        return self.a.shape[1]

    @classmethod
    def factors(cls, inputs: Tensors, sensitivities: Tensors, settings: Settings) -> Factors:
        """settings: the count of normalised dimensions, which come last."""
        features = settings[0]
        a = joined([x.reshape(len(x), -1, x.shape[-features:].numel()) for x in inputs], dim=1)
        return a, joined([g.flatten(2) for g in sensitivities], dim=2), ()

    @classmethod
    def fits(cls, a: Tensor, g: Tensor, weight: int, bias: int | None, settings: Settings) -> bool:
        shapes = a.ndim == 3 and a.is_floating_point() and a.shape[1] * a.shape[2] == g.shape[2] > 0
        return shapes and not settings and weight == a.shape[2] and bias in (None, a.shape[2])

    @classmethod
    def admits(cls, sample_dim: int, ndim: int, settings: Settings) -> bool:
        return sample_dim < ndim - settings[0]

    def apply(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """δγ ⊙ a_t + δβ."""
        out = self.a * weight[..., None, None, :]
        if bias is not None:
            out += bias[..., None, None, :]
        return out.flatten(-2)

    def transpose(self, cotangent: Tensor) -> Tensor:
        """Σ_nt X_nt ⊙ a_nt."""
        return (cotangent.reshape(*cotangent.shape[:-1], *self.a.shape[1:]) * self.a).sum(dim=(-3, -2))

    def weight_values(self) -> Tensor:
        """Σ_t g_nct ⊙ a_nt."""
        return (self.g.view(*self.g.shape[:2], *self.a.shape[1:]) * self.a.unsqueeze(1)).sum(dim=2)


def run_norm(module: Any, tape: Tape, input: Tensor) -> Any:
    """out = γ ⊙ x̂ + β with x̂ = (x − mean) / √(var + ε): over the last dimensions (`LayerNorm`, and `RMSNorm` without a
    mean), groups of channels (`GroupNorm`), or by running statistics (`BatchNorm`; by those of the batch no sample
    stands alone).
    """
    match module:
        case nn.LayerNorm(normalized_shape=shape, eps=eps):
            return _affine(module, tape, F.layer_norm(input, shape, None, None, eps), len(shape))
        case nn.RMSNorm(normalized_shape=shape, eps=eps):
            return _affine(module, tape, F.rms_norm(input, shape, None, eps), len(shape))
        case nn.GroupNorm(num_groups=groups, eps=eps):
            normal = F.group_norm(input, groups, None, None, eps)
        case _ if module.training or module.running_mean is None:  # statistics of the batch
            return NotImplemented
        case _:
            normal = F.batch_norm(input, module.running_mean, module.running_var, eps=module.eps)
    return _affine(module, tape, normal.movedim(1, -1), 1).movedim(-1, 1)  # channels last


def _affine(module: nn.Module, tape: Tape, normal: Tensor, features: int) -> Tensor:
    """out = γ ⊙ x̂ + β over the last dimensions, tapped."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is None:
        return normal
    gamma, beta = tape.values(weight, bias)
    out = normal * gamma if beta is None else normal * gamma + beta
    return tape.tap(ScaleBlock, normal, out, weight, bias, (features,))
