"""A finished run, and how one made from Python describes itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ntkfl.data import Federated
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.methods import Method, State
from ntkfl.tangent.parameters import flatten
from ntkfl.version import __version__


@dataclass(repr=False)
class Run:
    """A run: `history` has a record a round, `model` the weights to use (averaged, where the method averages)."""

    model: nn.Module
    history: list[Record]
    timings: list[Record]
    config: Mapping[str, Any]
    checkpoint: State

    def __repr__(self) -> str:
        """One line: the history has a record per round, and each lists clients."""
        last = self.history[-1] if self.history else {}
        found = [f"{len(self.history)} rounds"]
        for name in ("test_accuracy", "test_loss"):
            if (value := last.get(name)) is not None:
                found.append(f"{name} {value:.4f}")
        return f"Run({self.config['method']['name']}: {', '.join(found)})"

    def save(self, path: Path | str) -> Path:
        """Write the run's folder, as training with `out=path` would have."""
        folder = RunFolder(path)
        with folder.locked():
            folder.create(self.config)
            for record, timing in zip(self.history, self.timings, strict=True):
                folder.append("history.jsonl", record)
                folder.append("timings.jsonl", timing)
            folder.save_checkpoint(len(self.history), self.checkpoint)
            folder.save_model(self.model.state_dict())
        return folder.path


def describe(
    model: nn.Module, fed: Federated, method: Method, clients_per_round: int, seed: int, hold_out: int
) -> dict[str, Any]:
    """Settings of a run made from Python: what identifies model and data, where names cannot."""
    weights = flatten(model).detach().cpu()
    return {
        "ntkfl": __version__,
        "simulation": True,
        "clients_per_round": clients_per_round,
        "seed": seed,
        "hold_out": hold_out,
        "method": {"name": method.name} | method.model_dump(mode="json"),
        "data": fed.describe() | {"fingerprint": fed.fingerprint()},
        "model": {
            "class": type(model).__name__,
            "weights": weights.numel(),
            "start": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        },
    }
