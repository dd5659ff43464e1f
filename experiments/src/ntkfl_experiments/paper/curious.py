"""What a curious server reads off the rows it gets: shuffled ones, and those of projected inputs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ntkfl.audit import projection, reconstruction
from ntkfl.audit.analytic import gaussian_prior, invert
from ntkfl.audit.capture import capture
from ntkfl.audit.measures import ssim
from ntkfl.audit.membership import advantage
from ntkfl.federation.config import DataConfig, RunConfig
from ntkfl.methods import NTKFL
from ntkfl.methods.base import ClientRound, Task
from ntkfl.models import mlp
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from ntkfl_experiments.bench.inputs import fashion

SHUFFLED = 0.9  # sparsity of the rows that the shuffler permutes: the paper sets it “above 80 %–90 %”
PROJECTED = {"name": "ntk-fl", "projected_dim": 100, "subsample_rate": 0.4}  # the paper's d1' and β
PAIRS = 400  # rows whose inputs the server knows from elsewhere


def read_shuffled(key: Mapping[str, Any]) -> dict[str, float]:
    """Rows of many clients as the aggregator has them, permuted: pictures read off them, and records looked up.

    Half of the pictures are sent, the others are not; public statistics come from yet others.
    """
    count = int(key["samples"])
    pictures, labels, _ = fashion(2 * count + 2000)
    x, y, others, public = pictures[:count], labels[:count], pictures[count : 2 * count], pictures[2 * count :]
    torch.manual_seed(key["seed"])
    model = mlp(784, 100, 10)
    method = NTKFL(sparsity=SHUFFLED)
    task = Task(model, 10, "ce")
    answer = method.answer(
        task, Message("weights", 1, {"weights": task.like}), [ClientRound(0, x, y, Randomness.simulated(0))]
    )[0]
    J = method.read_rows(task, Message.decode(answer.encode())).J
    order = torch.randperm(count, generator=torch.Generator().manual_seed(key["seed"]))
    prior = gaussian_prior(public)
    began = time.perf_counter()
    found, plain = invert(model, J[order], prior), invert(model, J, prior)
    seconds = (time.perf_counter() - began) / 2
    assert found is not None
    assert plain is not None
    near = [-torch.cdist(records, found.x).amin(dim=1) for records in (x, others)]
    low, high = pictures.min(), pictures.max()

    def likeness(original: Tensor, drawn: Tensor) -> float:
        return float(
            ssim(*((p.view(-1, 1, 28, 28) - low).div(high - low).clamp(0, 1) for p in (original, drawn))).mean()
        )

    return {
        "samples": count,
        "seconds": seconds,
        "ssim": likeness(x[order], found.x),
        "plain": likeness(x, plain.x),
        "advantage": advantage(near[0], near[1], key["seed"]),
    }


def read_projected(key: Mapping[str, Any]) -> dict[str, float]:
    """Mean SSIM of pictures behind the projected rows of one round, by the server alone, with P, with known inputs."""
    seed = int(key["seed"])
    config = RunConfig(
        rounds=1,
        clients_per_round=key["clients"],
        seed=seed,
        data=DataConfig(dataset="fashion-mnist", clients=300, alpha=0.1),
        method=PROJECTED,
    )
    heard = capture(config, 1)
    seen = projection.attack(heard, seed, pairs=(0, PAIRS))[-1].details
    helped = next(f for f in reconstruction.analytic(heard, seed, count=50) if f.measure == "SSIM")
    return {
        "rows": len(heard.rows_truth()[1]),
        "dimensions": PROJECTED["projected_dim"],
        "alone": seen["SSIM, 0 pairs"],
        "known": seen[f"SSIM, {PAIRS} pairs"],
        "guess": seen["SSIM of a guess"],
        "with P": helped.mean,
        "guess beside P": helped.guess,
    }
