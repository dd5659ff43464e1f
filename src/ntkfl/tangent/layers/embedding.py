"""`nn.Embedding`: tokens, and the sensitivities of the vectors they were replaced by."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.tangent.blocks import FactoredBlock, Factors, Settings, Tape, Tensors, joined


class EmbeddingBlock(FactoredBlock):
    """`out_t = W[token_t]` for T tokens a sample: rows Σ_t e(token_t) ⊗ g_t.

    a: int32 [N, T]; g: [N, d2, T·E], zero at padding; W: [V, E].
    """

    kind = "embedding"

    @classmethod
    def factors(cls, inputs: Tensors, sensitivities: Tensors, settings: Settings) -> Factors:
        """settings: the token that is padding and never trains, or -1."""
        a = joined([tokens.reshape(len(tokens), -1) for tokens in inputs], dim=1)
        g = joined([g.flatten(2, -2) for g in sensitivities], dim=2)  # [N, d2, T, E]
        if settings[0] >= 0:
            g = g * (a != settings[0]).view(len(a), 1, -1, 1)
        return a.int(), g.flatten(2), ()

    @classmethod
    def fits(cls, a: Tensor, g: Tensor, weight: int, bias: int | None, settings: Settings) -> bool:
        if a.ndim != 2 or a.dtype != torch.int32 or settings or bias is not None:
            return False
        if not a.shape[1] or g.shape[2] % a.shape[1] or not g.shape[2] or weight % (g.shape[2] // a.shape[1]):
            return False
        vocabulary = weight // (g.shape[2] // a.shape[1])
        return not a.numel() or (int(a.min()) >= 0 and int(a.max()) < vocabulary)

    @classmethod
    def admits(cls, sample_dim: int, ndim: int, settings: Settings) -> bool:
        return True  # vectors come behind the tokens' own dimensions

    def apply(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """δW[token_t] at every position."""
        lead = weight.shape[:-1]
        rows = weight.reshape(*lead, -1, self.n_out).index_select(-2, self.a.view(-1))
        return rows.reshape(*lead, len(self.a), -1)

    def transpose(self, cotangent: Tensor) -> Tensor:
        """Cotangents added up by token."""
        lead = cotangent.shape[:-2]
        out = cotangent.new_zeros(*lead, self.width // self.n_out, self.n_out)
        return out.index_add_(-2, self.a.view(-1), cotangent.reshape(*lead, -1, self.n_out)).flatten(-2)

    def meet(self, other: Self) -> Tensor:
        """1 where two positions have the same token."""
        return (self.a.view(-1, 1) == other.a.view(1, -1)).to(self.g)

    def weight_values(self) -> Tensor:
        """g added up by token: [N, d2, V·E]."""
        g = self.g.view(*self.g.shape[:2], self.positions, self.n_out)
        out = g.new_zeros(*g.shape[:2], self.width // self.n_out, self.n_out)
        return out.scatter_add_(2, self.a.long()[:, None, :, None].expand(g.shape), g).flatten(2)


def run_embedding(module: nn.Embedding, tape: Tape, input: Tensor) -> Any:
    """out_t = W[token_t]."""
    if module.max_norm is not None or module.scale_grad_by_freq:  # weights or gradients that depend on the batch
        return NotImplemented
    out = F.embedding(input, tape.values(module.weight)[0], module.padding_idx)
    padding = -1 if module.padding_idx is None else module.padding_idx
    return tape.tap(EmbeddingBlock, input, out, module.weight, None, (padding,))
