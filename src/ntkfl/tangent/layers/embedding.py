"""`nn.Embedding`: tokens, and the sensitivities of the vectors they were replaced by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.tangent.factored import Call, FactoredBlock, Settings, joined
from ntkfl.tangent.layers.tape import Tape


class EmbeddingBlock(FactoredBlock):
    """`out_t = W[token_t]` for T tokens a sample: rows Σ_t e(token_t) ⊗ g_t.

    a: int32 [N, T]; g: [N, d2, T·E], zero at padding; W: [V, E].
    """

    kind = "embedding"

    def measure(self) -> None:
        self.T = self.positions = self.a.shape[1]
        self.E = self.g.shape[2] // self.T

    @classmethod
    def factors(cls, calls: Sequence[Call], settings: Settings) -> tuple[Tensor, Tensor, Settings]:
        """settings: the token that is padding and never trains, or -1."""
        a = joined([c.input.reshape(len(c.input), -1) for c in calls], dim=1)
        g = joined([c.sensitivity.flatten(2, -2) for c in calls], dim=2)  # [N, d2, T, E]
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
        rows = weight.reshape(*weight.shape[:-1], self._vocabulary, self.E).index_select(-2, self.a.view(-1))
        return rows.reshape(*weight.shape[:-1], len(self.a), self.T * self.E)

    def transpose(self, cotangent: Tensor) -> Tensor:
        """Cotangents added up by token."""
        lead = cotangent.shape[:-2]
        out = cotangent.new_zeros(*lead, self._vocabulary, self.E)
        out.index_add_(-2, self.a.view(-1), cotangent.reshape(*lead, len(self.a) * self.T, self.E))
        return out.flatten(-2)

    def gram(self, other: Self) -> Tensor:
        """Token by token: Σ_v ⟨sum of g over v's places in i, … in j⟩, as many products as pairs share a token."""
        out = self.g.new_zeros(len(self.g), len(other.g))
        mine, theirs = self._by_token(), other._by_token()
        for token in mine.keys() & theirs.keys():
            (rows, left), (columns, right) = mine[token], theirs[token]
            out[rows.unsqueeze(1), columns] += left @ right.T
        return out

    def weight_values(self) -> Tensor:
        """g added up by token: [N, d2, V·E]."""
        N, d2 = self.g.shape[:2]
        out = self.g.new_zeros(N, d2, self._vocabulary, self.E)
        index = self.a.long().view(N, 1, self.T, 1).expand(N, d2, self.T, self.E)
        return out.scatter_add_(2, index, self.g.view(N, d2, self.T, self.E)).flatten(2)

    @property
    def _vocabulary(self) -> int:
        """V, the rows of W."""
        assert self.weight is not None
        return int(self.weight.stop - self.weight.start) // self.E

    def _by_token(self) -> dict[int, tuple[Tensor, Tensor]]:
        """For each token that occurs the samples it occurs in, [m], and the sums of g over its places, [m, d2·E]."""
        N, d2 = self.g.shape[:2]
        sample = torch.arange(N, device=self.a.device).unsqueeze(1)
        keys, place = torch.unique(self.a.long() * N + sample, return_inverse=True)
        g = self.g.view(N, d2, self.T, self.E).transpose(1, 2).reshape(N * self.T, d2 * self.E)
        sums = g.new_zeros(len(keys), d2 * self.E).index_add_(0, place.view(-1), g)
        tokens, counts = torch.unique_consecutive(keys // N, return_counts=True)
        parts = zip(torch.split(keys % N, counts.tolist()), torch.split(sums, counts.tolist()), strict=True)
        return dict(zip(tokens.tolist(), parts, strict=True))


def run_embedding(module: nn.Embedding, tape: Tape, input: Tensor) -> Any:
    """out_t = W[token_t]."""
    if module.max_norm is not None or module.scale_grad_by_freq:  # weights or gradients that depend on the batch
        return NotImplemented
    out = F.embedding(input, tape.value(module.weight), module.padding_idx)
    padding = -1 if module.padding_idx is None else module.padding_idx
    return tape.tap(EmbeddingBlock, input, out, "weight", None, (padding,))
