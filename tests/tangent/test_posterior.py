"""The posterior of a last layer: a direct one in float64, coverage where the truth is known, Monte Carlo."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError, TooFew
from ntkfl.tangent.flow import Eigen
from ntkfl.tangent.posterior import FactoredPosterior, RidgePosterior, mean_field
from ntkfl.tangent.ridge import RidgeSums, solve

F = 6


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def precision(x: Tensor, penalty: float) -> Tensor:
    """Of (W; b) in units of the noise, from the samples themselves: aᵀa + nλs on all but the bias."""
    D = torch.eye(x.shape[1] + 1, dtype=x.dtype)
    D[-1, -1] = 0
    return with_one(x).mT @ with_one(x) + penalty * (x - x.mean(0)).square().sum() / x.shape[1] * D


def posterior(x: Tensor, Y: Tensor, penalty: float, smoothing: float = 0.0) -> RidgePosterior:
    sums = RidgeSums.of(x, Y)
    return RidgePosterior(sums, penalty, solve(sums, penalty), smoothing)


@pytest.mark.parametrize("penalty", [0.0, 1e-3, 1.0])
def test_real_targets_have_the_direct_posterior(penalty: float) -> None:
    x, new = 3 * normal(0, 50, F) + 5, normal(1, 20, F)
    y = normal(2, 50, 1) + x[:, :1]
    found = posterior(x, y, penalty).predict(new, new[:, :1])
    inverse, a = torch.linalg.inv(precision(x, penalty)), with_one(x)
    W = inverse @ a.mT @ y
    degrees = (a @ inverse @ a.mT).diagonal().sum()
    noise = (y - a @ W).square().sum() / (50 - degrees)
    expected = noise * (with_one(new) @ inverse * with_one(new)).sum(1)
    assert found.noise is not None
    torch.testing.assert_close(found.noise.square(), noise.reshape(1), rtol=1e-9, atol=0)
    torch.testing.assert_close(found.std.square(), expected.unsqueeze(1), rtol=1e-9, atol=0)
    assert found.probabilities is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classes_tell_the_whole_covariance(smoothing: float) -> None:
    """Σ of the outputs from sums that hold no Σ Y Yᵀ: that of the residuals themselves."""
    x, y = normal(0, 80, F), torch.randint(0, 3, (80,), generator=generator(1))
    Y = nn.functional.one_hot(y, 3).double() * (1 - smoothing) + smoothing / 3
    inverse, a = torch.linalg.inv(precision(x, 0.01)), with_one(x)
    rest = Y - a @ inverse @ a.mT @ Y
    degrees = (a @ inverse @ a.mT).diagonal().sum()
    torch.testing.assert_close(
        posterior(x, Y, 0.01, smoothing).noise, rest.mT @ rest / (80 - degrees), rtol=1e-9, atol=1e-12
    )


def test_intervals_cover_the_truth() -> None:
    """The weights drawn from the prior, 200 times: intervals of 90 % hold the true output nine times of ten."""
    n, penalty, sigma = 30, 0.05, 0.7
    inside = []
    for seed in range(200):
        x, new = normal(3 * seed, n, F), normal(3 * seed + 1, 50, F)
        scale = float((x - x.mean(0)).square().mean())
        W = normal(3 * seed + 2, F, 1) * sigma / math.sqrt(n * penalty * scale)
        y = x @ W + sigma * normal(1000 + seed, n, 1)
        sums = RidgeSums.of(x, y)
        solved = solve(sums, penalty)
        found = RidgePosterior(sums, penalty, solved).predict(new, with_one(new) @ solved)
        inside.append(((found.outputs - new @ W).abs() <= 1.6449 * found.std).double().mean())
    # Of 200 independent fits with a deviation of at most 0.3 each: 0.021; σ estimated from 24 degrees costs 0.01.
    assert abs(float(torch.stack(inside).mean()) - 0.9) < 0.04


def test_probabilities_are_those_of_gaussian_classes() -> None:
    """Three classes of unequal size and one covariance: the true posterior is known."""
    mixing, means = normal(0, F, F) / 2, 1.2 * normal(1, 3, F)
    prior = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)

    def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
        y = torch.multinomial(prior, n, replacement=True, generator=generator(seed))
        return means[y] + normal(seed + 1, n, F) @ mixing, y

    x, y = draw(4000, 10)
    new, _ = draw(1000, 20)
    sums = RidgeSums.of(x, nn.functional.one_hot(y, 3))
    solved = solve(sums, 1e-9)
    found = RidgePosterior(sums, 1e-9, solved).predict(new, with_one(new) @ solved).probabilities
    assert found is not None
    inverse = torch.linalg.inv(mixing.mT @ mixing)
    off = new.unsqueeze(1) - means
    truth = (prior.log() - 0.5 * (off @ inverse * off).sum(2)).softmax(1)
    assert float((found - truth).abs().mean()) < 0.01
    plain = (with_one(new) @ solved).softmax(1)
    assert float((plain - truth).abs().mean()) > 0.1  # what scores of squared error are not


def test_far_from_the_samples_it_is_less_sure() -> None:
    x, y = normal(0, 60, F), torch.randint(0, 2, (60,), generator=generator(1))
    x[:, 0] += 2 * y
    known = posterior(x, nn.functional.one_hot(y, 2).double(), 0.01)
    directions = normal(2, 30, F)
    near, far = (known.variance(scale * directions) for scale in (1.0, 10.0))
    assert bool((far > near).all())


def test_where_there_is_no_posterior() -> None:
    x = normal(0, 5, F)
    with pytest.raises(TooFew, match="no estimate of the noise"):
        posterior(x, normal(1, 5, 1), 1e-6)
    x = torch.cat([normal(0, 50, F), torch.ones(50, 1, dtype=torch.float64)], 1)
    with pytest.raises(ConfigError, match="penalty above 0"):
        posterior(x, normal(1, 50, 1), 0.0)


def factors(p: int, d2: int) -> tuple[Tensor, Tensor]:
    """A of random inputs with a 1, G of random class probabilities."""
    a = with_one(normal(0, 200, p - 1))
    probabilities = normal(1, 200, d2).softmax(1)
    G = torch.diag_embed(probabilities) - probabilities.unsqueeze(2) * probabilities.unsqueeze(1)
    return a.mT @ a / 200, G.mean(0)


def spectrum(matrix: Tensor) -> Eigen:
    values, vectors = torch.linalg.eigh(matrix)
    return Eigen(values.clamp(min=0).unsqueeze(0), vectors.unsqueeze(0))


def test_logits_have_the_covariance_of_the_kronecker_product() -> None:
    p, d2, N, tau = 5, 3, 40.0, 0.7
    A, G = factors(p, d2)
    known = FactoredPosterior(spectrum(A), spectrum(G), N, torch.ones(d2, p), prior=tau)
    whole = torch.linalg.inv(N * torch.kron(G, A) + tau * torch.eye(p * d2, dtype=torch.float64))
    new = normal(2, 4, p - 1)
    for features, found in zip(with_one(new), known.covariance(new), strict=True):
        J = torch.kron(torch.eye(d2, dtype=torch.float64), features)  # ∂f/∂W, outputs first
        torch.testing.assert_close(found, J @ whole @ J.mT, rtol=1e-9, atol=1e-12)
    # A diagonal factor is one whose vectors are the identity.
    diagonal = FactoredPosterior(Eigen(A.diagonal().unsqueeze(0), None), spectrum(G), N, torch.ones(d2, p), prior=tau)
    same = FactoredPosterior(spectrum(torch.diag(A.diagonal())), spectrum(G), N, torch.ones(d2, p), prior=tau)
    torch.testing.assert_close(diagonal.covariance(new), same.covariance(new))


def test_the_prior_has_the_largest_evidence() -> None:
    """Against a determinant of the whole matrix, on a grid beside it."""
    p, d2, N = 5, 3, 40.0
    A, G = factors(p, d2)
    W = 0.5 * normal(3, d2, p)
    C, d = N * torch.kron(G, A), p * d2

    def evidence(tau: float) -> float:
        whole = C + tau * torch.eye(d, dtype=torch.float64)
        return 0.5 * d * math.log(tau) - 0.5 * float(torch.logdet(whole)) - 0.5 * tau * float(W.square().sum())

    found = FactoredPosterior(spectrum(A), spectrum(G), N, W).prior
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert evidence(found) > evidence(factor * found)
    with pytest.raises(TooFew, match="zeros"):
        FactoredPosterior(spectrum(A), spectrum(G), N, torch.zeros(d2, p))


@pytest.mark.parametrize("classes", [2, 3, 6])
@pytest.mark.parametrize(("size", "mean", "most"), [(0.5, 0.004, 0.02), (1.0, 0.012, 0.06), (2.0, 0.03, 0.2)])
def test_the_mean_field_is_near_monte_carlo(classes: int, size: float, mean: float, most: float) -> None:
    """An approximation: good on average, and in single probabilities while logits vary by about one."""
    f = 2 * normal(0, 50, classes)
    root = size * normal(1, 50, classes, classes) / classes**0.5
    covariance = root @ root.mT
    drawn = f + (root @ normal(2, 4000, 50, classes, 1)).squeeze(3)
    expected = drawn.softmax(2).mean(0)
    found = mean_field(f, covariance)
    torch.testing.assert_close(found.sum(1), torch.ones(50, dtype=torch.float64))
    sampling = 0.5 / 4000**0.5
    error, plain = (found - expected).abs(), (f.softmax(1) - expected).abs()
    assert float(error.mean()) < mean + sampling
    assert float(error.max()) < most + 5 * sampling
    assert float(plain.mean()) > 1.5 * float(error.mean())  # what it makes up for
    shifted = covariance + 50  # the same shift of all logits tells no class
    torch.testing.assert_close(mean_field(f, shifted), found)
