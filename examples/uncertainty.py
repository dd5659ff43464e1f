"""How sure a head is of its outputs: the posterior of ridge regression, from the clients' sums alone.

With features φ, their mean m and scatter S over n samples, outputs are Gaussian with variance v(φ) σ² around the
head's, v(φ) = 1/n + (φ − m)ᵀ (S + nλs)⁻¹ (φ − m); a new target has σ² more. σ² is what the fit leaves over n minus its
degrees of freedom, 1 + tr S (S + nλs)⁻¹.
"""

from statistics import NormalDist

import torch

from ntkfl.tangent.ridge import RidgeSums, solve, total

FEATURES, CLIENTS, PENALTY = 20, 5, 1e-3

generator = torch.Generator().manual_seed(0)
effects = torch.randn(FEATURES, 1, generator=generator)


def measure(count: int, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """What one site measured: targets follow the features, up to noise of deviation 0.5."""
    x = torch.randn(count, FEATURES, generator=generator) + shift
    return x, x @ effects + 0.5 * torch.randn(count, 1, generator=generator)


sums = total([RidgeSums.of(*measure(30, shift)) for shift in torch.linspace(-1, 1, CLIENTS).tolist()])
head, n = solve(sums, PENALTY), float(sums.samples)

mean = sums.gram[-1, :-1] / n
scatter = sums.gram[:-1, :-1] - n * torch.outer(mean, mean)
precision = scatter + PENALTY * scatter.diagonal().mean() * torch.eye(FEATURES, dtype=torch.float64)
degrees = 1 + float(torch.linalg.solve(precision, scatter).trace())
noise = float(sums.error(head)) / (n - degrees)  # σ²
print(f"noise of deviation {noise**0.5:.2f} from {n:.0f} samples, {degrees:.1f} degrees of freedom")

for shift in (0.0, 3.0):
    x, y = measure(2000, shift)
    away = x.double() - mean
    v = 1 / n + (away * torch.linalg.solve(precision, away.mT).mT).sum(1)
    std = (noise * (1 + v)).sqrt()
    far = (y[:, 0] - (x.double() @ head[:-1] + head[-1])[:, 0]).abs() / std
    held = {level: float((far <= NormalDist().inv_cdf(0.5 + level / 2)).double().mean()) for level in (0.5, 0.9)}
    print(
        f"{shift:g} away from the data: deviation {std.mean():.2f}, "
        + ", ".join(f"{level:.0%} intervals hold {part:.1%}" for level, part in held.items())
    )
