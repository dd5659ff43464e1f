"""`nn.Conv1d`, `Conv2d`, `Conv3d`: input and output sensitivities, never the unfolded patches of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkfl.tangent.factored import Call, FactoredBlock, LinearBlock, Settings, joined
from ntkfl.tangent.layers.geometry import Geometry
from ntkfl.tangent.layers.tape import Tape


class ConvolutionBlock(FactoredBlock):
    """`out = W ⋆ a + b` used U times a sample: rows Σ_p g_p ⊗ [patch_p(a), 1] over all positions p.

    a: [N, U, C_in, *S]; g: [N, d2, U·C_out·P] for P positions; W: [C_out, C_in/groups, *kernel].
    """

    kind = "convolution"

    def measure(self) -> None:
        self.geometry = Geometry.of(self.settings)
        self.U, self.groups = self.a.shape[1], self.geometry.groups
        self.P = math.prod(self.geometry.positions(self.a.shape[3:]))
        self.positions = self.U * self.P
        self.C_out = self.g.shape[2] // self.positions
        self.k = self.C_out * (self.a.shape[2] // self.groups) * math.prod(self.geometry.kernel)  # weights

    @classmethod
    def factors(cls, calls: Sequence[Call], settings: Settings) -> tuple[Tensor, Tensor, Settings] | None:
        if len({c.input.shape for c in calls}) > 1:
            return None  # images of several sizes share no factors, but their derivatives have one shape and add up
        a = joined([c.input.unsqueeze(1) for c in calls], dim=1)
        return a, joined([c.sensitivity.flatten(2) for c in calls], dim=2), settings

    @classmethod
    def fits(cls, a: Tensor, g: Tensor, weight: int, bias: int | None, settings: Settings) -> bool:
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
    def admits(cls, sample_dim: int, ndim: int, settings: Settings) -> bool:
        """Images come first."""
        return sample_dim == 0

    def apply(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """All directions in one convolution, as so many more output channels of each group."""
        lead, G = weight.shape[:-1], self.groups
        B, C_in, each = math.prod(lead), self.a.shape[2], self.C_out // G
        filters = weight.reshape(B, G, each, C_in // G, *self.geometry.kernel).transpose(0, 1)
        filters = filters.reshape(G * B * each, C_in // G, *self.geometry.kernel)
        if bias is not None:
            bias = bias.reshape(B, G, each).transpose(0, 1).reshape(-1)
        out = self.geometry.convolve(self._images(), filters, bias)
        out = out.reshape(len(self.a), self.U, G, B, each, self.P)
        return out.permute(3, 0, 1, 2, 4, 5).reshape(*lead, *self.g.shape[::2])

    def transpose(self, cotangent: Tensor) -> Tensor:
        """Σ_n x_n ⋆ X_n, a convolution of inputs with cotangents."""
        lead, G = cotangent.shape[:-2], self.groups
        B, C_in, each = math.prod(lead), self.a.shape[2], self.C_out // G
        images = self._images()
        spread = cotangent.reshape(B, len(images), G, each, self.P).permute(1, 2, 0, 3, 4)
        spread = spread.reshape(len(images), G * B * each, *self.geometry.positions(images.shape[2:]))
        shape = (G * B * each, C_in // G, *self.geometry.kernel)
        weight = self.geometry.weight_gradient(images, spread, shape)
        return weight.view(G, B, self.k // G).transpose(0, 1).reshape(*lead, self.k)

    def pooled(self, outputs: Tensor) -> Tensor:
        return outputs.reshape(*outputs.shape[:-1], self.U, self.C_out, self.P).sum(dim=(-3, -1))

    def gram(self, other: Self) -> Tensor:
        """Dense rows, or pairs of positions where they are cheaper."""
        if self.groups == 1 and self._pairs_are_cheaper(other, self.positions, self.k // self.C_out, self.C_out):
            return self._gram_of_pairs(other, self.positions, ConvolutionBlock._pairs)
        return self._gram_of_dense_rows(other)

    def _pairs(self, other: Self) -> Tensor:
        """Of patches as positions of a linear layer."""
        left = self._unfolded()
        return left.pairs(left if other is self else other._unfolded())

    def seen(self) -> Tensor:
        """The patches."""
        patches = self.geometry.patches(self._images())
        patches = patches.view(len(self.a), self.U, *patches.shape[1:])  # [N, U, G, seen, P]
        return patches.permute(0, 2, 1, 4, 3).flatten(2, 3)

    def weight_values(self) -> Tensor:
        """Σ_p g_ncp ⊗ patch_p, a matrix product for each sample and group."""
        N, d2 = self.g.shape[:2]
        G, each = self.groups, self.C_out // self.groups
        g = self.g.view(N, d2, self.U, G, each, self.P).permute(0, 3, 1, 4, 2, 5)
        total = torch.bmm(g.reshape(N * G, d2 * each, self.positions), self.seen().flatten(0, 1))
        return total.view(N, G, d2, -1).transpose(1, 2).reshape(N, d2, self.k)

    def _images(self) -> Tensor:
        """[N·U, C_in, *S]."""
        return self.a.reshape(len(self.a) * self.U, *self.a.shape[2:])

    def _unfolded(self) -> LinearBlock:
        """The same as a linear layer over patches, without groups."""
        g = self.g.view(*self.g.shape[:2], self.U, self.C_out, self.P).transpose(3, 4).flatten(2)
        return LinearBlock(self.seen().squeeze(1).contiguous(), g.contiguous(), self.weight, self.bias)


def run_convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, tape: Tape, input: Tensor) -> Any:
    """out = W ⋆ x + b; modes of padding other than zeros are left to autograd."""
    if module.padding_mode != "zeros" or input.ndim != len(module.kernel_size) + 2:
        return NotImplemented
    x, at = input, inner_geometry(module, input)
    if at is None:  # padding that differs between the sides, or is large, becomes part of the input
        x = F.pad(input, module._reversed_padding_repeated_twice)
        at = _geometry(module, (0,) * len(module.kernel_size))
    out = at.convolve(x, tape.value(module.weight), tape.optional(module.bias))
    return tape.tap(ConvolutionBlock, x, out, "weight", None if module.bias is None else "bias", at.settings)


def inner_geometry(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Geometry | None:
    """How this layer passes over x, where its padding is part of the convolution; None where it is not."""
    sides = module._reversed_padding_repeated_twice[::-1]  # PyTorch's own: of each dimension the right, then the left
    geometry = _geometry(module, tuple(sides[::2]))
    inside = module.padding_mode == "zeros" and sides[::2] == sides[1::2] and geometry.within(x.shape[2:])
    return geometry if inside else None


def _geometry(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, padding: tuple[int, ...]) -> Geometry:
    return Geometry(module.kernel_size, module.stride, padding, module.dilation, module.groups)
