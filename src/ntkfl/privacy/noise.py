"""Clipping with Gaussian noise, and randomised response for labels: what differential privacy is made of here.

A row of NTK-FL is (Jacobian, outputs, label) of one sample, and later its candidate losses: all of it functions of the
sample (z, y) and of weights everybody knows. So the noise goes on the sample, before anything is computed from it:
z̃ = clip(z) + N(0, (noise · clip)²), ỹ by randomised response. Every codec, top-k positions, outputs and losses are then
post-processing of one noisy sample, and cost no privacy of their own. The same noise on the row itself would have to
drown d2·d coordinates instead of d1', and leave labels and losses as they are.

An averaging method's row is a client's whole update: that is clipped and noised as it is (DP-FedAvg, McMahan et al.,
Learning Differentially Private Recurrent Language Models, ICLR 2018), by the client rather than the server. What
either is worth in (ε, δ) is in `accounting.py`.

Gaussians are floating-point numbers from a seeded generator: attacks on the last bits of such noise (Mironov, On
Significance of the Least Significant Bits for Differential Privacy, CCS 2012) are not defended against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntkfl.errors import ConfigError


def clip_rows(rows: Tensor, bound: float) -> Tensor:
    """Each of rows [n, ...] scaled down to a 2-norm of at most `bound`; shorter ones as they are."""
    norms: Tensor = rows.flatten(1).norm(dim=1).view(-1, *[1] * (rows.ndim - 1))
    return rows * (bound / norms.clamp_min(bound))


def noisy_rows(rows: Tensor, clip: float, noise: float, generator: torch.Generator) -> Tensor:
    """clip(rows) + N(0, (noise · clip)²), rows [n, ...]. Drawn on the CPU, so that it is the same on every device."""
    if not rows.is_floating_point():
        raise ConfigError("noise is for real-valued inputs: tokens cannot be clipped")
    clipped = clip_rows(rows, clip)
    if noise == 0:
        return clipped
    drawn = torch.randn(rows.shape, generator=generator, dtype=rows.dtype)
    return clipped + noise * clip * drawn.to(rows.device)


def flip_labels(y: Tensor, classes: int, probability: float, generator: torch.Generator) -> Tensor:
    """Randomised response: each class of y [n] replaced, with `probability`, by one drawn from all `classes`."""
    if probability == 0:
        return y
    if y.is_floating_point():
        raise ConfigError("labels that are numbers rather than classes cannot be flipped: leave noise at 0")
    replaced = torch.rand(len(y), generator=generator) < probability
    drawn = torch.randint(classes, (len(y),), generator=generator)
    return torch.where(replaced.to(y.device), drawn.to(y), y)
