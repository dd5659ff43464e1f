"""The bounds of the paper's analysis, each as printed, and corrected where the print does not follow.

Letters: n width, d1 input size, N samples of the round (N_k), R how far a neuron's weights move at most, α the smallest
standard deviation of v·x (α_k² ≤ λ_min(Σ_k)), δ the probability of failure, λ the smallest eigenvalue of H_∞, η (`lr`)
the learning rate, γ_u ≥ max_i |r_i| at step u. All assume unit inputs, fixed ±1 output weights and one output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FLIP = math.sqrt(2 / math.pi)  # the density of |N(0, 1)| at 0


def flip_probability(radius: float, alpha: float) -> float:
    """P(|v·x| ≤ R) ≤ √(2/π) R/α: a neuron's activation at an input of unit length can be flipped by a move of R."""
    return min(1.0, FLIP * radius / alpha)


# Lemma 1: how many activations can flip.


def flips(n: int, radius: float, alpha: float, delta: float) -> float:
    """Lemma 1 as printed, |S_i| ≤ √(2/π) n R/(δα). By Markov's inequality it holds for each i, not for all at once."""
    return FLIP * n * radius / (delta * alpha)


def flips_everywhere(n: int, radius: float, alpha: float, delta: float, samples: int) -> float:
    """Lemma 1 for all i at once, by a union over N inputs: N times the printed bound."""
    return samples * flips(n, radius, alpha, delta)


def flips_concentrated(n: int, radius: float, alpha: float, delta: float, samples: int) -> float:
    """For all i at once, by Hoeffding: |S_i| is binomial, so |S_i| ≤ n p + √(n ln(N/δ)/2) with p as above."""
    return min(float(n), n * flip_probability(radius, alpha) + math.sqrt(n * math.log(samples / delta) / 2))


# Lemma 2: how far the NTK weights are from those of gradient descent, in ℓ1.


def weight_gap(n: int, d1: int, lr: float, alpha: float, delta: float, gammas: Sequence[float]) -> float:
    """Lemma 2 as printed: √(2 n d1) η/(√π δ α) Σ_{u=1}^{t−1} γ_u; `gammas` are those. The R of Lemma 1 was lost."""
    return weight_gap_within(n, d1, lr, alpha, delta, gammas, radius=1.0)


def weight_gap_within(
    n: int, d1: int, lr: float, alpha: float, delta: float, gammas: Sequence[float], radius: float
) -> float:
    """Lemma 2 with Lemma 1 put in: R times the printed bound. Holds on average over i, so needs no union."""
    return FLIP * math.sqrt(n * d1) * lr * radius / (delta * alpha) * math.fsum(gammas)


def weight_gap_certain(n: int, d1: int, lr: float, gammas: Sequence[float]) -> float:
    """What holds without any probability, since |S_i| ≤ n: √(n d1) η Σ γ_u; below the printed one if δα ≤ √(2/π)."""
    return math.sqrt(n * d1) * lr * math.fsum(gammas)


def weight_gap_explicit(d1: int, lr: float, alpha: float, delta: float, gammas: Sequence[float], first: float) -> float:
    """Lemma 2 with R ≤ (η/√n) Σ_{u=0}^{t−1} γ_u put in, `first` being γ_0: √(2 d1/π) η²/(δα) Σ_{u≥1} γ Σ_{u≥0} γ.

    The width has gone: the gap does not grow like √n, as the printed bound does.
    """
    later = math.fsum(gammas)
    return FLIP * math.sqrt(d1) * lr**2 / (delta * alpha) * later * (first + later)


def residual_gap(n: int, d1: int, lr: float, differences: Sequence[float]) -> float:
    """What Lemma 2 leaves out, that both descents have their own residuals: at most η √(n d1) Σ_u mean_i |r − r̃|_i."""
    return math.sqrt(n * d1) * lr * math.fsum(differences)


def reach(n: int, lr: float, mean_residuals: Sequence[float]) -> float:
    """How far a neuron can get: R ≤ (η/√n) Σ_{u=0}^{t−1} mean_i |r_i(u)|, with certainty."""
    return lr / math.sqrt(n) * math.fsum(mean_residuals)


# Lemma 3: how far the kernel drifts.


def kernel_drift(samples: int, radius: float, alpha: float, delta: float) -> float:
    """Lemma 3 as printed: ‖H(t) − H‖₂ ≤ 2√2 N R/(√π δ α). Its proof applies Markov to every (i, j, r) at once."""
    return 2 * FLIP * samples * radius / (delta * alpha)


def kernel_drift_summed(samples: int, radius: float, alpha: float, delta: float) -> float:
    """Lemma 3 by Markov on Σ_ij |H(t) − H|_ij, whose mean is at most 2√(2/π) N² R/α: N times the printed bound."""
    return samples * kernel_drift(samples, radius, alpha, delta)


def kernel_drift_moment(n: int, samples: int, radius: float, alpha: float, delta: float) -> float:
    """Lemma 3 by the second moment: ‖H(t) − H‖_F ≤ N √((p² + p/n)/δ), p = 2√(2/π) R/α.

    |H(t) − H|_ij ≤ (1/n) Σ_r 1{A_ir ∪ A_jr}, a mean of n independent 0/1 variables of mean at most p, so its square has
    mean at most p² + p/n. At most the printed bound once n p ≥ δ/(1 − δ), so there the printed one is right after all.
    """
    p = min(1.0, 2 * FLIP * radius / alpha)
    return samples * math.sqrt((p**2 + p / n) / delta)


# Lemma 4: how far the kernel of n neurons is from that of infinitely many.


def kernel_deviation(n: int, samples: int, delta: float) -> float:
    """Lemma 4 as printed, and right: ‖H − H_∞‖₂ ≤ N √(ln(2N²/δ)/(2n)).

    Each summand lies between 0 and x_i·x_j, so its range is at most 1 (the printed [−1, 1] would double the bound).
    """
    return samples * math.sqrt(math.log(2 * samples**2 / delta) / (2 * n))


def kernel_deviation_gram(n: int, gram_norm: float, samples: int, delta: float) -> float:
    """Sharper: the range of entry ij is |x_i·x_j|, and N(N+1)/2 entries differ: ‖X Xᵀ‖_F √(ln(N(N+1)/δ)/(2n))."""
    return gram_norm * math.sqrt(math.log(samples * (samples + 1) / delta) / (2 * n))
