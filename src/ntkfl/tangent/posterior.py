"""The posterior of a last linear layer, from the sums that trained it: how sure its outputs are.

Squared error. With prior W ~ N(0, Σ / (nλs)) and noise of covariance Σ [d2, d2], ridge regression is the posterior
mean, and with S, s and m of `ridge.py` the outputs at features φ are Gaussian around it with covariance

    v(φ) Σ,   v(φ) = 1/n + (φ − m)ᵀ (S + nλs I)⁻¹ (φ − m).

Σ is what the fit leaves over n minus its effective degrees of freedom, 1 + tr S (S + nλs I)⁻¹. It needs Σ Y Yᵀ: for
classes this follows from their counts; of real targets the sums hold its trace, so that outputs share one variance.

Cross-entropy (Laplace). With C ≈ A ⊗ G over N samples (`curvature.py`) and prior precision τ, the weights have
covariance (N A ⊗ G + τ I)⁻¹, and the logits at a = (φ, 1) have

    U_G diag_k(Σ_j (U_Aᵀ a)_j² / (N λ_A,j λ_G,k + τ)) U_Gᵀ.

τ maximises the evidence: ½ d log τ − ½ Σ log(N λ_A λ_G + τ) − ½ τ ‖W‖².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ntkfl.errors import ConfigError, TooFew
from ntkfl.tangent.flow import Eigen
from ntkfl.tangent.ridge import RidgeSums

_PRIORS = torch.logspace(-8, 8, 321, dtype=torch.float64)  # τ to choose from, in units of 1 / mean squared weight
_NUMBERS = 1 << 24  # of pairs of classes that are held at once


@dataclass(frozen=True)
class Prediction:
    """Outputs [N, d2], the standard deviation of each [N, d2] under the posterior; for classes their `probabilities`
    [N, d2], for real targets `noise` [d2], the standard deviation of targets around the outputs.
    """

    outputs: Tensor
    std: Tensor
    probabilities: Tensor | None = None
    noise: Tensor | None = None


class HeadPosterior(Protocol):
    """How sure a last layer is, given what it was fitted to."""

    def predict(self, features: Tensor, outputs: Tensor) -> Prediction:
        """For the layer's inputs [N, F] and its outputs [N, d2]; in float64."""


class RidgePosterior:
    """Of ridge regression from `sums` at λ = `penalty`, whose solution is `weights` [p, d2]; targets were smoothed by
    `smoothing` where they are classes. With `project` [F, k], sums are of φ P.
    """

    def __init__(
        self,
        sums: RidgeSums,
        penalty: float,
        weights: Tensor,
        smoothing: float = 0.0,
        project: Tensor | None = None,
    ) -> None:
        n, d2 = float(sums.samples), weights.shape[1]
        self.project, self.samples, self.mean = project, n, sums.gram[-1, :-1] / sums.samples
        S = sums.gram[:-1, :-1] - sums.samples * torch.outer(self.mean, self.mean)
        regular = S + penalty * S.diagonal().mean() * torch.eye(len(S), dtype=S.dtype)
        self._factor, failed = torch.linalg.cholesky_ex(regular)
        if int(failed):
            raise ConfigError("some features never vary together with λ = 0: give a penalty above 0 for a posterior")
        degrees = 1 + float(torch.cholesky_solve(S, self._factor).diagonal().sum())
        if n <= degrees + 1:
            raise TooFew(f"{n:g} samples for {degrees:.1f} degrees of freedom leave no estimate of the noise")
        moments = _class_moments(sums, smoothing)
        if moments is None:
            self.noise = torch.eye(d2, dtype=S.dtype) * (sums.error(weights) / (d2 * (n - degrees))).clamp(min=0)
        else:
            fitted = weights.mT @ sums.cross
            self.noise = (moments - fitted - fitted.mT + weights.mT @ sums.gram @ weights) / (n - degrees)
        self._classes = None if moments is None else _Discriminant(sums, weights, smoothing, self.noise)

    def variance(self, features: Tensor) -> Tensor:
        """v(φ), [N]."""
        known = features.detach().double().cpu()
        off = (known if self.project is None else known @ self.project) - self.mean
        solved: Tensor = torch.linalg.solve_triangular(self._factor, off.mT, upper=False)
        return 1 / self.samples + solved.square().sum(0)

    def predict(self, features: Tensor, outputs: Tensor) -> Prediction:
        f, v = outputs.detach().double().cpu(), self.variance(features)
        spread = self.noise.diagonal().clamp(min=0)
        std = (v.unsqueeze(1) * spread).sqrt()
        if self._classes is None:
            return Prediction(f, std, noise=spread.sqrt())
        return Prediction(f, std, probabilities=self._classes.probabilities(f, v))


