"""Rows as they are stored, and the normalisation that turns them into network inputs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hashlib import _Hash


@dataclass(frozen=True, eq=False, repr=False)
class TableRows:
    """Inputs x (uint8 [N, C, H, W], or float32 [N, ...] ready for use) and targets y (int64 [N], or float32 [N, d2]).

    Bytes stay bytes until rows are asked for: float32 would be four times as large, and clients may share rows.
    """

    x: Tensor
    y: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __repr__(self) -> str:
        return f"TableRows(x {list(self.x.shape)}, y {list(self.y.shape)})"

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The rows at `index` (int64 [n]; all rows if None): x float32 [n, ...] normalised, y [n] or [n, d2]."""
        x, y = (self.x, self.y) if index is None else (self.x[index], self.y[index])
        return (x, y) if x.dtype != torch.uint8 else (normalised(x, self.mean, self.std), y)

    def feed(self, digest: _Hash) -> None:
        """Add all that determines `take` to `digest`."""
        for tensor in (self.x, self.y):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.contiguous().numpy().data)
        digest.update(f"{self.mean} {self.std};".encode())


def normalised(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(x/255 − mean)/std as float32, of bytes x [N, C, H, W] and a number for each channel."""
    means, stds = (torch.tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (mean, std))
    return x.to(torch.float32).div_(255).sub_(means).div_(stds)


def new_digest() -> _Hash:
    """The hash behind fingerprints."""
    return hashlib.sha256(b"ntkfl data 1;")
