"""Random features: the kernels they stand for, and one-round ridge on them as AFL and Fed3R write it."""

from __future__ import annotations

import math

import torch
from ntkfl_experiments.rivals.models import RandomFeatures, random_features
from torch import Tensor, nn

from ntkfl.methods import ClientRound, SumRidge, Task
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import play

SIZES, FEATURES, CLASSES = (4, 9, 6, 30, 11), 12, 3  # most clients hold fewer samples than there are features


def clients() -> list[ClientRound]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for i, n in enumerate(SIZES):
        x = torch.randn(n, 5, generator=generator, dtype=torch.float64) + i % 2
        y = torch.randint(0, 1 + i % CLASSES, (n,), generator=generator)
        found.append(ClientRound(i, x, y, Randomness.simulated(i)))
    return found


def model() -> nn.Module:
    return random_features((5,), CLASSES, FEATURES).double()


def rows(client: ClientRound) -> tuple[Tensor, Tensor]:
    """a = (φ, 1) [n, F + 1] and one-hot targets [n, C]."""
    phi = model().backbone(client.x)
    one = torch.ones(len(phi), 1, dtype=phi.dtype)
    return torch.cat([phi, one], 1), nn.functional.one_hot(client.y, CLASSES).to(phi)


def trained(penalty: float) -> Tensor:
    """(W; bᵀ) [F + 1, C] after one round of `sum-ridge` with all clients."""
    task = Task(model(), CLASSES, "mse")
    w = play(SumRidge(penalty=penalty), task, clients())[0].state["weights"]
    return torch.cat([w[: FEATURES * CLASSES].view(CLASSES, FEATURES).mT, w[FEATURES * CLASSES :].unsqueeze(0)])


def test_one_round_is_fed3rs_solution() -> None:
    """Fed3R: (Σ_k Z_kᵀZ_k + λI)⁻¹ Σ_k Z_kᵀY_k, here with sum-ridge's λ, which spares the bias."""
    each = [rows(client) for client in clients()]
    gram, cross = sum(a.mT @ a for a, _ in each), sum(a.mT @ Y for a, Y in each)
    phi = torch.cat([a for a, _ in each])[:, :-1]
    penalty = len(phi) * 0.01 * (phi - phi.mean(0)).square().mean()
    ridge = penalty * torch.eye(FEATURES + 1, dtype=torch.float64)
    ridge[-1, -1] = 0
    torch.testing.assert_close(trained(0.01), torch.linalg.solve(gram + ridge, cross), atol=1e-9, rtol=0)


def test_one_round_is_afls_solution() -> None:
    """AFL's absolute aggregation law: local solutions, regularised by γ so that they exist, merged one after the other;
    what regularisation added is then taken out again. It is the solution of the pooled data, without any λ.
    """
    gamma, eye = 1.0, torch.eye(FEATURES + 1, dtype=torch.float64)
    W, C = torch.zeros(FEATURES + 1, CLASSES).double(), torch.zeros_like(eye)
    for client in clients():
        a, Y = rows(client)
        own = a.mT @ a + gamma * eye
        W_own = torch.linalg.solve(own, a.mT @ Y)
        W, C = torch.linalg.solve(C + own, C @ W + own @ W_own), C + own
    restored = torch.linalg.solve(C - len(SIZES) * gamma * eye, C @ W)
    pooled = [torch.cat(part) for part in zip(*(rows(client) for client in clients()), strict=True)]
    direct = torch.linalg.lstsq(*pooled).solution
    torch.testing.assert_close(restored, direct, atol=1e-7, rtol=0)
    torch.testing.assert_close(trained(0.0), direct, atol=1e-6, rtol=0)


def test_fourier_features_make_the_gaussian_kernel() -> None:
    """2 ⟨φ(x), φ(z)⟩ / F → exp(−scale² ‖x − z‖² / (2 d1)); the error of a mean of F bounded numbers is below 5/√F."""
    F, scale, x = 40_000, 1.3, torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    phi = RandomFeatures(8, F, scale)(x)
    expected = torch.exp(-(scale**2) * torch.cdist(x, x).square() / 16)
    torch.testing.assert_close(2 * phi @ phi.mT / F, expected, atol=2 * 5 / math.sqrt(F), rtol=0)
