"""Rows as they are stored, and the normalisation that turns them into network inputs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hashlib import _Hash


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """Inputs x (uint8 [N, C, H, W], or float32 [N, ...] ready for use) and targets y (int64 [N], or float32 [N, d2]).

    Bytes stay bytes until rows are asked for: float32 would be four times as large, and clients may share rows.
    """

    x: Tensor
    y: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __repr__(self) -> str:
        return f"Rows(x {list(self.x.shape)}, y {list(self.y.shape)})"

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor | None = None, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """The rows at `index` (int64 [n]; all rows if None): x float32 [n, ...] normalised, y [n] or [n, d2].

        On `device`, where one is given: bytes go there as bytes, a quarter as many, and become the same numbers there.
        """
        x, y = (self.x, self.y) if index is None else (self.x[index], self.y[index])
        if device is not None:
            x, y = x.to(device), y.to(device)
        return (x, y) if x.dtype != torch.uint8 else (normalised(x, self.mean, self.std), y)

    def feed(self, digest: _Hash) -> None:
        """Add all that determines `take` to `digest`."""
        for tensor in (self.x, self.y):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.contiguous().numpy().data)
        digest.update(f"{self.mean} {self.std};".encode())


def normalised(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(x/255 − mean)/std as float32, of bytes x [N, C, H, W] and a number for each channel."""
    largest, means, stds = _scales(mean, std, x.device)
    return x.to(torch.float32).div_(largest).sub_(means).div_(stds)


@lru_cache(maxsize=8)
def _scales(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """255, mean and std where they are used. Tensors all: a GPU multiplies by the reciprocal of a number that it is to
    divide by, which rounds otherwise.
    """
    by_channel = [torch.tensor(v, dtype=torch.float32, device=device).view(-1, 1, 1) for v in (mean, std)]
    return torch.tensor(255.0, device=device), by_channel[0], by_channel[1]


def new_digest() -> _Hash:
    """The hash behind fingerprints."""
    return hashlib.sha256(b"ntkfl data 1;")
