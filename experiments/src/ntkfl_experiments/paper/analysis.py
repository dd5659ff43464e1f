"""What the items of the paper's analysis share: real pictures as it wants them, inputs of length 1 and labels ±1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ntkfl.data import Dataset, load
from ntkfl.data.catalog import locate
from ntkfl_experiments.paper.item import Context
from ntkfl_experiments.theory.two_layer import unit

Cell = dict[str, Any]

CHOICES = [
    "inputs are the dataset's normalised pictures, flattened and divided by their length; labels are −1 for the first "
    "half of the classes and +1 for the second (the analysis has one output)",
    "weights are drawn with Σ = I, so α = 1; probabilities are for δ = 0.1",
]
DELTA = 0.1
ALPHA = 1.0


def available(name: str) -> str:
    """`name` if it is on this machine, else the built-in digits: items of the analysis need no particular pictures."""
    return name if locate(name) is not None else "digits"


@lru_cache(maxsize=3)
def dataset(name: str) -> Dataset:
    """Loaded once a process: checking a dataset's files takes longer than most cells."""
    return load(name)


def drawn(name: str, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """`samples` training pictures drawn by `seed`, and their classes."""
    rows = dataset(name)
    index = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:samples]
    return rows.rows.take(index)


def unit_inputs(name: str, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """The same as the analysis has them: x [N, d1] of unit length, y [N] in ±1, both float64."""
    x, labels = drawn(name, samples, seed)
    return unit(x), (labels >= dataset(name).output_dim // 2).double() * 2 - 1


def settings(**more: Any) -> dict[str, Any]:
    """What every item of the analysis has in common, and more."""
    return {
        "network": "two layers, fixed ±1 output weights",
        "loss": "halved mean squared error",
        "delta": DELTA,
        **more,
    }


def work(
    context: Context, what: str, keys: Sequence[Mapping[str, Any]], compute: Callable[[Mapping[str, Any]], Any]
) -> list[Cell]:
    """Every key with its answer, which wins where both have a name. On one core: the matrices are small, and on a busy
    machine a second thread costs tenfold.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        answers = context.cells(what, keys, compute)
    finally:
        torch.set_num_threads(threads)
    return [{**key, **answer} for key, answer in zip(keys, answers, strict=True)]


def finite(value: float) -> float | None:
    """JSON has no infinity: None for what diverged."""
    return value if math.isfinite(value) else None
