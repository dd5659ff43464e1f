"""Running statistics of batch normalisation: what local training changes beside weights, and updates carry.

Methods whose clients train locally broadcast and average them. NTK-FL evolves weights alone: there they stay.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

STATISTICS = "statistics"


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Running means and variances of the model's batch normalisations by name, but for those of a frozen backbone."""
    owners = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, _BatchNorm) and m.track_running_stats and not getattr(m, "statistics_stay", False)
    }
    kinds = ("running_mean", "running_var")
    return {f"{name}.{kind}" if name else kind: getattr(m, kind) for name, m in owners.items() for kind in kinds}


def flat_statistics(model: nn.Module) -> Tensor | None:
    """All of them as one vector [b]; None for a network without any."""
    values = list(statistics(model).values())
    return torch.cat([v.detach().reshape(-1) for v in values]) if values else None


def load_statistics(model: nn.Module, vector: Tensor) -> None:
    """Write a vector [b] into the model's own, in place."""
    own = statistics(model)
    parts = torch.split(vector, [v.numel() for v in own.values()])
    for value, part in zip(own.values(), parts, strict=True):
        value.copy_(part.view_as(value))
