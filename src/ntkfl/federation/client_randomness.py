"""Where a client's randomness comes from: which samples it uses in a round, and all it draws with them."""

from __future__ import annotations

import random
from typing import Protocol

from ntkfl.federation.seeds import derive
from ntkfl.privacy.randomness import Randomness


class Draws(Protocol):
    """What one client draws in a round."""

    def subsampling(self, round: int) -> random.Random: ...

    def randomness(self, round: int) -> Randomness:
        """For all of the round: ask once, and keep it until the round ends."""


class SystemDraws:
    """From the operating system: nobody else can know, or make, this client's choices."""

    def subsampling(self, round: int) -> random.Random:
        return random.SystemRandom()

    def randomness(self, round: int) -> Randomness:
        return Randomness.fresh()


class SeededDraws:
    """From a root seed and the client's number: repeats, and is no secret. How simulations draw."""

    def __init__(self, seed: int, client: int) -> None:
        self.seed, self.client = seed, client

    def subsampling(self, round: int) -> random.Random:
        return random.Random(derive(self.seed, "subsample", self.client, round))

    def randomness(self, round: int) -> Randomness:
        return Randomness.simulated(self.seed, "client", self.client, round)
