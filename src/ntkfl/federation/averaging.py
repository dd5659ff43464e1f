"""The running average of the weights a run goes through: reported and saved, never what training goes on from."""

from __future__ import annotations

from torch import Tensor


class RunningAverage:
    """w̄ ← e w̄ + (1−e) w with e = min(cap, n/(n+5)) for the n-th weights, from 0: the first count whole, all fade."""

    def __init__(self, start: Tensor, cap: float) -> None:
        self.value, self.cap, self.count = start.clone(), cap, 0

    def add(self, weights: Tensor) -> None:
        e = min(self.cap, self.count / (self.count + 5))
        self.value = e * self.value + (1 - e) * weights
        self.count += 1
