"""`sum-ntk-fl` trains any network that FedAvg trains: with its defaults, and from PyTorch's or He's initialisation."""

from __future__ import annotations

import pytest
from ntkfl_experiments.bench.any_network import INITIALISATIONS, NETWORKS, SEEDS, play

# After five rounds, where that is enough to part the two and quick.
QUICK = [
    *((name, start, 4) for name in ("mlp2", "mlp3", "wide") for start in INITIALISATIONS),
    ("cnnpool", "torch", 4),
    ("cnnpool", "he", 8),  # of four clients its first two steps are taken back, and 12 rounds are needed
    *((name, start, 8) for name in ("mlp2", "mlp3") for start in INITIALISATIONS),
    ("resnet", "he", 4),
    ("transformer", "he", 4),
]


@pytest.mark.parametrize(("name", "start", "cohort"), QUICK)
def test_sums_are_ahead_of_averages_after_five_rounds(name: str, start: str, cohort: int) -> None:
    ours, averaging = (play(name, start, method, 20, 5, cohort)["accuracy"] for method in ("sum-ntk-fl", "fedavg"))
    assert ours[-1] > averaging[-1]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cohort", [4, 8])
@pytest.mark.parametrize("start", INITIALISATIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_sums_are_ahead_of_averages_after_twelve(name: str, start: str, cohort: int, seed: int) -> None:
    ours, averaging = (play(name, start, method, seed, 12, cohort)["accuracy"] for method in ("sum-ntk-fl", "fedavg"))
    assert ours[-1] > averaging[-1]
