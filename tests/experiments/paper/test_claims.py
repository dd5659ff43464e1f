"""Bytes and powers of the text's claims, against counts by hand."""

from __future__ import annotations

import pytest
from ntkfl_experiments.paper.claims import UPLOADS, growth, upload_bytes


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
