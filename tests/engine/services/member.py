"""A client as a process: `python member.py FOLDER DATA [SEED INDEX]`. With a seed it draws as a simulation's client."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from ntkfl.data.npz import read_client
from ntkfl.engine.seeds import derive
from ntkfl.engine.services.participant import Participant, SystemDraws


class SimulatedDraws:
    def __init__(self, seed: int, index: int) -> None:
        self.seed, self.index = seed, index

    def subsampling(self, round: int) -> random.Random:
        return random.Random(derive(self.seed, "subsample", self.index, round))

    def training(self, round: int) -> int:
        return derive(self.seed, "client", self.index, round)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, data, *seeds = sys.argv[1:]
    draws = SimulatedDraws(int(seeds[0]), int(seeds[1])) if seeds else SystemDraws()
    Participant(Path(folder), *read_client(Path(data)), draws=draws, patience=30).run()
