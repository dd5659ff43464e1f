"""Mean and standard deviation of features from sums over samples, hence over clients.

A client tells n, Σ x and Σ x² of each feature, once. They add up, whoever has which samples:

    mean = Σ x / n,   std = √(Σ x² / n − mean²).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ntkfl.errors import ConfigError, DataError
from ntkfl.options import Options


@dataclass(frozen=True, eq=False)
class Moments:
    """`samples` [] (of images, pixels), `sums` and `squares` [features], in float64."""

    samples: Tensor
    sums: Tensor
    squares: Tensor

    @staticmethod
    def of(x: Tensor) -> Moments:
        """Of inputs [n, F] or [n, T, F] for each feature, of images [n, C, H, W] for each channel."""
        if not x.is_floating_point():
            raise DataError("tokens are names, not sizes: they have no mean to take away")
        rows = x.double().movedim(1, -1) if x.ndim == 4 else x.double()
        flat = rows.reshape(-1, rows.shape[-1])
        return Moments(torch.tensor(float(len(flat)), dtype=torch.float64), flat.sum(0), flat.square().sum(0))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.samples + other.samples, self.sums + other.sums, self.squares + other.squares)

    @property
    def mean(self) -> Tensor:
        """Σ x / n, [features] in float64."""
        return self.sums / self.samples

    @property
    def std(self) -> Tensor:
        """√(Σ x² / n − mean²), [features] in float64; 1 where a feature never varies, as far as sums can tell."""
        variance = self.squares / self.samples - self.mean.square()
        varies = variance > 1e-12 * self.squares / self.samples
        return torch.where(varies, variance.clamp(min=0).sqrt(), 1.0)


class Standardization(Options):
    """Mean and standard deviation of each feature, of images of each channel: what a trained model keeps of `Moments`,
    or `public` numbers, to treat later inputs as those that trained it.
    """

    mean: tuple[float, ...] = Field(min_length=1)
    std: tuple[float, ...] = Field(min_length=1)
    public: bool = Field(False, description="whether no client told anything for it")

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ConfigError("standardization needs a mean and a std, above 0, for each feature")
        return self

    @staticmethod
    def of(moments: Moments) -> Standardization:
        """The mean and std that these sums give."""
        return Standardization(mean=tuple(moments.mean.tolist()), std=tuple(moments.std.tolist()))

    def standardize(self, x: Tensor) -> Tensor:
        """(x − mean) / std, of the shape and type of x."""
        features = x.shape[1] if x.ndim == 4 else x.shape[-1]
        if features != len(self.mean) or not x.is_floating_point():
            raise DataError(
                f"inputs {list(x.shape)} of {x.dtype} cannot be standardised: floats with {len(self.mean)} features "
                "(images: channels) are needed"
            )
        shape = (-1, 1, 1) if x.ndim == 4 else (-1,)
        mean, std = (torch.tensor(v, dtype=torch.float64, device=x.device).view(shape) for v in (self.mean, self.std))
        return ((x.double() - mean) / std).to(x.dtype)
