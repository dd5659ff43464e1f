"""`python client_process.py FOLDER DATA [SEED INDEX]`: a client. With a seed it draws as a simulation's client."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ntkfl.data.client import read_own
from ntkfl.data.folders import Images
from ntkfl.deployment.client import ShuffledClient
from ntkfl.federation.client import SeededRandomness, SystemRandomness
from ntkfl.user_code import find_factory

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, data, *seeds = sys.argv[1:]
    draws = SeededRandomness(int(seeds[0]), int(seeds[1])) if seeds else SystemRandomness()
    own = read_own(data, Images(()), find_factory)
    ShuffledClient(Path(folder), *own, randomness=draws, patience=30).run()
