"""What `evolve` is given: the grid of steps, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.errors import ConfigError, DataError, ModelError, NumericalError
from tests.tangent.evolutions import problem

NAN, INF = float("nan"), float("inf")
OPTIONS: list[dict[str, Any]] = [
    *({"steps": steps} for steps in ([], [0], [-1, 2], [3, 3], [2, 1], [1, INF], [NAN], 10)),
    {"steps": [1.5], "loss": "mse", "kernel": "trace", "scheme": "paper"},
    *({"steps": [1], "lr": lr} for lr in (0.0, -1.0, NAN, INF)),
    *({"steps": [1], "rtol": rtol} for rtol in (-1e-3, 0.0, 1e-12, 1.0, NAN, INF)),
    {"loss": "hinge"}, {"kernel": "ful"}, {"scheme": "euler"},
]  # fmt: skip


def test_geometric_grid() -> None:
    steps = ntkfl.geometric_steps(0.01)
    assert steps[-1] == pytest.approx(4000)
    assert all(b / a == pytest.approx(1.5) for a, b in itertools.pairwise(steps))
    assert 0.1 <= steps[0] * 0.01 < 0.15
    _, _, J, f0, y = problem()
    assert ntkfl.evolve(J, f0, y, lr=0.02).steps == ntkfl.geometric_steps(0.02)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    _, _, J, f0, y = problem()
    with pytest.raises(ConfigError):
        ntkfl.evolve(J, f0, y, **options)


def test_data_that_cannot_be() -> None:
    _, _, J, f0, y = problem()
    for labels, loss in (
        (y + (y == 2).long(), "ce"),  # a label beyond the outputs
        (y[:6], "ce"),
        (torch.randn(7, 3), "ce"),  # no probabilities
        (torch.randn(7, 2), "mse"),
    ):
        with pytest.raises(DataError):
            ntkfl.evolve(J, f0, labels, loss=loss)
    with pytest.raises(DataError, match="f0 must have the Jacobian's shape"):
        ntkfl.evolve(J, f0[:, :2], y)
    with pytest.raises(ModelError, match="must be a Jacobian"):
        ntkfl.evolve(J.dense(), f0, y)  # type: ignore[arg-type]
    for loss, kernel in itertools.product(("ce", "mse"), ("full", "trace")):
        with pytest.raises(DataError, match="no rows"):
            ntkfl.evolve(J[[]], f0[:0], y[:0], steps=[1], loss=loss, kernel=kernel)
    _, _, J, f0, _ = problem("scalar output")
    for labels in (torch.zeros(7, dtype=torch.int64), torch.ones(7, 1)):
        with pytest.raises(DataError, match="loss 'mse'"):  # cross-entropy of one output
            ntkfl.evolve(J, f0, labels, steps=[1], loss="ce")


def test_a_cost_without_end_does_not_blame_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkfl.tangent.solvers.MOST_PRODUCTS", 10)
    _, _, J, f0, y = problem()
    with pytest.raises(NumericalError, match="take shorter steps or a larger rtol"):
        ntkfl.evolve(J, f0, y, lr=1.0, steps=[1e6])


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_numbers_that_are_not_finite(loss: str) -> None:
    _, _, J, f0, y = problem()
    f0[3, 1] = INF
    with pytest.raises(NumericalError, match="not finite"):
        ntkfl.evolve(J, f0, y, loss=loss)
