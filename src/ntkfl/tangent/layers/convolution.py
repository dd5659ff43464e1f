"""`nn.Conv1d`, `Conv2d`, `Conv3d`: input and output sensitivities, never the unfolded patches of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.tangent.dense import DenseBlock
from ntkfl.tangent.factored import Call, FactoredBlock, LinearBlock, joined
from ntkfl.tangent.layers.geometry import Geometry
from ntkfl.tangent.layers.tape import Tape

REUSED_NUMBERS = 2**22  # beyond twice this (32 MiB) the C library gives every array fresh pages, which cost more


class ConvolutionBlock(FactoredBlock):
    """`out = W ⋆ a + b` used U times a sample: rows Σ_p g_p ⊗ [patch_p(a), 1] over all positions p.

    a: [N, U, C_in, *S]; g: [N, d2, U·C_out·P] for P positions; W: [C_out, C_in/groups, *kernel].
    """

    kind = "convolution"

    def __init__(
        self, a: Tensor, g: Tensor, weight: slice | None, bias: slice | None, settings: tuple[int, ...] = ()
    ) -> None:
        super().__init__(a, g, weight, bias, settings)
        self.geometry = Geometry.of(settings)
        self.U = a.shape[1]
        self.P = math.prod(self.geometry.positions(a.shape[3:]))
        self.C_out = g.shape[2] // (self.U * self.P)
        self.k = self.C_out * (a.shape[2] // self.geometry.groups) * math.prod(self.geometry.kernel)  # weights

    @classmethod
    def from_calls(
        cls, calls: Sequence[Call], weight: slice | None, bias: slice | None, settings: tuple[int, ...]
    ) -> FactoredBlock | DenseBlock:
        if len({c.input.shape for c in calls}) > 1:
            # Images of several sizes share no factors, but their derivatives have one shape and add up.
            total, *more = [cls.from_calls([c], weight, bias, settings).densify() for c in calls]  # type: ignore[union-attr]
            for block in more:
                total.values += block.values
            return total
        a = joined([c.input.unsqueeze(1) for c in calls], dim=1)
        g = joined([c.sensitivity.flatten(2) for c in calls], dim=2)
        return cls(a, g, weight, bias, settings)

    @classmethod
    def fits(cls, a: Tensor, g: Tensor, weight: int, bias: int | None, settings: tuple[int, ...]) -> bool:
        if not a.is_floating_point() or a.ndim < 4 or not a.shape[1] or len(settings) != 4 * (a.ndim - 3) + 1:
            return False
        at = Geometry.of(settings)
        if min(*at.kernel, *at.stride, *at.dilation, at.groups) < 1 or min(at.padding) < 0 or max(settings) >= 2**31:
            return False
        if not at.within(a.shape[3:]) or min(at.positions(a.shape[3:])) < 1:
            return False
        outputs = a.shape[1] * math.prod(at.positions(a.shape[3:]))
        C_in, C_out = a.shape[2], g.shape[2] // outputs
        return (
            C_out * outputs == g.shape[2]
            and C_in % at.groups == C_out % at.groups == 0
            and weight == C_out * (C_in // at.groups) * math.prod(at.kernel)
            and bias in (None, C_out)
        )

    @classmethod
    def admits(cls, sample_dim: int, ndim: int, settings: tuple[int, ...]) -> bool:
        return sample_dim == 0

    def apply(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """All directions in one convolution, as so many more output channels of each group."""
        lead, G = weight.shape[:-1], self.geometry.groups
        B, C_in = math.prod(lead), self.a.shape[2]
        filters = weight.reshape(B, G, self.C_out // G, C_in // G, *self.geometry.kernel).transpose(0, 1)
        filters = filters.reshape(G * B * (self.C_out // G), C_in // G, *self.geometry.kernel)
        if bias is not None:
            bias = bias.reshape(B, G, self.C_out // G).transpose(0, 1).reshape(-1)
        parts = [self.geometry.convolve(x, filters, bias) for x in self._few_images()]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        out = out.reshape(len(self.a), self.U, G, B, self.C_out // G, self.P)
        return out.permute(3, 0, 1, 2, 4, 5).reshape(*lead, *self.g.shape[::2])

    def transpose(self, cotangent: Tensor) -> tuple[Tensor, Tensor | None]:
        lead, G = cotangent.shape[:-2], self.geometry.groups
        B, C_in, size = math.prod(lead), self.a.shape[2], self.geometry.positions(self.a.shape[3:])
        spread = cotangent.reshape(B, len(self.a) * self.U, G, self.C_out // G, self.P).permute(1, 2, 0, 3, 4)
        spread = spread.reshape(len(self.a) * self.U, G * B * (self.C_out // G), *size)
        shape = (G * B * (self.C_out // G), C_in // G, *self.geometry.kernel)
        at = 0
        weight = cotangent.new_zeros(shape)
        for x in self._few_images():
            weight += self.geometry.weight_gradient(x, spread[at : at + len(x)], shape)
            at += len(x)
        weight = weight.view(G, B, self.k // G).transpose(0, 1).reshape(*lead, self.k)
        if self.bias is None:
            return weight, None
        return weight, cotangent.reshape(*lead, len(self.a) * self.U, self.C_out, self.P).sum(dim=(-3, -1))

    def gram(self, other: Self) -> Tensor:
        """Dense rows, or pairs of positions where they are cheaper."""
        uses = self.U * self.P
        if self.geometry.groups == 1 and self._pairs_are_cheaper(other, uses, self.k // self.C_out, self.C_out):
            return self._gram_of_tiles(other, uses, ConvolutionBlock._gram_unfolded)
        return self._gram_of_dense_rows(other)

    def _gram_unfolded(self, other: Self) -> Tensor:
        left = self._unfolded()
        return left.gram_of_pairs(left if other is self else other._unfolded())

    def weight_values(self) -> Tensor:
        N, d2 = self.g.shape[:2]
        G, each = self.geometry.groups, self.C_out // self.geometry.groups
        seen = self.k // self.C_out  # numbers in a patch
        patches = self.geometry.patches(self._images()).view(N, self.U, G, seen, self.P)
        total: Tensor | None = None
        for u in range(self.U):
            g = self.g.view(N, d2, self.U, G, each, self.P)[:, :, u].transpose(1, 2).reshape(N * G, d2 * each, self.P)
            product = torch.bmm(g, patches[:, u].reshape(N * G, seen, self.P).mT)
            total = product if total is None else total.add_(product)
        assert total is not None
        return total.view(N, G, d2, each * seen).transpose(1, 2).reshape(N, d2, self.k)

    def bias_values(self) -> Tensor:
        N, d2 = self.g.shape[:2]
        return self.g.view(N, d2, self.U, self.C_out, self.P).sum(dim=(2, 4))

    def _images(self) -> Tensor:
        return self.a.view(len(self.a) * self.U, *self.a.shape[2:])

    def _few_images(self) -> tuple[Tensor, ...]:
        """On a CPU in parts of equal size that reuse memory: up to three times as fast as 4,000 images at once."""
        images = self._images()
        parts = max(1, math.ceil(images.numel() / REUSED_NUMBERS)) if images.device.type == "cpu" else 1
        return torch.split(images, math.ceil(len(images) / parts))

    def _unfolded(self) -> LinearBlock:
        """The same as a linear layer over patches, groups = 1."""
        N, d2 = self.g.shape[:2]
        patches = self.geometry.patches(self._images()).view(N, self.U, self.k // self.C_out, self.P)
        a = patches.transpose(2, 3).flatten(1, 2)
        g = self.g.view(N, d2, self.U, self.C_out, self.P).transpose(3, 4).flatten(2)
        return LinearBlock(a.contiguous(), g.contiguous(), self.weight, self.bias)


def run_convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, tape: Tape, input: Tensor) -> Any:
    D = len(module.kernel_size)
    if module.padding_mode != "zeros" or input.ndim != D + 2:
        return NotImplemented
    bare = Geometry(module.kernel_size, module.stride, (0,) * D, module.dilation, module.groups)
    x, at = _padded(input, bare, module.padding)
    out = at.convolve(x, tape.value(module.weight), tape.optional(module.bias))
    return tape.tap(ConvolutionBlock, x, out, "weight", None if module.bias is None else "bias", at.settings)


def inner_geometry(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Geometry | None:
    """How this layer passes over x, where its padding is part of the convolution; None where it is not."""
    bare = Geometry(module.kernel_size, module.stride, (0,) * len(module.kernel_size), module.dilation, module.groups)
    padded, at = _padded(x, bare, module.padding)
    return at if padded is x and module.padding_mode == "zeros" else None


def _padded(x: Tensor, at: Geometry, padding: str | tuple[int, ...]) -> tuple[Tensor, Geometry]:
    """Padding as part of the convolution where it is alike on both sides and within bounds, else of its input."""
    if padding == "same":
        sides = [(reach // 2, reach - reach // 2) for reach in at.reach]
    else:
        sides = [(0, 0)] * len(at.kernel) if isinstance(padding, str) else [(p, p) for p in padding]
    inside = at._replace(padding=tuple(left for left, _ in sides))
    if all(left == right for left, right in sides) and inside.within(x.shape[2:]):
        return x, inside
    return F.pad(x, [n for side in reversed(sides) for n in side]), at
