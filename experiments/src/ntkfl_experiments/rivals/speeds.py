"""Clients of unequal speed: each draws its local steps once, from `local_steps` to `most_local_steps`.

What FedNova is about: its average does not lean to the fast ones (`configs/fednova.toml`).
"""

from __future__ import annotations

import torch
from pydantic import Field

from ntkfl.errors import ConfigError
from ntkfl.methods import ClientRound
from ntkfl.methods.averaging.fedavg import FedAvg
from ntkfl.methods.averaging.fednova import FedNova
from ntkfl.methods.averaging.fedprox import FedProx
from ntkfl.methods.averaging.local_training import LocalTraining

_SPEED = "local_steps"  # in a client's memory: were it drawn anew each round, clients' work would even out


class Unequal(LocalTraining):
    most_local_steps: int = Field(100, ge=1, description="local steps of the fastest client")

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.local_epochs or self.most_local_steps < self.local_steps:
            raise ConfigError("most_local_steps must be at least local_steps, and excludes local_epochs")

    def steps(self, client: ClientRound) -> int:
        if _SPEED not in client.memory:
            drawn = client.randomness.uniforms("steps", 1) * (self.most_local_steps - self.local_steps + 1)
            client.memory[_SPEED] = self.local_steps + torch.from_numpy(drawn)[0]
        return int(client.memory[_SPEED])


class UnequalFedAvg(Unequal, FedAvg):
    """FedAvg."""


class UnequalFedNova(Unequal, FedNova):
    """FedNova."""


class UnequalFedProx(Unequal, FedProx):
    """FedProx."""