class _Discriminant:
    """Class probabilities of scores f: π_k N(f; f̄_k, Σ_f + v Σ), with the classes' mean scores f̄ and their covariance
    within classes Σ_f, both of the sums. For λ = 0 and v = 0 this is linear discriminant analysis of the features.
    """

    def __init__(self, sums: RidgeSums, weights: Tensor, smoothing: float, noise: Tensor) -> None:
        counts, by_class = _class_sums(sums, smoothing)
        self.prior = counts / counts.sum()
        means = (weights.mT @ by_class / counts.clamp(min=1e-12)).mT  # f̄ [k, d2]
        spread = weights.mT @ sums.gram @ weights - (means.mT * counts) @ means
        # Scores add up to 1: the last one says nothing.
        within = spread[:-1, :-1] / max(float(sums.samples) - len(counts), 1.0)
        values, vectors = torch.linalg.eigh(within)
        white = vectors / values.clamp(min=1e-12 * float(values.max())).sqrt()
        self._extra, rotation = torch.linalg.eigh(white.mT @ noise[:-1, :-1] @ white)
        self._basis = white @ rotation  # within → I, noise → diag(extra)
        self._means = means[:, :-1] @ self._basis

    def probabilities(self, f: Tensor, v: Tensor) -> Tensor:
        z = f[:, :-1] @ self._basis
        precision = 1 / (1 + v.unsqueeze(1) * self._extra.clamp(min=0))
        far: Tensor = (z.unsqueeze(1) - self._means).square() @ precision.unsqueeze(2)
        scores: Tensor = self.prior.log() - 0.5 * far.squeeze(2)
        return scores.softmax(1)


def _class_sums(sums: RidgeSums, smoothing: float) -> tuple[Tensor, Tensor]:
    """Counts [k] and Σ a over each class [p, k], of smoothed one-hot targets."""
    share = smoothing / sums.cross.shape[1]
    by_class = (sums.cross - share * sums.gram[:, -1:]) / (1 - smoothing)
    return by_class[-1].clamp(min=0), by_class


def _class_moments(sums: RidgeSums, smoothing: float) -> Tensor | None:
    """Σ Y Yᵀ [d2, d2] where targets are classes, which their sums tell: Σ Y is n in all, and so is what follows for
    Σ ‖Y‖². Else None.
    """
    d2, n = sums.cross.shape[1], float(sums.samples)
    keep, share = 1 - smoothing, smoothing / d2
    expected = n * (keep**2 + 2 * keep * share + d2 * share**2)
    same = math.isclose(float(sums.cross[-1].sum()), n, rel_tol=1e-5)
    if d2 < 2 or not same or not math.isclose(float(sums.squares), expected, rel_tol=1e-5):
        return None
    counts, _ = _class_sums(sums, smoothing)
    mixed = counts.unsqueeze(1) + counts
    return keep**2 * torch.diag(counts) + keep * share * mixed + n * share**2


class FactoredPosterior:
    """Of logits, from the spectra of A and G (means over samples) and the layer's `weights` [d2, p] with the bias last.

    `samples` is N; `prior` is τ, by default that of largest evidence.
    """

    def __init__(self, A: Eigen, G: Eigen, samples: float, weights: Tensor, prior: float | None = None) -> None:
        self._A, self._G = (Eigen(e.values[0].double().cpu(), _vectors(e)) for e in (A, G))
        self._rates = samples * self._A.values.unsqueeze(1) * self._G.values  # [p, d2]
        self.prior = prior if prior is not None else _evidence_prior(self._rates, weights.double().cpu())

    def covariance(self, features: Tensor) -> Tensor:
        """Of the logits, [N, d2, d2]. Along what moves all logits alike it is the prior's: no label tells it."""
        known = features.detach().double().cpu()
        a = torch.cat([known, known.new_ones(len(known), 1)], dim=1)
        rotated = a if self._A.vectors is None else a @ self._A.vectors
        spread = rotated.square() @ (1 / (self._rates + self.prior))  # [N, k]
        if self._G.vectors is None:
            return torch.diag_embed(spread)
        return (self._G.vectors * spread.unsqueeze(1)) @ self._G.vectors.mT

    def predict(self, features: Tensor, outputs: Tensor) -> Prediction:
        f, classes = outputs.detach().double().cpu(), outputs.shape[1]
        rows = max(1, _NUMBERS // classes**2)
        std, found = torch.empty_like(f), torch.empty_like(f)
        for at in range(0, len(f), rows):
            part, own = slice(at, at + rows), self.covariance(features[at : at + rows])
            # What all logits share tells no class: their deviation is that from their mean.
            middle = own - own.mean(1, keepdim=True) - own.mean(2, keepdim=True) + own.mean((1, 2), keepdim=True)
            std[part] = middle.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
            found[part] = mean_field(f[part], own)
        return Prediction(f, std, probabilities=found)


def mean_field(f: Tensor, covariance: Tensor) -> Tensor:
    """E softmax of logits f [N, d2] with covariance [N, d2, d2], approximately (Lu, Ie & Sha 2020):

    1/p_k = Σ_j exp(−(f_k − f_j)/√(1 + π/8 v_kj)), v_kj the variance of f_k − f_j, brought to sum 1. For two classes it
    is MacKay's probit formula.
    """
    own = covariance.diagonal(dim1=1, dim2=2)
    v = (own.unsqueeze(2) + own.unsqueeze(1) - 2 * covariance).clamp(min=0)
    gap = (f.unsqueeze(2) - f.unsqueeze(1)) / (1 + math.pi / 8 * v).sqrt()
    return (-(-gap).logsumexp(2)).softmax(1)


def _vectors(e: Eigen) -> Tensor | None:
    return None if e.vectors is None else e.vectors[0].double().cpu()


def _evidence_prior(rates: Tensor, weights: Tensor) -> float:
    squared = float(weights.square().sum())
    if squared == 0:
        raise TooFew("a head of zeros says nothing of its prior: it has not been trained yet")
    candidates: list[float] = (_PRIORS * weights.numel() / squared).tolist()
    return max(candidates, key=lambda tau: -0.5 * float(torch.log1p(rates / tau).sum()) - 0.5 * tau * squared)
