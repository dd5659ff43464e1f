"""`python client_process.py FOLDER DATA [SEED INDEX]`: a client. With a seed it draws as a simulation's client."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ntkfl.data.npz import read_client
from ntkfl.deployment.client import ShuffledClient
from ntkfl.federation.client import SeededRandomness, SystemRandomness

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, data, *seeds = sys.argv[1:]
    draws = SeededRandomness(int(seeds[0]), int(seeds[1])) if seeds else SystemRandomness()
    ShuffledClient(Path(folder), *read_client(Path(data)), randomness=draws, patience=30).run()
