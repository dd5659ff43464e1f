"""What `evolve` is given: the grid of steps, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import ntkfl
from ntkfl.errors import ConfigError, DataError, ModelError, NumericalError
from tests.tangent.evolutions import problem


class TestGrid:
    def test_geometric_grid(self) -> None:
        steps = ntkfl.geometric_steps(0.01)
        assert steps[-1] == pytest.approx(4000)
        assert all(b / a == pytest.approx(1.5) for a, b in itertools.pairwise(steps))
        assert 0.1 <= steps[0] * 0.01 < 0.15

    def test_default_steps_are_the_geometric_grid(self) -> None:
        _, _, J, f0, y = problem()
        assert ntkfl.evolve(J, f0, y, lr=0.02).steps == ntkfl.geometric_steps(0.02)


class TestRefusals:
    def test_what_is_no_jacobian(self) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ModelError, match=r"^J must be a Jacobian of ntkfl.jacobian, got a tensor$"):
            ntkfl.evolve(J.dense(), f0, y)  # type: ignore[arg-type]

    @pytest.mark.parametrize("steps", [[], [0], [-1, 2], [3, 3], [2, 1], [1, float("inf")], [float("nan")]])
    def test_bad_steps(self, steps: list[float]) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError, match="increasing list of positive numbers"):
            ntkfl.evolve(J, f0, y, steps=steps)

    def test_steps_that_are_no_list(self) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError, match="not 10"):
            ntkfl.evolve(J, f0, y, steps=10)  # type: ignore[arg-type]

    @pytest.mark.parametrize("scheme", ["descent", "paper"])
    def test_fractional_steps_need_the_flow(self, scheme: str) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError, match="whole numbers of steps"):
            ntkfl.evolve(J, f0, y, steps=[1.5], loss="mse", kernel="trace", scheme=scheme)

    @pytest.mark.parametrize(("key", "value"), [("loss", "hinge"), ("kernel", "ful"), ("scheme", "euler")])
    def test_unknown_names(self, key: str, value: str) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError, match=f"unknown {key} '{value}'"):
            ntkfl.evolve(J, f0, y, **{key: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
    def test_learning_rate(self, lr: float) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError):
            ntkfl.evolve(J, f0, y, lr=lr, steps=[1])

    @pytest.mark.parametrize("rtol", [-1e-3, 0.0, 1e-12, 1.0, float("nan"), float("inf")])
    @pytest.mark.parametrize("scheme", ["flow", "descent"])
    def test_relative_tolerance(self, rtol: float, scheme: str) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(ConfigError, match=r"rtol must be at least 1e-09 and below 1, got .*takes more steps"):
            ntkfl.evolve(J, f0, y, steps=[1], rtol=rtol, scheme=scheme)

    def test_the_smallest_tolerance_is_possible(self) -> None:
        _, _, J, f0, y = problem()
        ntkfl.evolve(J, f0, y, lr=1.0, steps=[5], rtol=1e-9)

    @pytest.mark.parametrize("loss", ["ce", "mse"])
    @pytest.mark.parametrize("kernel", ["full", "trace"])
    def test_no_rows(self, loss: str, kernel: str) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(DataError, match="the Jacobian has no rows"):
            ntkfl.evolve(J[[]], f0[:0], y[:0], steps=[1], loss=loss, kernel=kernel)

    @pytest.mark.parametrize("y", [torch.zeros(7, dtype=torch.int64), torch.ones(7, 1)])
    def test_cross_entropy_of_one_output(self, y: Tensor) -> None:
        _, _, J, f0, _ = problem("scalar output")
        with pytest.raises(DataError, match="two outputs, or use loss 'mse'"):
            ntkfl.evolve(J, f0, y, steps=[1], loss="ce")

    def test_a_cost_without_end_does_not_blame_the_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ntkfl.tangent.solvers.MOST_PRODUCTS", 10)
        _, _, J, f0, y = problem()
        with pytest.raises(NumericalError, match="take shorter steps or a larger rtol"):
            ntkfl.evolve(J, f0, y, lr=1.0, steps=[1e6])

    @pytest.mark.parametrize("loss", ["ce", "mse"])
    def test_divergence_is_reported_in_words(self, loss: str) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(NumericalError, match=r"diverged: after \d+ steps of size 1000 the loss is"):
            ntkfl.evolve(J, f0, y, lr=1e3, steps=[1, 2, 5, 50], loss=loss, scheme="descent")

    def test_values_that_are_not_finite(self) -> None:
        _, _, J, f0, y = problem()
        f0[3, 1] = float("inf")
        with pytest.raises(NumericalError, match="f0 has values that are not finite"):
            ntkfl.evolve(J, f0, y)

    def test_labels(self) -> None:
        _, _, J, f0, y = problem()
        with pytest.raises(DataError, match="labels run from 0 to 3"):
            ntkfl.evolve(J, f0, y + (y == 2).long())
        with pytest.raises(DataError, match="6 labels for 7 samples"):
            ntkfl.evolve(J, f0, y[:6])
        with pytest.raises(DataError, match="must be probabilities"):
            ntkfl.evolve(J, f0, torch.randn(7, 3))
        with pytest.raises(DataError, match=r"must have shape \[N, 3\]"):
            ntkfl.evolve(J, f0, torch.randn(7, 2), loss="mse")
        with pytest.raises(DataError, match="f0 must have the Jacobian's shape"):
            ntkfl.evolve(J, f0[:, :2], y)
