"""Attack 3: inputs behind a secret projection, for whoever has z = x P and not P.

Liu, Giannella, Kargupta, An Attacker's View of Distance Preserving Maps for Privacy Preserving Data Mining, PKDD 2006,
know some pairs (x, z) or the data's covariance. Here both, as one estimate: the columns of P are Gaussian with a known
covariance K (identity, or the smoothing that makes a smooth P), so that pairs give the posterior mean of P, and the
inputs' own Gaussian, from a public set, gives x given z and what is still unsure of P. Labels come in the clear, so
class means of rows and of public inputs are pairs that cost nothing: the attack with no known pair is not a blind one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ntkfl.audit.analytic import gaussian_prior
from ntkfl.audit.capture import Capture
from ntkfl.audit.finding import Finding
from ntkfl.audit.inputs import seen_inputs
from ntkfl.audit.measures import guesses, relative_error, ssim
from ntkfl.audit.received import rows_of, sends_rows
from ntkfl.privacy.projection import smooth

PAIRS = (0, 1, 10, 30, 100, 200, 400, 800)
_NEARLY = 0.9  # of the way from a guess to knowing P: the projection is broken


@dataclass(frozen=True)
class Estimate:
    """What is known of P [d1, d1']: its posterior mean, and how unsure a product x P is, var = scale · x unsure xᵀ."""

    mean: Tensor
    unsure: Tensor  # [d1, d1]
    scale: float


@lru_cache(maxsize=4)
def column_covariance(kind: str, shape: tuple[int, ...], columns: int) -> Tensor:
    """K [d1, d1], up to a factor: how entries of a column of P of this kind go together. Kinds are no secret.

    Smoothed Gaussian columns have covariance S Sᵀ, eigenvalues λ. Made orthonormal they span a random subspace, whose
    mean projector has eigenvalues λ/(λ + c), c such that they sum to its dimension.
    """
    eye = np.eye(math.prod(shape))
    if kind != "smooth":
        return torch.from_numpy(eye)
    S = torch.from_numpy(smooth(eye, shape))
    values, vectors = torch.linalg.eigh(S @ S.T)
    values = values.clamp_min(0)
    low, high = 0.0, float(values.sum())
    for _ in range(100):
        c = (low + high) / 2
        low, high = (c, high) if float((values / (values + c)).sum()) > columns else (low, c)
    K: Tensor = vectors @ torch.diag(values / (values + c)) @ vectors.T
    return K


def estimate(x: Tensor, z: Tensor, K: Tensor, scale: float, noise: Tensor) -> Estimate:
    """P from pairs x [m, d1], z [m, d1'], each with `noise` [m], a variance: P̂ = K Xᵀ (X K Xᵀ + noise/scale)⁻¹ Z."""
    KX = K @ x.T
    gain = torch.linalg.solve(x @ KX + torch.diag(noise / scale + 1e-9 * K.diagonal().mean()), KX.T).T
    return Estimate(gain @ z, K - gain @ KX.T, scale)


def invert_with(P: Estimate, z: Tensor, mean: Tensor, covariance: Tensor, noise: float = 0.0) -> Tensor:
    """x [n, d1] given z [n, d1'] with `noise`, a variance: the best linear guess for inputs of these means [n, d1] and
    this covariance, P uncertain.
    """
    second = covariance + mean.T @ mean / len(mean)
    spare = noise + P.scale * float((P.unsure * second).sum())
    gain = covariance @ P.mean
    inner = P.mean.T @ gain
    inner = inner + (spare + 1e-4 * float(inner.diagonal().mean())) * torch.eye(len(inner), dtype=inner.dtype)
    x: Tensor = mean + torch.linalg.solve(inner, (z - mean @ P.mean).T).T @ gain.T
    return x


def attack(capture: Capture, seed: int = 0, *, targets: int = 50, pairs: Sequence[int] = PAIRS) -> list[Finding]:
    """By the aggregator, for rising numbers of known pairs; empty where nothing is projected or rows hold no input.

    A known pair is a row of this round whose input the aggregator has from elsewhere (a record that is public or was
    leaked): for those rows, and to score, the true inputs are read.
    """
    if capture.projection is None or capture.public is None or not sends_rows(capture):
        return []
    rows = rows_of(capture)
    recovered = seen_inputs(capture, rows)
    if recovered is None:
        return []
    z, labels = recovered.x.double(), rows.labels
    known_x = capture.aligned()[2].flatten(1).double()
    public, public_y = capture.public[0].flatten(1).double(), capture.public[1]
    covariance = gaussian_prior(public - guesses((public, public_y), public_y))[1]
    K = column_covariance(capture.method.projection, tuple(capture.raw[0].shape[1:]), z.shape[1])
    sizes = (public @ K * public).sum(1)  # of z², up to the scale of P
    scale = float(z.square().mean() / sizes.mean())

    spread = 0.0

    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))
    target, rest = order[:targets], order[targets:]
    truth = known_x[target]
    guess = guesses((public, public_y), labels[target])
    mean = guess
    knows_P = capture.projection.matrix.double() * capture.projection.scale
    best = invert_with(Estimate(knows_P, torch.zeros_like(K), 0.0), z[target], mean, covariance, spread)

    def errors(found: Tensor) -> Tensor:
        return relative_error(truth, found)

    free = _class_means(z[rest], labels[rest], public, public_y)
    curve, reached = {}, {}
    for count in sorted({min(n, len(rest)) for n in pairs}):
        some = rest[:count]
        x, shown = known_x[some], z[some]
        noise = torch.full((count,), 1e-4 * float(z.square().mean()), dtype=torch.float64)
        noise = torch.cat([noise, free[2] * scale * float(K.diagonal().mean()) + spread / 10])
        P = estimate(torch.cat([x, free[0]]), torch.cat([shown, free[1]]), K, scale, noise)
        reached[count] = invert_with(P, z[target], mean, covariance, spread)
        curve[count] = float(errors(reached[count]).mean())
    chance, floor = float(errors(guess).mean()), float(errors(best).mean())
    broken = next((n for n, e in curve.items() if chance - e >= _NEARLY * (chance - floor)), None)
    details = {
        "kind": capture.method.projection,
        "relative error by known pairs": curve,
        "relative error of one who has P": floor,
        "pairs that break it": broken,
    }
    words = (
        f"{broken} known pairs are as good as P" if broken is not None else f"{max(curve)} known pairs are not enough"
    )
    found = []
    for count in sorted({0, max(curve)}):
        name = "projection, no known pair" if count == 0 else f"projection, {count} known pairs"
        pictures = None
        if capture.pixels is not None:
            original, seen = capture.images(truth.float()), capture.images(reached[count].float())
            details |= {f"SSIM, {count} pairs": float(ssim(original, seen).mean())}
            details |= {"SSIM of a guess": float(ssim(original, capture.images(guess.float())).mean())}
            pictures = (original[:8], seen[:8])
        score = errors(reached[count])
        says = f"Without P, x is had from z to {score.mean():.2f} of its size (a guess: {chance:.2f}); {words}."
        what, measure, values = "the input x behind z, without P", "relative error", tuple(score.tolist())
        found.append(
            Finding(
                name, "aggregator", what, measure, values, chance, 0.0, says, details=dict(details), images=pictures
            )
        )
    return found


def _class_means(z: Tensor, labels: Tensor, public: Tensor, public_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs (public mean input, mean row) of every class there is, and each one's variance: that of the two means."""
    classes = [c for c in sorted(set(labels.tolist())) if int((public_y == c).sum()) > 1]
    if public_y.is_floating_point() or not classes:
        empty = public.new_zeros(0, public.shape[1]), z.new_zeros(0, z.shape[1]), z.new_zeros(0)
        return empty
    x = torch.stack([public[public_y == c].mean(0) for c in classes])
    spread = torch.stack([public[public_y == c].var(0).sum() for c in classes])
    counts = torch.tensor([int((labels == c).sum()) for c in classes], dtype=torch.float64)
    shown = torch.tensor([int((public_y == c).sum()) for c in classes], dtype=torch.float64)
    return x, torch.stack([z[labels == c].mean(0) for c in classes]), spread * (1 / counts + 1 / shown)
