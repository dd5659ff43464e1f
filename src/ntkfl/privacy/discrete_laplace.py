"""Discrete Laplace noise (the two-sided geometric distribution) on integers, exactly: P(x) ∝ exp(−|x| / scale).

Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy (NeurIPS 2020), algorithms 1 and 2: whole
numbers and fractions alone, so no bit of a floating-point number can give the value away. A sum of integers that one
record changes by at most Δ, with noise of scale Δ/ε, is ε-differentially private in that record.
"""

from __future__ import annotations

from fractions import Fraction
from random import Random, SystemRandom

_SYSTEM = SystemRandom()  # the operating system's


def discrete_laplace(scale: Fraction, random: Random = _SYSTEM) -> int:
    """One draw; its variance is about 2·scale²."""
    t, s = scale.numerator, scale.denominator
    while True:
        u = random.randrange(t)
        if not _bernoulli_exp(Fraction(u, t), random):
            continue
        v = 0
        while _bernoulli_exp(Fraction(1), random):
            v += 1
        x = (u + t * v) // s
        negative = random.randrange(2)
        if x or not negative:  # zero has no sign: taking −0 too would make it twice as likely
            return -x if negative else x


def _bernoulli_exp(gamma: Fraction, random: Random) -> bool:
    """True with probability exp(−γ), 0 ≤ γ ≤ 1: the alternating series of the exponential, term by term."""
    k = 1
    while random.randrange(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1
