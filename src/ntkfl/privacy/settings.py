"""What clients do to hide, beside whatever method: the section `[privacy]` of a configuration. Its defaults do nothing.

`ntkfl.train(model, data, method, privacy=Privacy(secure_sum=True))`. Which kinds of reply a setting is for is checked
in one place, `settle` in `methods/base.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ntkfl.errors import ConfigError
from ntkfl.options import Options
from ntkfl.privacy.projection import Projection, RunSecret, make_projection

_MOST = 1_000_000  # clients, rounds: a server's terms name them, and tables are as long
SUM_LIMIT = 10.0  # secure sums: the largest number of an update, or of one sample's share of a sum


class Privacy(Options, title="[privacy]"):
    """Subsampling, projection, sparse rows, shuffling, secure sums, noise."""

    subsample_rate: float = Field(1.0, gt=0, le=1, description="β, part of its samples a client uses in a round")
    projected_dim: int | None = Field(None, ge=1, description="d1', features of the secret projection; default: none")
    projection: Literal["gaussian", "smooth"] = Field("gaussian", description="gaussian (the paper) or smooth (images)")
    sparsity: float = Field(0.0, ge=0, lt=1, description="rows: part of a Jacobian's smallest values left out")
    values: Literal["float32", "8bit"] = Field("float32", description="rows: how the values kept travel")
    shuffle: bool = Field(False, description="send replies sealed and in random order through a shuffler")
    secure_sum: bool = Field(False, description="send replies masked, so that the server learns their sum alone")
    sum_samples: int = Field(1000, ge=1, lt=1 << 31, description="secure sums: samples a client counts for, at most")

    epsilon: float | None = Field(
        None, gt=0, description="ε over all rounds, of methods that add noise; none: no noise"
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="δ")
    budget_rounds: int = Field(20, ge=1, le=_MOST, description="rounds that ε is for; later ones are refused")
    noise_clients: int = Field(
        1, ge=1, le=_MOST, description="clients per round whose noise ε counts on; fewer: the round fails"
    )
    sampling_rate: float = Field(1.0, gt=0, le=1, description="chance that a round draws a given client; 1: no credit")

    def model_post_init(self, _: object) -> None:
        if self.secure_sum and self.shuffle:
            raise ConfigError("a secure sum shows no rows that could be shuffled: leave out shuffle or secure_sum")

    def make_projection(self, secret: RunSecret, input_shape: Sequence[int]) -> Projection | None:
        """The run's projection; None without one."""
        if self.projected_dim is None:
            return None
        return make_projection(secret, input_shape, self.projected_dim, self.projection)

    def model_input_shape(self, input_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one input as the network gets it."""
        if self.projected_dim is None:
            return tuple(input_shape)
        if self.projected_dim >= (features := math.prod(input_shape)):
            raise ConfigError(
                f"projected_dim must be below the {features} features there are, got {self.projected_dim}"
            )
        return (self.projected_dim,)

    @property
    def sealed(self) -> bool:
        """Whether replies go through a shuffler, as rows or as masked vectors."""
        return self.shuffle or self.secure_sum

    @property
    def noisy(self) -> bool:
        """Whether clients add noise to what they send."""
        return self.epsilon is not None
