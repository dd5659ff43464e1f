"""Clipping with Gaussian noise: what differential privacy of averaging methods is made of.

A client's whole update is clipped and noised (DP-FedAvg, McMahan et al., Learning Differentially Private Recurrent
Language Models, ICLR 2018), by the client rather than the server. What that is worth in (ε, δ) is in `accounting.py`.

Noise that is a floating-point number gives the value under it away by its last bits (Mironov, On Significance of the
Least Significant Bits for Differential Privacy, CCS 2012). So a noisy number is rounded to a multiple of a grain, a
power of two of at most σ/256, before anything sees it: which multiples can come out does not depend on the value.
Rounding the exact sum would be post-processing. Here the sum is float64, off by at most η = 4e-15 (clip + 10 σ), and
the probability of a multiple by a factor within 1 ± 2.1 η / grain: at most 5 η / grain more in ε for each number of a
row, which is 2.1e-10 at noise 0.1. That a Gaussian falls on one of 2^64 places, none beyond 9.2 σ, is at most 2^-50
more in total variation for each. How long a draw takes is not hidden.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.privacy.randomness import Randomness

_GRAINS = 8  # σ is at least 2^8 grains: rounding adds less than 2e-6 of the noise's variance


def clip_rows(rows: Tensor, bound: float) -> Tensor:
    """Each of rows [n, ...] scaled down to a 2-norm of at most `bound`; shorter ones as they are.

    One that is not finite becomes zero.
    """
    norms: Tensor = rows.flatten(1).norm(dim=1, dtype=torch.float64).view(-1, *[1] * (rows.ndim - 1))
    factors = torch.where(norms.isfinite(), bound / norms.clamp_min(bound), 0.0)
    return rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * factors.to(rows.dtype)


def noisy_rows(rows: Tensor, clip: float, noise: float, randomness: Randomness) -> Tensor:
    """clip(rows) + N(0, σ²) with σ = noise · clip, rows [n, ...], rounded to multiples of `grain(σ)`.

    In float64 on the CPU, so that it is the same on every device, and only then in the rows' own type.
    """
    if not rows.is_floating_point():
        raise ConfigError("noise is for real-valued inputs: tokens cannot be clipped")
    if noise == 0:
        return clip_rows(rows, clip)
    sigma = noise * clip
    drawn = torch.from_numpy(randomness.gaussians("noise", rows.numel())).view(rows.shape)
    exact = clip_rows(rows.cpu().double(), clip) + sigma * drawn
    step = grain(sigma)
    return ((exact / step).round() * step).to(rows)


def grain(sigma: float) -> float:
    """The power of two in (σ/512, σ/256]: dividing and multiplying by it rounds nothing."""
    return math.ldexp(1.0, math.frexp(sigma)[1] - 1 - _GRAINS)
