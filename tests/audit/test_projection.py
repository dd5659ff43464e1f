"""The secret projection: exact once pairs determine it, and the better the more pairs there are."""

from __future__ import annotations

import pytest
import torch

from ntkfl.audit.capture import capture
from ntkfl.audit.projection import attack, column_covariance, estimate, invert_with
from tests.audit.fixtures import config


def test_as_many_pairs_as_inputs_give_p_exactly() -> None:
    draws = torch.Generator().manual_seed(0)
    P = torch.randn(12, 5, generator=draws, dtype=torch.float64)
    x = torch.randn(12, 12, generator=draws, dtype=torch.float64)
    found = estimate(x, x @ P, torch.eye(12, dtype=torch.float64), 1.0, torch.zeros(12, dtype=torch.float64))
    torch.testing.assert_close(found.mean, P, atol=1e-4, rtol=1e-4)
    assert float(found.unsure.abs().max()) < 1e-4
    few = estimate(x[:4], x[:4] @ P, torch.eye(12, dtype=torch.float64), 1.0, torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(x[:4] @ few.mean, x[:4] @ P, atol=1e-5, rtol=1e-5)
    assert float(few.unsure.diagonal().sum()) == pytest.approx(8, abs=1e-4)  # eight directions are left


def test_inversion_uses_what_is_known_of_inputs() -> None:
    """Inputs on a line: one coordinate of z tells all of x."""
    draws = torch.Generator().manual_seed(0)
    line = torch.randn(6, generator=draws, dtype=torch.float64)
    P = torch.randn(6, 1, generator=draws, dtype=torch.float64)
    covariance = torch.outer(line, line)
    known = estimate(torch.eye(6).double(), P, torch.eye(6).double(), 1.0, torch.zeros(6).double())
    found = invert_with(known, 2.5 * line.unsqueeze(0) @ P, torch.zeros(1, 6).double(), covariance)
    torch.testing.assert_close(found[0], 2.5 * line, rtol=1e-3, atol=1e-3)


def test_covariances_of_columns() -> None:
    assert torch.equal(column_covariance("gaussian", (1, 8, 8), 20), torch.eye(64, dtype=torch.float64))
    smooth = column_covariance("smooth", (1, 8, 8), 20)
    assert float(smooth.diagonal().sum()) == pytest.approx(20, rel=1e-6)
    assert float(smooth[0, 1]) > 0  # neighbouring pixels go together


@pytest.mark.parametrize("kind", ["gaussian", "orthonormal", "smooth"])
def test_pairs_break_every_kind_of_projection(kind: str) -> None:
    method = {"name": "ntk-fl", "projected_dim": 24, "projection": kind, "shuffle": True}
    free, known = attack(capture(config(method), 1), pairs=(0, 20, 200))
    curve = known.details["relative error by known pairs"]
    assert list(curve) == [0, 20, 200]
    assert curve[200] < curve[20] < curve[0] + 0.02
    assert curve[200] == pytest.approx(known.details["relative error of one who has P"], abs=0.04)
    assert known.details["pairs that break it"] is not None
    assert free.mean < free.guess  # class means are pairs that cost nothing


def test_nothing_to_do_without_a_projection_or_rows() -> None:
    assert attack(capture(config({"name": "ntk-fl", "subsample_rate": 0.1}), 1)) == []
    assert attack(capture(config({"name": "fedavg", "projected_dim": 24, "local_steps": 1}), 1)) == []
