"""A client's own randomness: which samples it uses in a round, and in which order it trains on them."""

from __future__ import annotations

import random
from typing import Protocol

from ntkfl.engine.seeds import derive


class Draws(Protocol):
    """What one client draws in a round."""

    def subsampling(self, round: int) -> random.Random: ...

    def training(self, round: int) -> int: ...


class SystemDraws:
    """From the operating system: nobody else can know, or make, this client's choices."""

    def subsampling(self, round: int) -> random.Random:
        return random.SystemRandom()

    def training(self, round: int) -> int:
        return random.SystemRandom().getrandbits(63)


class SeededDraws:
    """From a root seed and the client's number: repeats, and is no secret. How simulations draw."""

    def __init__(self, seed: int, client: int) -> None:
        self.seed, self.client = seed, client

    def subsampling(self, round: int) -> random.Random:
        return random.Random(derive(self.seed, "subsample", self.client, round))

    def training(self, round: int) -> int:
        return derive(self.seed, "client", self.client, round)
