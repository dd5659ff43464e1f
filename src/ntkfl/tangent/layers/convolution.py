"""`nn.Conv1d` and `Conv2d`: input and output sensitivities, never the unfolded patches of the whole batch.

A convolution is a linear layer over patches: at position p of its output it sees patch_p(a) ∈ R^{C_in/groups · K}.
One dimension is taken for two, of which the first is 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from ntkfl.tangent.blocks import FactoredBlock, Factors, Settings, Tape, Tensors

_Pair = tuple[int, int]


class Geometry(NamedTuple):
    """How a filter passes over an image; `of(settings)` takes the same numbers in a row, as a block holds them."""

    kernel: _Pair
    stride: _Pair
    padding: _Pair
    dilation: _Pair
    groups: int

    @staticmethod
    def of(settings: Settings) -> Geometry:
        """The geometry of nine numbers."""
        kernel, stride, padding, dilation = (cast(_Pair, settings[i : i + 2]) for i in range(0, 8, 2))
        return Geometry(kernel, stride, padding, dilation, settings[8])

    @property
    def settings(self) -> Settings:
        """All numbers in a row."""
        return (*self.kernel, *self.stride, *self.padding, *self.dilation, self.groups)

    def positions(self, size: Sequence[int]) -> list[int]:
        """The output's size for an input's."""
        each = zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each]

    def within(self, size: Sequence[int]) -> bool:
        """Whether padding is part of the convolution: not if it would make the input more than four times as long.

        So that a stranger's settings cannot make a small message unfold into large arrays.
        """
        return all(2 * p <= 3 * n for p, n in zip(self.padding, size, strict=True))


class ConvolutionBlock(FactoredBlock):
    """`out = W ⋆ a + b`, used once a sample: rows Σ_p g_p ⊗ [patch_p(a), 1] over all P positions p.

    a: [N, C_in, H, W]; g: [N, d2, C_out·P]; W: [C_out, C_in/groups, *kernel].
    """

    kind = "convolution"

    def count_positions(self) -> int:
        self.geometry = Geometry.of(self.settings)
        self.groups = self.geometry.groups
        return math.prod(self.geometry.positions(self.a.shape[2:]))

    @classmethod
    def factors(cls, inputs: Tensors, sensitivities: Tensors, settings: Settings) -> Factors | None:
        if len(inputs) > 1:
            return None  # images of several sizes share no factors, but their derivatives have one shape and add up
        return inputs[0], sensitivities[0].flatten(2), settings

    @classmethod
    def fits(cls, a: Tensor, g: Tensor, weight: int, bias: int | None, settings: Settings) -> bool:
        if not a.is_floating_point() or a.ndim != 4 or len(settings) != 9:
            return False
        at = Geometry.of(settings)
        if min(*at.kernel, *at.stride, *at.dilation, at.groups) < 1 or min(at.padding) < 0 or max(settings) >= 2**31:
            return False
        if not at.within(a.shape[2:]) or min(at.positions(a.shape[2:])) < 1:
            return False
        P, C_in = math.prod(at.positions(a.shape[2:])), a.shape[1]
        C_out = g.shape[2] // P
        return (
            C_out * P == g.shape[2]
            and C_in % at.groups == C_out % at.groups == 0
            and weight == C_out * (C_in // at.groups) * math.prod(at.kernel)
            and bias in (None, C_out)
        )

    @classmethod
    def admits(cls, sample_dim: int, ndim: int, settings: Settings) -> bool:
        """Images come first."""
        return sample_dim == 0

    def apply(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """All B directions in one convolution, as so many more output channels of each group."""
        lead, G, each = weight.shape[:-1], self.groups, self.n_out // self.groups
        B, N = math.prod(lead), len(self.a)
        filters = weight.reshape(B, G, -1).transpose(0, 1).reshape(self._filters(B))
        if bias is not None:
            bias = bias.reshape(B, G, each).transpose(0, 1).reshape(-1)
        out = F.conv2d(self.a, filters, bias, *self.geometry[1:])
        return out.reshape(N, G, B, each, self.positions).permute(2, 0, 1, 3, 4).reshape(*lead, N, -1)

    def transpose(self, cotangent: Tensor) -> Tensor:
        """Σ_n a_n ⋆ X_n, a convolution of inputs with cotangents."""
        lead, G, each = cotangent.shape[:-2], self.groups, self.n_out // self.groups
        B, N = math.prod(lead), len(self.a)
        spread = cotangent.reshape(B, N, G, each, self.positions).permute(1, 2, 0, 3, 4)
        spread = spread.reshape(N, G * B * each, *self.geometry.positions(self.a.shape[2:]))
        weight: Tensor = conv2d_weight(self.a, self._filters(B), spread, *self.geometry[1:])  # type: ignore[no-untyped-call]
        return weight.view(G, B, -1).transpose(0, 1).reshape(*lead, -1)

    def weight_values(self) -> Tensor:
        """Σ_p g_ncp ⊗ patch_p by one convolution with a group for each sample: its patches are never unfolded."""
        (N, d2), G = self.g.shape[:2], self.groups
        spread = self.by_output(self.g).reshape(N, d2, G, -1, self.positions).transpose(1, 2)
        spread = spread.reshape(1, -1, *self.geometry.positions(self.a.shape[2:]))
        filters = (spread.shape[1], self.a.shape[1] // G, *self.geometry.kernel)
        images = self.a.flatten(0, 1).unsqueeze(0)
        weight: Tensor = conv2d_weight(images, filters, spread, *self.geometry[1:4], N * G)  # type: ignore[no-untyped-call]
        return weight.view(N, G, d2, -1).transpose(1, 2).reshape(N, d2, -1)

    def by_output(self, numbers: Tensor) -> Tensor:
        """They lie that way."""
        return numbers.reshape(*numbers.shape[:-1], self.n_out, self.positions)

    def _filters(self, directions: int) -> tuple[int, ...]:
        return (self.n_out * directions, self.a.shape[1] // self.groups, *self.geometry.kernel)

    def seen(self) -> Tensor:
        """The patches, [N, groups, P, C_in/groups · K]."""
        at = self.geometry
        patches = F.unfold(self.a, at.kernel, at.dilation, at.padding, at.stride)
        return patches.view(len(self.a), self.groups, -1, self.positions).mT


def run_convolution(module: nn.Conv1d | nn.Conv2d, tape: Tape, input: Tensor) -> Any:
    """out = W ⋆ x + b; modes of padding other than zeros are left to autograd."""
    D = len(module.kernel_size)
    if module.padding_mode != "zeros" or input.ndim != D + 2:
        return NotImplemented
    (weight, bias), x, flat = tape.values(module.weight, module.bias), input, D == 1
    sides = module._reversed_padding_repeated_twice[::-1]  # PyTorch's own: of each dimension the right, then the left
    numbers = (module.kernel_size, module.stride, tuple(sides[::2]), module.dilation)
    if flat:
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        numbers = tuple((default, *own) for default, own in zip((1, 1, 0, 1), numbers, strict=True))  # type: ignore[assignment]
    at = Geometry.of((*itertools.chain(*numbers), module.groups))
    if sides[::2] != sides[1::2] or not at.within(x.shape[2:]):  # such padding becomes part of the input
        x, at = F.pad(x, module._reversed_padding_repeated_twice), at._replace(padding=(0, 0))

    out = F.conv2d(x, weight, bias, *at[1:])
    out = tape.tap(ConvolutionBlock, x, out, module.weight, module.bias, at.settings)
    return out.squeeze(2) if flat else out
