"""What a curious server reads off the rows it gets: shuffled ones, and those of projected inputs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ntkfl.audit.analytic import gaussian_prior, invert
from ntkfl.audit.capture import Capture, capture
from ntkfl.audit.finding import guesses, ssim
from ntkfl.audit.membership import advantage
from ntkfl.audit.rows import inputs, rows_of
from ntkfl.federation.config import DataConfig, RunConfig
from ntkfl.methods.ntk_fl import TangentRows
from ntkfl.methods.task import Task
from ntkfl.models import mlp
from ntkfl.privacy.settings import Privacy
from ntkfl.wire import Message
from ntkfl_experiments.bench.timing import fashion

SHUFFLED = 0.9  # sparsity of the rows that the shuffler permutes: the paper sets it “above 80 %–90 %”
PROJECTED = Privacy(projected_dim=100, subsample_rate=0.4)  # the paper's d1' and β
PAIRS = 400  # rows whose inputs the server knows from elsewhere
TARGETS = 50  # rows that it draws


def read_shuffled(key: Mapping[str, Any]) -> dict[str, float]:
    """Rows of many clients as the aggregator has them, permuted: pictures read off them, and records looked up.

    Half of the pictures are sent, the others are not; public statistics come from yet others.
    """
    count = int(key["samples"])
    pictures, labels, _ = fashion(2 * count + 2000)
    x, y, others, public = pictures[:count], labels[:count], pictures[count : 2 * count], pictures[2 * count :]
    torch.manual_seed(key["seed"])
    model = mlp(784, 100, 10)
    task = Task(model, 10, "ce", privacy=Privacy(sparsity=SHUFFLED))
    sent = TangentRows.of(task, task.like, x, y).message(1).encode()
    J = TangentRows.parse(Message.decode(sent), task).J
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
        pair = ((p.view(-1, 1, 28, 28) - low).div(high - low).clamp(0, 1) for p in (original, drawn))
        return float(ssim(*pair).mean())

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
        method={"name": "ntk-fl"},
        privacy=PROJECTED,
    )
    heard = capture(config, 1)
    helped = next(f for f in inputs(heard, rows_of(heard)) if f.measure == "SSIM")
    return {
        "rows": len(heard.aligned()[1]),
        "dimensions": PROJECTED.projected_dim or 0,
        **_without_P(heard, seed),
        "with P": helped.mean,
        "guess beside P": helped.guess,
    }


def _without_P(heard: Capture, seed: int) -> dict[str, float]:
    """Mean SSIM of pictures that the server draws from z = x P alone, with some known inputs beside, and by the label.

    Liu, Giannella, Kargupta, An Attacker's View of Distance Preserving Maps for Privacy Preserving Data Mining, PKDD
    2006. The columns of P are Gaussian, so that pairs (x, z) give its posterior mean, and the public inputs' own
    Gaussian gives x given z and what is still unsure of P. Class means of rows and of public inputs are pairs that cost
    nothing.
    """
    rows = rows_of(heard)
    recovered = invert(heard.task.at(heard.weights), rows.J)
    assert recovered is not None
    assert heard.public is not None
    z, labels, known = recovered.x.double(), rows.labels, heard.aligned()[2].flatten(1).double()
    public, public_y = heard.public[0].flatten(1).double(), heard.public[1]
    covariance = gaussian_prior(public - guesses((public, public_y), public_y))[1]
    scale = float(z.square().mean() / public.square().sum(1).mean())
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))
    target, rest = order[:TARGETS], order[TARGETS:]
    mean = guesses((public, public_y), labels[target])
    truth = heard.images(known[target].float())
    classes = [c for c in sorted(set(labels[rest].tolist())) if int((public_y == c).sum()) > 1]
    places = [(public_y == c, labels[rest] == c) for c in classes]
    free_x, free_z = (torch.stack(means) for means in zip(*[
        (public[there].mean(0), z[rest][here].mean(0)) for there, here in places
    ], strict=True))  # fmt: skip
    free = torch.stack([public[there].var(0).sum() * (1 / there.sum() + 1 / here.sum()) for there, here in places])

    def likeness(pairs: int) -> float:
        some = rest[:pairs]
        noise = torch.cat([torch.full((len(some),), 1e-4 * float(z.square().mean())), free * scale]).double()
        x, seen = torch.cat([known[some], free_x]), torch.cat([z[some], free_z])
        drawn = _lifted(x, seen, noise / scale, scale, z[target], mean, covariance)
        return float(ssim(truth, heard.images(drawn.float())).mean())

    return {"alone": likeness(0), "known": likeness(PAIRS),
            "guess": float(ssim(truth, heard.images(mean.float())).mean())}  # fmt: skip


def _lifted(
    x: Tensor, seen: Tensor, noise: Tensor, scale: float, z: Tensor, mean: Tensor, covariance: Tensor
) -> Tensor:
    """Inputs [n, d1] behind z [n, d1'], of these means and this covariance, P being had from pairs x [m, d1], seen [m,
    d1'] that each have `noise` [m], a variance: P̂ = Xᵀ (X Xᵀ + noise)⁻¹ Z.
    """
    gain = torch.linalg.solve(x @ x.T + torch.diag(noise + 1e-9), x).T
    P, unsure = gain @ seen, torch.eye(x.shape[1], dtype=x.dtype) - gain @ x
    second = covariance + mean.T @ mean / len(mean)
    spare = scale * float((unsure * second).sum())
    inner = P.T @ covariance @ P
    inner = inner + (spare + 1e-4 * float(inner.diagonal().mean())) * torch.eye(len(inner), dtype=inner.dtype)
    drawn: Tensor = mean + torch.linalg.solve(inner, (z - mean @ P).T).T @ (covariance @ P).T
    return drawn
