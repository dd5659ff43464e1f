"""Runs whose numbers are kept, so that a change that is to change no result is seen to change none.

Each file here is one run, and what it came to: `rounds` has test accuracy, test loss, uplink and downlink bytes. The
numbers are of float32 and two threads, and another processor rounds in another way; so a run is also made from weights
that differ by a few roundings, and `loss_bound` is four times the largest relative difference that this made.

`python -m tests.golden [NAME …]` runs the files again and writes what they come to now: for a change that
is meant, and said in its commit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

import ntkfl
from ntkfl.methods import Privacy, Robust
from ntkfl.methods.base import settle
from ntkfl.user_code import find_factory, is_code

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
ROUNDS = 5
Rounds = list[list[float]]  # of each round: test accuracy, test loss, uplink bytes, downlink bytes


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def play(run: dict[str, Any], perturbation: float = 0.0) -> Rounds:
    """The run's rounds, from first weights w (1 ± perturbation) with signs drawn for each."""
    data = ntkfl.data.load(run["dataset"])
    fed = data.partition(ntkfl.data.Dirichlet(clients=run["clients"], alpha=run["alpha"]), seed=run["seed"])
    name = run["method"]
    kind = find_factory(name) if is_code(name) else getattr(ntkfl.methods, name)
    method = kind(**run["options"])
    privacy, robust = settle(method, Privacy(**run.get("privacy", {})), Robust(**run.get("robust", {})))
    torch.manual_seed(run["seed"])
    model = ntkfl.models.mlp(privacy.projected_dim or math.prod(fed.input_shape), *run["hidden"], 10)
    with torch.no_grad():
        for w in model.parameters() if perturbation else ():
            w.mul_(1 + perturbation * (2 * torch.randint(2, w.shape) - 1))
    how = {"rounds": ROUNDS, "clients_per_round": run["clients_per_round"], "seed": run["seed"]}
    how |= {"privacy": privacy, "robust": robust}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        history = ntkfl.train(model, fed, method, **how, callbacks=[]).history
    finally:
        torch.set_num_threads(before)
    shown = ("test_accuracy", "test_loss", "uplink_bytes", "downlink_bytes")
    return [[record[name] for name in shown] for record in history]
