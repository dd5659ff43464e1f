"""What is said of reconstructions follows from their scores; and one is made for real where the pictures are."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.paper.deep_leakage import Settings
from ntkfl_experiments.paper.figure8 import Curve, Point, dump, judge, run

from ntkfl.data.catalog import locate


def curve(levels: dict[str, tuple[float, float]]) -> Curve:
    """Two sparsities, two pictures each: `levels` are the mean SSIM at 50 and 90 %."""
    points = [
        Point(s, attack, (mean - 0.01, mean + 0.01), torch.zeros(1, 1, 28, 28))
        for attack, means in levels.items()
        for s, mean in zip((0.5, 0.9), means, strict=True)
    ]
    return Curve(points, torch.zeros(1, 1, 28, 28), (0.4, 0.4), {})


def test_protection_is_judged_by_the_best_attack() -> None:
    weak = curve({"zeros": (0.6, 0.05), "sent": (0.6, 0.06), "analytic": (0.6, 0.07)})
    strong = curve({"zeros": (0.6, 0.05), "sent": (0.6, 0.06), "analytic": (0.99, 0.9)})
    assert [f.holds for f in judge(dump(weak))[0]] == [True, True]
    assert [f.holds for f in judge(dump(strong))[0]] == [False, True]


@pytest.mark.skipif(locate("fashion-mnist") is None, reason="no Fashion-MNIST on this machine")
def test_half_of_a_jacobian_gives_the_picture_away() -> None:
    found = run(2, (0.5,), settings=Settings(steps=2, restarts=1, seed=0))
    assert found.at(0.5, "analytic").mean > 0.99
    assert found.at(0.5, "zeros").mean < found.at(0.5, "analytic").mean
