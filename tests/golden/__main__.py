"""Run the files named, or all, and write what they come to now."""

from __future__ import annotations

import json
import sys

import torch

from ntkfl.data.catalog import locate
from tests.golden import FOLDER, NAMES, play, read

ROUNDING = 4 * torch.finfo(torch.float32).eps
LEAST = (
    1e-4  # sums of n = 1,000 float32 products differ by up to n ε = 6e-5 with their order, whatever the first weights
)

for name in sys.argv[1:] or NAMES:
    run = read(name)["run"]
    if locate(run["dataset"]) is None:
        print(f"{name}: left as it is: {run['dataset']} is not on this machine")
        continue
    rounds = play(run)
    others = [play(run, scale * ROUNDING) for scale in (1, -1, 2)]
    pairs = [(a, b) for other in others for a, b in zip(rounds, other, strict=True)]
    differences = [abs(a[1] / b[1] - 1) for a, b in pairs]
    moved = max(abs(a[0] - b[0]) for a, b in pairs)
    bound = float(f"{max(4 * max(differences), LEAST):.1e}")
    lines = ",\n  ".join(json.dumps([round(a, 6), float(f"{b:.7g}"), up, down]) for a, b, up, down in rounds)
    text = f'{{\n "run": {json.dumps(run)},\n "loss_bound": {bound},\n "rounds": [\n  {lines}\n ]\n}}\n'
    (FOLDER / f"{name}.json").write_text(text)
    print(f"{name}: {rounds[-1]}, loss within {bound:g}; roundings moved accuracies by {moved:.2%}", flush=True)
