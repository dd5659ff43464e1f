"""The network of the paper's analysis and its kernels.

f(v; x) = (1/√n) Σ_r c_r max(v_r·x, 0), with v_r ~ N(0, Σ) trained, c_r = ±1 fixed, inputs of unit length, one output.
Shapes throughout: inputs x [N, d1], first layer v [n, d1], second layer c [n], labels y [N], covariance Σ [d1, d1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ntkfl.errors import DataError


@dataclass(frozen=True)
class TwoLayer:
    """First-layer weights v [n, d1] and signs c [n]."""

    v: Tensor
    c: Tensor

    @property
    def width(self) -> int:
        return len(self.c)

    def outputs(self, x: Tensor) -> Tensor:
        """f(v; x_i): [N]."""
        return torch.relu(x @ self.v.T) @ self.c / math.sqrt(self.width)

    def active(self, x: Tensor) -> Tensor:
        """1{v_r·x_i ≥ 0}: [N, n], in the dtype of x."""
        return (x @ self.v.T >= 0).to(x.dtype)

    def pull_back(self, x: Tensor, r: Tensor) -> Tensor:
        """Jᵀ r = Σ_i r_i ∇_v f(x_i): [n, d1]; row r is (c_r/√n) Σ_i r_i 1_ir x_i."""
        return ((self.active(x) * r.unsqueeze(1)).T @ x) * (self.c / math.sqrt(self.width)).unsqueeze(1)

    def kernel(self, x: Tensor) -> Tensor:
        """H_ij = x_i·x_j (1/n) Σ_r 1_ir 1_jr: [N, N], the empirical tangent kernel."""
        on = self.active(x)
        return (x @ x.T) * (on @ on.T) / self.width

    def moved(self, change: Tensor) -> TwoLayer:
        """The same network at v + change."""
        return replace(self, v=self.v + change)

    def module(self) -> nn.Module:
        """As a PyTorch module [N, d1] -> [N, 1], whose only trainable weight is v."""
        n, d1 = self.v.shape
        hidden, out = nn.Linear(d1, n, bias=False), nn.Linear(n, 1, bias=False)
        with torch.no_grad():
            hidden.weight = nn.Parameter(self.v.clone())
            out.weight = nn.Parameter(self.c.unsqueeze(0) / math.sqrt(n), requires_grad=False)
        return nn.Sequential(hidden, nn.ReLU(), out)


def draw(width: int, inputs: int, seed: int, covariance: Tensor | None = None) -> TwoLayer:
    """Assumption 1: v_r ~ N(0, Σ), Σ = I unless given, and c_r = ±1 with equal probability."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(width, inputs, generator=generator, dtype=torch.float64)
    if covariance is not None:
        v = v @ _root(covariance)
    c = torch.randint(0, 2, (width,), generator=generator).double() * 2 - 1
    return TwoLayer(v, c)


def limit_kernel(x: Tensor, covariance: Tensor | None = None) -> Tensor:
    """H_∞ = E[x_i·x_j 1_i 1_j] for v ~ N(0, Σ), in closed form: [N, N].

    v·x_i and v·x_j are jointly Gaussian with correlation cos θ = x_iᵀΣx_j / √(x_iᵀΣx_i · x_jᵀΣx_j), and two such are
    both positive with probability (π − θ)/2π. So H_∞,ij = x_i·x_j (π − θ_ij)/2π; the diagonal is 1/2.
    """
    check_unit(x)
    across = x @ x.T if covariance is None else x @ covariance @ x.T
    spread = across.diagonal().sqrt()
    cosine = (across / torch.outer(spread, spread)).clamp(-1, 1)
    cosine.fill_diagonal_(1.0)  # arccos turns a rounding error of 1e-16 at 1 into one of 1e-8
    return (x @ x.T) * (math.pi - torch.arccos(cosine)) / (2 * math.pi)


def sampled_kernel(x: Tensor, samples: int, seed: int, covariance: Tensor | None = None) -> Tensor:
    """H_∞ by Monte Carlo over `samples` draws of v: what H is at that width."""
    return draw(samples, x.shape[1], seed, covariance=covariance).kernel(x)


def smallest_eigenvalue(kernel: Tensor) -> float:
    """λ_k when given H_∞."""
    return float(torch.linalg.eigvalsh(kernel)[0])


def spectral_norm(symmetric: Tensor) -> float:
    """‖A‖₂ of a symmetric matrix [N, N]."""
    return float(torch.linalg.eigvalsh(symmetric).abs().max())


def in_span(x: Tensor) -> Tensor:
    """Coordinates z [N, rank] of the inputs in an orthonormal basis Q of their span, x = z Qᵀ.

    Outputs, gradients and kernels depend on v through vᵀQ alone, which is N(0, α²I) where v is: with isotropic weights
    a network on z is the network on x, at N numbers a neuron instead of d1.
    """
    coordinates: Tensor = torch.linalg.qr(x.T, mode="r").R.T.contiguous()
    return coordinates


def unit(x: Tensor) -> Tensor:
    """Assumption 2: rows [N, ...] flattened and divided by their length, in float64."""
    flat = x.flatten(1).double()
    length = flat.norm(dim=1, keepdim=True)
    if not bool((length > 0).all()):
        raise DataError("an input of length 0 cannot be normalised: leave blank pictures out")
    return torch.div(flat, length)


def check_unit(x: Tensor) -> None:
    """The analysis is for inputs of unit length."""
    if not bool(((x.norm(dim=1) - 1).abs() < 1e-6).all()):
        raise DataError("inputs must have length 1: use ntkfl_experiments.theory.unit")


def _root(covariance: Tensor) -> Tensor:
    """A symmetric root of Σ, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = vectors * values.clamp_min(0).sqrt() @ vectors.T
    return root
