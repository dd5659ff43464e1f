"""How a filter passes over an image: positions, patches, and the transposes of a convolution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Geometry(NamedTuple):
    """How a filter passes over its input, a number for each of its D dimensions; `settings` holds them in a row."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @staticmethod
    def of(settings: tuple[int, ...]) -> Geometry:
        """The inverse of `settings`."""
        D = len(settings) // 4
        kernel, stride, padding, dilation = (settings[i * D : (i + 1) * D] for i in range(4))
        return Geometry(kernel, stride, padding, dilation, settings[-1])

    @property
    def settings(self) -> tuple[int, ...]:
        """All numbers in a row, as they travel."""
        return (*self.kernel, *self.stride, *self.padding, *self.dilation, self.groups)

    @property
    def reach(self) -> tuple[int, ...]:
        """How far the filter's last tap lies from its first."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))

    def positions(self, size: Sequence[int]) -> tuple[int, ...]:
        """The output's size for an input's."""
        each = zip(size, self.padding, self.reach, self.stride, strict=True)
        return tuple((n + 2 * p - reach - 1) // s + 1 for n, p, reach, s in each)

    def within(self, size: Sequence[int]) -> bool:
        """Whether padding is part of the convolution: not if it would make the input more than four times as long.

        So that a stranger's settings cannot make a small message unfold into large arrays.
        """
        return all(2 * p <= 3 * n for p, n in zip(self.padding, size, strict=True))

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """W ⋆ x + b: [n, C, *S] -> [n, C_out, *P]."""
        nothing = [0] * len(self.kernel)
        return torch.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, nothing, self.groups)

    def input_gradient(self, cotangent: Tensor, weight: Tensor, size: Sequence[int]) -> Tensor:
        """The transpose of `convolve` in x, whose images have this size."""
        each = zip(size, self.positions(size), self.stride, self.padding, self.reach, strict=True)
        unseen = [n - ((m - 1) * s - 2 * p + reach + 1) for n, m, s, p, reach in each]  # beyond the last patch
        return torch.convolution(
            cotangent, weight, None, self.stride, self.padding, self.dilation, True, unseen, self.groups
        )

    def phases(
        self, cotangent: Tensor, weight: Tensor, size: Sequence[int]
    ) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """`input_gradient` by parts, without groups or dilation: positions of the input, and its values there.

        Position q of the padded input gets tap t of output position m where q = stride·m + t. Those q that are alike
        modulo the stride meet the same taps, so each such phase is a convolution without a stride: u = q // stride gets
        taps[j] of m = u − j. Positions in no phase are seen by no tap.
        """
        D, each = len(self.kernel), zip(size, cotangent.shape[2:], self.kernel, self.stride, self.padding, strict=True)
        for along in itertools.product(*(_phases_along(*one) for one in each)):
            at, taps, pads = zip(*along, strict=True)
            filters = weight[(slice(None), slice(None), *taps)].transpose(0, 1).flip(*range(2, 2 + D))
            alike = all(left == right >= 0 for left, right in pads)
            padding = [left if alike else 0 for left, _ in pads]
            padded = cotangent if alike else F.pad(cotangent, [n for pad in reversed(pads) for n in pad])
            yield at, torch.convolution(padded, filters, None, [1] * D, padding, [1] * D, False, [0] * D, 1)

    def weight_gradient(self, x: Tensor, cotangent: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The transpose of `convolve` in the filters, which have this shape."""
        nothing, mask = [0] * len(self.kernel), (False, True, False)
        filters = x.new_empty(1).expand(shape)  # of them only the shape matters
        gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            cotangent, x, filters, None, self.stride, self.padding, self.dilation, False, nothing, self.groups, mask
        )
        return gradients[1]

    def windows(self, x: Tensor, at: Sequence[slice] | None = None) -> Tensor:
        """What each output position (or those `at` which) sees of x [n, C, *S], as a view: [n, C, *kernel, *P]."""
        D = len(self.kernel)
        x = F.pad(x, [p for p in reversed(self.padding) for _ in range(2)]) if any(self.padding) else x
        for i, m in enumerate(self.positions([n - 2 * p for n, p in zip(x.shape[2:], self.padding, strict=True)])):
            which = range(m)[at[i]] if at is not None else range(m)
            step = self.stride[i] * which.step
            x = x.narrow(2 + i, self.stride[i] * which.start, (len(which) - 1) * step + self.reach[i] + 1)
            x = x.unfold(2 + i, self.reach[i] + 1, step)[..., :: self.dilation[i]]
        return x.permute(0, 1, *range(2 + D, 2 + 2 * D), *range(2, 2 + D))

    def patches(self, x: Tensor) -> Tensor:
        """The same of all positions, unfolded: [n, groups, C/groups·K, P]."""
        seen = x.shape[1] // self.groups * math.prod(self.kernel)
        return self.windows(x).reshape(len(x), self.groups, seen, math.prod(self.positions(x.shape[2:])))


def _phases_along(
    n: int, m: int, kernel: int, stride: int, padding: int
) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """The phases of one dimension of n positions, m behind the filter: where, by which taps, and what to pad m with."""
    for r in range(min(kernel, stride)):
        reach = len(range(r, kernel, stride)) - 1
        start = max(0, -((r - padding) // stride))  # of u: in the image, and seen by some tap
        stop = min(m + reach, (padding + n - 1 - r) // stride + 1)
        if start < stop:
            first = stride * start + r - padding
            at = slice(first, first + stride * (stop - start - 1) + 1, stride)
            yield at, slice(r, kernel, stride), (reach - start, stop - m)  # below 0 it is cut
