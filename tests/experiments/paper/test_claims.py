"""Bytes and powers of the text's claims, against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
from ntkfl_experiments.paper.claims import UPLOADS, growth, judge, upload_bytes
from ntkfl_experiments.paper.curious import read_projected, read_shuffled

from ntkfl.data.catalog import locate


def test_growth_is_the_power() -> None:
    assert growth([1, 10, 100], [3, 30, 300]) == pytest.approx(1)
    assert growth([1, 4, 16], [5, 10, 20]) == pytest.approx(0.5)
    assert growth([1, 2, 4], [7, 7, 7]) == pytest.approx(0)


def test_uploads_are_the_numbers_they_hold() -> None:
    few, many = upload_bytes({"samples": 2}), upload_bytes({"samples": 4})
    d = 784 * 100 + 100 + 100 * 10 + 10
    assert many["Jacobian, dense"] - few["Jacobian, dense"] == pytest.approx(2 * 10 * d * 4, rel=1e-3)
    assert many["weights (FedAvg)"] == few["weights (FedAvg)"] == pytest.approx(4 * d, rel=1e-2)
    # Inputs, hidden units, their derivatives by ten outputs, outputs and a label; at four bytes, and little else.
    assert many["Jacobian, factored"] - few["Jacobian, factored"] < 2 * 4 * 2_100
    assert set(many) == set(UPLOADS)
    assert many["Jacobian, top 3 %, 8 bit"] < 0.03 * many["Jacobian, dense"]


def test_a_shuffled_row_is_read_like_any_other() -> None:
    found = read_shuffled({"samples": 8, "seed": 0})
    assert found["ssim"] == pytest.approx(found["plain"], abs=1e-3)
    assert found["ssim"] > 0.9
    assert found["advantage"] == 1


@pytest.mark.long
@pytest.mark.skipif(locate("fashion-mnist") is None, reason="no Fashion-MNIST on this machine")
def test_behind_a_projection_pictures_are_worse_and_p_helps() -> None:
    found = read_projected({"clients": 7, "seed": 0})
    assert found["guess"] < found["alone"] < found["known"] < 0.9
    assert found["with P"] > found["guess beside P"] + 0.1


def measured(**shuffled: float) -> dict[str, Any]:
    """What would make every claim hold."""
    work = {"gradient": 1.0, "factored": 1.2, "dense": 600.0, "local": 12.0}
    sent = {"Jacobian, dense": 100 * 10 * 79510 * 4, "Jacobian, factored": 8e5, "weights (FedAvg)": 4 * 79510}
    return {
        "search_seconds": {"1": 1.0, "10": 2.0, "40": 4.0},
        "client_seconds": {"mlp": work, "cnn": work},
        "upload_bytes": {"50": sent, "100": sent},
        "upload_slopes": {"Jacobian, dense": 1.0, "weights (FedAvg)": 0.0},
        "shuffled": {"samples": 8, "seconds": 1.0, "plain": 0.9, "ssim": 0.1, "advantage": 0.0} | shuffled,
        "projected": {"rows": 1600, "dimensions": 100, "alone": 0.4, "known": 0.7, "guess": 0.4, "with P": 0.6}
        | {"guess beside P": 0.4},
    }


def test_every_claim_can_hold_and_can_fail() -> None:
    good = measured()
    assert [v.holds for v in judge(good)[0]] == [True] * 7
    bad = measured(ssim=0.9, advantage=0.9)
    bad["projected"]["alone"] = 0.69  # above a guess, and not halfway from there to the picture
    assert [v.holds for v in judge(bad)[0]][-1] is None
    bad["projected"]["alone"] = 0.71
    bad["search_seconds"] = {"1": 1.0, "10": 100.0, "40": 1600.0}
    bad["client_seconds"]["mlp"] = {"gradient": 1.0, "factored": 20.0, "dense": 600.0, "local": 12.0}
    bad["upload_slopes"] = {"Jacobian, dense": 2.0, "weights (FedAvg)": 0.0}
    assert [v.holds for v in judge(bad)[0]] == [False] * 7
