"""Replay: a server that keeps rows goes on training on them. Beyond the paper, and a different promise to clients.

A factored upload gives the first layer's input, which for a network that begins with a linear layer is the (projected)
input itself. The server keeps these, and after each round evolves a few times more on class-balanced draws of them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.methods.base import Outcome, State, Task, check_finite
from ntkfl.methods.ntk_upload import NTKUpload
from ntkfl.methods.robust_rows import Gathered
from ntkfl.methods.step_selection import argmin
from ntkfl.tangent import Evolution, Jacobian
from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.jacobian import BlockJacobian

INPUTS, LABELS = "replay_inputs", "replay_labels"


class Replay(NTKUpload):
    """`replayed` is a round's outcome after more evolutions on rows of this and earlier rounds."""

    replay: bool = Field(False, description="the server keeps projected inputs and goes on training on them each round")
    replay_evolutions: int = Field(4, ge=1, description="evolutions on kept inputs after each round's own")
    replay_per_class: int = Field(120, ge=1, description="kept inputs of each class in such an evolution")

    @model_validator(mode="before")
    @classmethod
    def _replay_by_default(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Several steps of a round in the average, and inputs that uploads hold."""
        return {"average": 0.98, "codec": "factored"} | values if values.get("replay") else values

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.replay and self.codec != "factored":
            raise ConfigError("replay needs the inputs, which factored uploads alone hold: codec 'factored'")

    @abstractmethod
    def evolve(self, task: Task, rows: Gathered) -> Evolution:
        """The weights evolved along the kernel of these rows."""

    def replayed(self, task: Task, state: State, round: int, rows: Gathered, outcome: Outcome) -> Outcome:
        """Evolutions linearised anew at the weights each begins from; `state` is the one before the round."""
        if not self.replay:
            return outcome
        kept = remember(state, *recover(task, state["weights"], rows.J, rows.f0, rows.y))
        w, passed = outcome.state["weights"], []
        for step in range(self.replay_evolutions):
            drawn = balanced(kept[LABELS], self.replay_per_class, task.outputs, round, step)
            z, y = kept[INPUTS][drawn], kept[LABELS][drawn]
            evolution = self.evolve(task, Gathered(task.jacobian(w, z), task.predict(w, z), y, torch.zeros_like(y)))
            candidates = w + evolution.deltas()
            losses = task.candidate_losses(candidates, z, y).mean(1)
            passed.append(w)
            w = check_finite(candidates[argmin(losses)].clone(), "the chosen model")
        diagnostics = outcome.diagnostics | {"kept_samples": len(kept[LABELS])}
        after = outcome.state | {"weights": w} | kept
        return Outcome(after, outcome.train_loss, outcome.steps, diagnostics, tuple(passed))


def recover(task: Task, weights: Tensor, J: Jacobian, f0: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs [n, d1'] and labels [n] behind an upload's rows, where the network gives the outputs that came."""
    block = J.blocks[0] if isinstance(J, BlockJacobian) else None
    if not isinstance(block, LinearBlock) or block.T != 1:
        raise ConfigError("replay needs factored uploads of a network that begins with a linear layer")
    z = block.a[:, 0]
    try:
        difference = (task.predict(weights, z) - f0).abs().amax(1)
    except RuntimeError:
        raise ConfigError("replay needs a network whose first linear layer gets the inputs themselves") from None
    true = difference <= 1e-3 * (1 + f0.abs().amax(1))
    if not bool(true.any()):
        raise ConfigError("replay needs a network whose first linear layer gets the inputs themselves")
    return z[true], y[true]


def remember(state: State, z: Tensor, y: Tensor) -> State:
    """All rows so far, as state that a checkpoint keeps."""
    if INPUTS not in state:
        return {INPUTS: z.clone(), LABELS: y.clone()}
    return {INPUTS: torch.cat([state[INPUTS], z]), LABELS: torch.cat([state[LABELS], y])}


def balanced(y: Tensor, per_class: int, outputs: int, *seed: int) -> Tensor:
    """Indices of `per_class` rows of every class there is, repeated where a class has fewer; of as many rows in all
    where targets are real-valued.
    """
    draws = np.random.default_rng(seed)  # the server's own choice among rows it keeps: no secret
    if y.is_floating_point():
        wanted = per_class * outputs
        rows = draws.choice(len(y), wanted, replace=len(y) < wanted)
    else:
        labels = y.cpu().numpy()
        members = [np.flatnonzero(labels == c) for c in np.unique(labels)]
        rows = np.concatenate([draws.choice(m, per_class, replace=len(m) < per_class) for m in members])
    return torch.from_numpy(rows).to(y.device)
