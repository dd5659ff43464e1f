"""Each run of this folder again, against what it came to when its file was written."""

from __future__ import annotations

import pytest

from ntkfl.data.catalog import locate
from tests.golden import NAMES, play, read

# 0.2 points; of the 355 test samples of digits, one is 0.28.
ACCURACY = {"digits": 1.01 / 355, "fashion-mnist": 0.002}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_comes_to_what_it_came_to(name: str) -> None:
    kept = read(name)
    run = kept["run"]
    if locate(run["dataset"]) is None:
        pytest.skip(f"{run['dataset']} is not on this machine")
    rounds = play(run)
    for (accuracy, loss, *sizes), (old_accuracy, old_loss, *old_sizes) in zip(rounds, kept["rounds"], strict=True):
        assert sizes == old_sizes
        assert accuracy == pytest.approx(old_accuracy, rel=0, abs=ACCURACY[run["dataset"]])
        assert loss == pytest.approx(old_loss, rel=kept["loss_bound"])
