"""CP-NTK-FL: NTK-FL made communication-efficient and privacy-preserving. Yue et al., ICML 2022, section 3.3.

Each client subsamples its data, projects them with a secret matrix, sends the largest entries of its Jacobians alone,
and sends them sealed, through a shuffler. A preset: every stage is an option of `ntk-fl`, and of any method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from ntkfl.methods.ntk_fl import NTKFL


class CPNTKFL(NTKFL):
    """The paper's d1' = 200 and β = 0.3. `codec="factored"` sends, in effect, the projected inputs themselves.

    What the paper leaves open, and the network's first layer (`model_defaults`), was chosen on held-out clients so that
    little is lost by projecting and sparsifying: docs/results.md.
    """

    name: ClassVar[str] = "cp-ntk-fl"
    prior: ClassVar[float] = 0.5
    # A first layer whose units are on for few inputs: Jacobians with fewer entries that matter.
    model_defaults: ClassVar[Mapping[str, float]] = {"gain": 0.7, "bias": -1.0}

    subsample_rate: float = Field(0.3, gt=0, le=1, description="β, part of its samples a client uses in a round")
    projected_dim: int | None = Field(200, ge=1, description="d1', features the secret projection leaves")
    projection: str = Field("smooth", description="gaussian (the paper), orthonormal, or smooth (images)")
    label_smoothing: float = Field(0.2, ge=0, lt=1, description="part of a class label spread over all")
    sparsity: float = Field(0.97, ge=0, lt=1, description="part of a Jacobian's smallest values that is left out")
    values: str = Field("8bit", description="how the values kept travel: float32, float16 or 8bit")
    shuffle: bool = Field(True, description="send rows sealed and in random order through a shuffler")

    @model_validator(mode="before")
    @classmethod
    def _codec_decides(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Who asks for the whole Jacobian in some form asks for no sparsification."""
        out = dict(values)
        if out.get("codec") in ("factored", "dense"):
            out.setdefault("sparsity", 0.0)
        return out
