"""What a server that keeps rows can do with them: projected inputs out of factored uploads, and balanced draws of them.

Beyond the paper, and a different promise to clients: their rows stay with the server. A factored upload gives the first
layer's input, which for a network that begins with a linear layer is the (projected) input itself.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.methods.base import State, Task
from ntkfl.tangent.factored import LinearBlock
from ntkfl.tangent.jacobian import BlockJacobian, Jacobian

INPUTS, LABELS = "replay_inputs", "replay_labels"


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
