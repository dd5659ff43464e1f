"""What is played: a method on one partition and seed, on the test set or on held-out clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.data import Dirichlet, Federated, Shards
from ntkfl.data.partitions import Partition
from ntkfl.federation.config import build_method
from ntkfl.privacy.settings import Privacy

CLIENTS, HELD_OUT = 100, 20
SEEDS, CHOSEN_ON = (20, 21, 22), (10, 11, 12)
WIDTH = 1280
PARTITIONS: dict[str, Partition] = {
    "α = 0.1": Dirichlet(clients=CLIENTS, alpha=0.1),
    "α = 0.01": Dirichlet(clients=CLIENTS, alpha=0.01),
    "one label per client": Shards(clients=CLIENTS, per_client=1),
}


@dataclass(frozen=True)
class HeadTrial:
    """`name` is what the figures call it; seeds and partition are added. `held`: on held-out clients."""

    name: str
    partition: str
    seed: int
    method: dict[str, Any] = field(hash=False)
    rounds: int
    per_round: int
    inputs: str = "last"
    held: bool = False
    privacy: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        place = "held out / " if self.held else ""
        return f"{place}{self.name} / {self.partition} / seed {self.seed}"


class Table:
    """Features of all images. `inputs` are the last 1,280 or `both`, with the 768 inputs of the last block.

    `last` and `both` are standardised with the mean and variance of all clients' features: sums too, 20 kB per client.
    `unit` and `unit both` need nothing of other samples: each of the two parts has mean 0 and one norm in a sample.
    """

    def __init__(self, source: Path) -> None:
        kept = np.load(source)
        self.raw = {part: torch.from_numpy(kept[f"x_{part}"]) for part in ("train", "test")}
        self.y = {part: torch.from_numpy(kept[f"y_{part}"]).long() for part in ("train", "test")}
        self.classes = int(self.y["train"].max()) + 1
        self.about = {name: kept[name].tolist() for name in ("resize", "held_out") if name in kept}
        self._known: dict[str, dict[str, Tensor]] = {}

    def features(self, inputs: str) -> dict[str, Tensor]:
        """By part, float32."""
        if inputs not in self._known:
            width = None if inputs.endswith("both") else WIDTH
            found = {part: x[:, :width].float() for part, x in self.raw.items()}
            if inputs.startswith("unit"):
                found = {part: unit(x) for part, x in found.items()}
            else:
                mean, std = found["train"].mean(0), found["train"].std(0).clamp(min=1e-6)
                found = {part: (x - mean) / std for part, x in found.items()}
            self._known[inputs] = found
        return self._known[inputs]

    def clients(self, partition: str, seed: int, inputs: str = "last") -> Federated:
        x, y = self.features(inputs), self.y
        shares = PARTITIONS[partition].assign(y["train"].numpy(), None, np.random.default_rng(seed))
        pairs = [(x["train"][index], y["train"][index]) for index in map(torch.from_numpy, shares)]
        return ntkfl.data.from_clients(pairs, test=(x["test"], y["test"]), classes=self.classes)

    def split(self, partition: str, seed: int, inputs: str = "last") -> Federated:
        """80 clients, and the samples of 20 others as test set."""
        train, held = self.clients(partition, seed, inputs).hold_out(HELD_OUT, seed=seed)
        batches = [held.client(i) for i in range(len(held))]
        test = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        return ntkfl.data.from_clients([train.client(i) for i in range(len(train))], test=test, classes=self.classes)

    def play(self, trial: HeadTrial, device: str = "cpu") -> dict[str, Any]:
        """Accuracy of every round in percent, and the bytes of a client that sends in the first."""
        make = self.split if trial.held else self.clients
        fed = make(trial.partition, trial.seed, trial.inputs)
        model = nn.Linear(fed.input_shape[0], self.classes)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        per_round = min(trial.per_round, len(fed))
        noise = {"noise_clients": per_round} if "noise_clients" in trial.privacy else {}
        try:
            run = ntkfl.train(
                model,
                fed,
                build_method(trial.method),
                privacy=Privacy(**trial.privacy | noise),
                rounds=trial.rounds,
                clients_per_round=per_round,
                seed=trial.seed,
                device=device,
                callbacks=[],
            )
        except ntkfl.NTKFLError as error:  # a step that is too large
            return {"accuracy": [0.0] * trial.rounds, "diverged": str(error)[:80]}
        first = run.history[0]
        told: dict[str, Any] = {name: first[name] for name in ("penalty", "epsilon") if name in first}
        accuracies = [round(100 * record["test_accuracy"], 2) for record in run.history]
        return {"accuracy": accuracies, "bytes_up": first["uplink_bytes"] // per_round, **told}


def unit(x: Tensor) -> Tensor:
    """Each of the parts (the last features, the last block's inputs) of a sample at mean 0 and one norm; mean square 1
    over both.
    """
    parts = [part - part.mean(1, keepdim=True) for part in (x[:, :WIDTH], x[:, WIDTH:]) if part.shape[1]]
    parts = [part / part.norm(dim=1, keepdim=True) for part in parts]
    return torch.cat(parts, dim=1) * float((x.shape[1] / len(parts)) ** 0.5)
