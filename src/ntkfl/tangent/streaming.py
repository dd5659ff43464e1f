"""Rows that stay in host memory, or in a file, and pass through the device a few at a time: Jacobians out of core.

Nothing of size [N, N] or [N, d2, d] is made: a product with the full kernel is J (Jᵀ R), two passes over the rows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ntkfl.tangent.jacobian import BlockJacobian, Jacobian, RowIndex

_CPU_BYTES, _DEVICE_BYTES = 2**25, 2**28  # of rows at a time: a CPU's caches, and what keeps an accelerator busy


class StreamedJacobian(Jacobian):
    """`source`, its rows stored anywhere, with products on `device`, in `dtype`; equal to it up to rounding.

    A product holds two parts of about 256 MiB on an accelerator, the next one copied while one is at work, or works on
    32 MiB at a time on a CPU. From pinned memory a part travels at the bus's speed, from a file at the disk's.
    """

    def __init__(
        self,
        source: BlockJacobian,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rows: int | None = None,
        factors: Tensor | None = None,
    ) -> None:
        self.source, self.shape, self.factors = source, source.shape, factors  # row i times factors[i]
        self._device = source.device if device is None else torch.empty(0, device=device).device  # cuda:0, not cuda
        self._dtype = source.dtype if dtype is None else dtype
        at_once = _CPU_BYTES if self._device.type == "cpu" else _DEVICE_BYTES
        self.rows = rows or max(1, at_once * max(1, len(source)) // max(1, source.nbytes))

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def tensors(self) -> tuple[Tensor, ...]:
        return self.source.tensors()

    def jvp(self, delta: Tensor) -> Tensor:
        delta = self._check("delta", delta, self.shape[2:])
        out = delta.new_empty((*delta.shape[:-1], *self.shape[:2]))
        for at, part in self.parts():
            out[..., at, :] = part.jvp(delta)
        return out

    def vjp(self, cotangent: Tensor) -> Tensor:
        cotangent = self._check("the cotangent", cotangent, self.shape[:2])
        total = cotangent.new_zeros((*cotangent.shape[:-2], self.shape[2]))
        for at, part in self.parts():
            total += part.vjp(cotangent[..., at, :])
        return total

    def gram(self, other: Jacobian) -> Tensor:
        return torch.cat([part.gram(other) for _, part in self.parts()])

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for _, part in self.parts()])

    def norms(self) -> Tensor:
        return torch.cat([part.norms() for _, part in self.parts()])

    def scaled(self, factors: Tensor) -> StreamedJacobian:
        factors = self._check("factors", factors, self.shape[:1])
        return self._with(self.source, factors if self.factors is None else factors * self.factors)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self._with(self.source.mapped(change), self.factors)

    def to(self, *targets: torch.device | str | torch.dtype) -> Self:
        """Where products are made and in which precision; the rows stay where and as they are."""
        empty = self.source[:0].to(self._device, self._dtype).to(*targets)
        return type(self)(self.source, empty.device, empty.dtype, self.rows, self.factors)

    def __getitem__(self, index: RowIndex) -> Self:
        return self._with(self.source[index], None if self.factors is None else self.factors[index].reshape(-1))

    def _with(self, source: BlockJacobian, factors: Tensor | None) -> Self:
        return type(self)(source, self._device, self._dtype, self.rows, factors)

    def parts(self) -> Iterator[tuple[slice, BlockJacobian]]:
        """Some rows after the other, on the device."""
        spans = [slice(i, min(i + self.rows, len(self))) for i in range(0, max(1, len(self)), self.rows)]
        loaded = map(self._load, spans) if self._device.type != "cuda" else self._ahead(spans)
        for at, part in zip(spans, loaded, strict=True):
            yield at, part if self.factors is None else part.scaled(self.factors[at])

    def _load(self, at: slice) -> BlockJacobian:
        def here(t: Tensor) -> Tensor:
            return t.to(self._device, self._dtype if t.is_floating_point() else t.dtype, non_blocking=True)

        return self.source[at].mapped(here)

    def _ahead(self, spans: list[slice]) -> Iterator[BlockJacobian]:
        """Each part on the GPU, the one after it on its way; no more than three are there."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("rows that pass through a GPU are not part of a CUDA graph")
        work, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(work)

        def load(at: slice) -> BlockJacobian:
            with torch.cuda.stream(side):
                return self._load(at)

        ahead, done = load(spans[0]), None
        for following in [*spans[1:], None]:
            work.wait_stream(side)
            part = ahead
            for t in part.tensors():
                t.record_stream(work)
            if following is not None:
                ahead = load(following)
            yield part
            before, done = done, work.record_event()
            if before is not None:
                before.synchronize()


def mapped_file(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """An array in a file of that folder, which goes with it: the name is removed at once."""
    handle, name = tempfile.mkstemp(suffix=".rows", dir=folder)
    os.close(handle)
    try:
        numbers = torch.Size(shape).numel()
        return torch.from_file(name, shared=True, size=numbers, dtype=dtype).view(shape)
    finally:
        os.unlink(name)
