"""The options of NTK-FL from sums, and which of them go together."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from ntkfl.errors import ConfigError
from ntkfl.methods.base import Method
from ntkfl.tangent.curvature import LARGEST

# From zero, the first step of a linear head is the ridge solution; its factored curvature is nearly the true one.
LINEAR_HEAD = {
    "mu": 2.0, "delta": 1e-4, "time": None, "label_smoothing": 0.0, "average": 0.0, "largest": 4096,
    "values": "float32", "step_limit": 0.0,
}  # fmt: skip


class SumOptions(Method):
    """Of `SumNTKFL`, which has the equations."""

    linear_head: bool = Field(
        False,
        description="what trains is a linear head on frozen features: defaults that suit it (μ 2, δ 1e-4, t none, "
        "largest 4096, float32, no averaging, no smoothing, no step_limit, input factors of one cohort)",
    )
    average: float = Field(0.9, ge=0, lt=1, description="running average of the rounds' weights; 0: none")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="part of a class label spread over all; 0 with mse")
    values: str = Field("float16", description="how sums and weights travel: float16 (scaled) or float32")
    time: float | None = Field(200.0, ge=0, description="t, how long the weights flow; none: to the end")
    mu: float = Field(
        12.0,
        gt=0,
        description="μ, by which curvature is multiplied, for what blocks and small cohorts leave out; the least, "
        "where it is measured or a step was taken back",
    )
    delta: float = Field(0.003, ge=0, description="δ, added to all curvature")
    largest: int = Field(LARGEST, ge=1, description="rows of a factor that is sent whole; of larger ones a sketch is")
    step_limit: float = Field(
        1.5,
        ge=0,
        description="how many times the median client's step a client's own may be, and how many times its samples: "
        "what is more is scaled down, against Byzantine clients; 0: nothing is, the default of secure sums, which "
        "show no client's, and of linear heads, whose solution is exact",
    )

    @model_validator(mode="before")
    @classmethod
    def _resolve_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        out = (LINEAR_HEAD if values.get("linear_head") else {}) | dict(values)
        if out.get("secure_sum"):
            out.setdefault("step_limit", 0.0)
        if out.get("loss", "ce") != "ce":
            out.setdefault("label_smoothing", 0.0)
        return out

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.step_limit and self.secure_sum:
            raise ConfigError("step_limit compares clients' sums, of which a secure sum shows none: leave it out")
        if self.values not in ("float16", "float32"):
            raise ConfigError(f"sums travel as float16 or float32, not as {self.values}")
