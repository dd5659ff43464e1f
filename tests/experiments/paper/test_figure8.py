"""What is said of reconstructions follows from their scores; and one is made for real where the pictures are."""

from __future__ import annotations

import pytest
import torch
from ntkfl_experiments.paper.figure8 import ATTACKS, Curve, Point, dump, judge, monotone, run

from ntkfl.audit.deep_leakage import Settings
from ntkfl.data.catalog import locate


def curve(levels: dict[str, tuple[float, float]]) -> Curve:
    """Two sparsities, two pictures each: `levels` are the mean SSIM at 50 and 90 %."""
    points = [
        Point(s, attack, (mean - 0.01, mean + 0.01), (20.0, 21.0), torch.zeros(1, 1, 28, 28))
        for attack, means in levels.items()
        for s, mean in zip((0.5, 0.9), means, strict=True)
    ]
    return Curve(points, torch.zeros(1, 1, 28, 28), (0.4, 0.4), {})


def test_protection_is_judged_by_the_best_attack() -> None:
    weak = curve({"zeros": (0.6, 0.05), "sent": (0.6, 0.06), "analytic": (0.6, 0.07)})
    strong = curve({"zeros": (0.6, 0.05), "sent": (0.6, 0.06), "analytic": (0.99, 0.9)})
    assert [f.holds for f in judge(dump(weak))[0]] == [True, True]
    assert [f.holds for f in judge(dump(strong))[0]] == [False, True]


def test_networks_on_which_the_attacks_fail_are_named() -> None:
    strong = dump(curve({"zeros": (0.6, 0.05), "sent": (0.6, 0.06), "analytic": (0.99, 0.9)}))
    attacks = {"cnn": (0.41, 0.43), "784-100-10": (0.41, 0.6)}  # below a guess of 0.45 on their pictures, and above
    strong["elsewhere"] = [
        {"network": n, "trained": 0, "sparsity": 0.9, "attack": a, "mean": mean, "guess": 0.45}
        for n, means in attacks.items()
        for a, mean in zip(("zeros", "sent"), means, strict=True)
    ]
    (found, _), beside = judge(strong)
    assert found.holds is False
    assert found.short == "SSIM 0.90 at 90%, guess 0.40; cnn, as initialised: 0.43, guess 0.45"
    assert {b.what: b.found for b in beside}[
        "best attack on 784-100-10, as initialised"
    ] == "SSIM 0.60 at 90%; a guess 0.45"


def test_a_rise_beyond_two_errors_is_no_fall() -> None:
    found = curve({"zeros": (0.5, 0.51), "sent": (0.5, 0.7), "analytic": (0.9, 0.9)})
    assert [monotone(found, attack) for attack in ATTACKS] == [True, False, True]
    assert judge(dump(found))[0][1].holds is False
    assert dump(found)["monotone"] == {"zeros": True, "sent": False, "analytic": True}


@pytest.mark.skipif(locate("fashion-mnist") is None, reason="no Fashion-MNIST on this machine")
def test_half_of_a_jacobian_gives_the_picture_away() -> None:
    found = run(2, (0.5,), settings=Settings(steps=2, restarts=1, seed=0))
    assert found.at(0.5, "analytic").mean > 0.99
    assert found.at(0.5, "zeros").mean < found.at(0.5, "analytic").mean
