"""The stages as options of any method; the default of each switches it off."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import ConfigDict, Field

from ntkfl.errors import ConfigError, unknown
from ntkfl.options import Options
from ntkfl.privacy.projection import KINDS, Projection, RunSecret, make_projection


class Stages(Options):
    """What clients do to hide, before anything leaves them."""

    # Schemas are built when they are first used: a run needs that of one method, and there are thirty.
    model_config = ConfigDict(defer_build=True)

    subsample_rate: float = Field(1.0, gt=0, le=1, description="β, part of its samples a client uses in a round")
    projected_dim: int | None = Field(
        None, ge=1, description="d1', features the secret projection leaves; default: none"
    )
    projection: str = Field("gaussian", description="gaussian (the paper), orthonormal, or smooth (images)")
    shuffle: bool = Field(False, description="send replies sealed and in random order through a shuffler")
    secure_sum: bool = Field(
        False,
        description="send replies masked, so that the server learns their sum alone: for methods that need no more",
    )
    sum_samples: int = Field(
        1000, ge=1, lt=1 << 31, description="secure sums: samples that one client counts for, at most"
    )

    def model_post_init(self, _: object) -> None:
        if self.projection not in KINDS:
            raise unknown("projection", self.projection, KINDS)
        if self.secure_sum and self.shuffle:
            raise ConfigError("a secure sum shows no rows that could be shuffled: leave out shuffle or secure_sum")

    def make_projection(self, secret: RunSecret, input_shape: Sequence[int]) -> Projection | None:
        """The run's projection, if there is one."""
        if self.projected_dim is None:
            return None
        return make_projection(secret, input_shape, self.projected_dim, self.projection)

    def model_input_shape(self, input_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one input as the network gets it."""
        if self.projected_dim is None:
            return tuple(input_shape)
        if self.projected_dim >= math.prod(input_shape):
            raise ConfigError(
                f"projected_dim must be below the {math.prod(input_shape)} features there are, got {self.projected_dim}"
            )
        return (self.projected_dim,)
