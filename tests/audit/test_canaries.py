"""Canaries: honest mechanisms keep their promise, broken ones are shown to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from torch import Tensor, nn
from typer.testing import CliRunner

from ntkfl.audit.canaries import audit_canaries, gaussian_bound, one_run_bound
from ntkfl.cli import app
from ntkfl.errors import ConfigError
from ntkfl.federation.config import RunConfig
from ntkfl.methods.sums import noisy_sums, private_sums
from ntkfl.privacy.discrete_gaussian import discrete_gaussians
from ntkfl.privacy.randomness import Integers
from ntkfl.tangent.clipping import clipped_gradient


def small_cnn(inputs: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, outputs))


CNN = {"name": f"{__name__}:small_cnn"}
SUMS: dict[str, Any] = {"name": "private-sums"}


def planned(method: dict[str, Any], model: dict[str, Any] | None = None, rounds: int = 3, **privacy: Any) -> RunConfig:
    """ε = 3 on digits, four clients under masks, one of which tells its noise."""
    return RunConfig(
        rounds=rounds,
        clients_per_round=4,
        data={"dataset": "digits", "partition": "iid", "clients": 4},
        model=model or {"name": "mlp", "hidden": [16]},
        method=method,
        privacy={"budget_rounds": rounds, "secure_sum": True, "noise_clients": 3} | privacy,
    )


CASES = {
    "mlp": planned(SUMS),
    "cnn": planned(SUMS, CNN),
    "private-ridge": planned({"name": "private-ridge"}, rounds=1),
}
RECORDS = {"mlp": CASES["mlp"], "cnn": planned(SUMS, CNN, rounds=1, sum_samples=100_000)}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_honest_noise_keeps_its_promise(config: RunConfig) -> None:
    """And canaries are guessed better than by chance, so the attack is one."""
    found = [audit_canaries(config, 120, seed) for seed in range(3)]
    assert all(finding.promised == pytest.approx(3.0, rel=1e-3) for finding in found)
    assert all(finding.holds for finding in found)
    assert sum(finding.correct for finding in found) > 180 + 1.64 * 90**0.5


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_without_noise_the_promise_is_broken_by_far(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(sigma: float, count: int, *_: object) -> Integers:
        return np.zeros(count, dtype=np.int64)

    monkeypatch.setattr(noisy_sums, "discrete_gaussians", silent)
    found = audit_canaries(config, 120)
    assert found.correct == 120
    assert found.shown > 5 * found.promised


@pytest.mark.parametrize("config", RECORDS.values(), ids=RECORDS)
def test_without_clipping_the_promise_is_broken_by_far(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor of 1 for every record, as computed norms of rounding errors alone would give."""
    clip = clipped_gradient

    def unclipped(model: nn.Module, x: Tensor, Y: Tensor, loss: Any, plan: Any, each: float, *rest: Any) -> Tensor:
        return clip(model, x, Y, loss, plan, 1e30, *rest)

    monkeypatch.setattr(private_sums, "clipped_gradient", unclipped)
    found = audit_canaries(config, 120)
    assert found.shown > 3 * found.promised


def test_too_little_noise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of σ is three times μ."""
    draw = discrete_gaussians
    monkeypatch.setattr(noisy_sums, "discrete_gaussians", lambda sigma, *rest: draw(sigma / 3, *rest))
    assert audit_canaries(CASES["mlp"], 400).shown > 1.3 * 3.0


def test_bounds_are_wrong_as_rarely_as_they_say() -> None:
    """Guesses of the most that ε = 1 allows, and scores of μ = 1, whose ε at 1e-5 is 4.38: 300 times each."""
    draws, m = np.random.default_rng(0), 100
    wrong = {"one run": 0, "gaussian": 0}
    for _ in range(300):
        coins = draws.random(m) < 0.5
        right = draws.random(m) < 1 / (1 + np.exp(-1.0))
        wrong["one run"] += one_run_bound(np.where(coins == right, 1.0, -1.0), coins, 0.0, 0.1) > 1.0
        scores = coins - 0.5 + draws.standard_normal(m)
        wrong["gaussian"] += gaussian_bound(scores, coins, 1e-5, 0.1) > 4.39
    assert max(wrong.values()) <= 0.1 * 300 + 3 * (300 * 0.09) ** 0.5


def test_bounds_of_perfect_and_of_blind_guesses() -> None:
    """All of 100 coins right at (ε, 0): e^ε / (1 + e^ε) = (0.025)^(1/100). None right: nothing is shown."""
    coins = np.arange(100) % 2 == 0
    scores = coins - 0.5
    q = 0.025**0.01
    assert one_run_bound(scores, coins, 0.0, 0.05) == pytest.approx(np.log(q / (1 - q)), rel=1e-6)
    assert one_run_bound(-scores, coins, 0.0, 0.05) == gaussian_bound(-scores, coins, 1e-5, 0.05) == 0.0
    assert gaussian_bound(scores, coins, 1e-5, 0.05) > one_run_bound(scores, coins, 1e-5, 0.05) > 2


def test_a_run_that_promises_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="fedavg makes none"):
        audit_canaries(planned({"name": "fedavg"}, secure_sum=False, noise_clients=1, budget_rounds=20))


def test_the_command_reports_both_numbers(tmp_path: Path) -> None:
    config = tmp_path / "private.toml"
    config.write_text(tomli_w.dumps(planned(SUMS, rounds=2).model_dump(mode="json", exclude_unset=True)))
    words = ["audit", "--private", str(config), "--canaries", "40", "--out", str(tmp_path / "o")]
    said = CliRunner().invoke(app, words)
    assert "promised ε = 3.00 (simulated)" in said.stdout
    assert "an attacker showed at least" in said.stdout
    kept = json.loads((tmp_path / "o" / "canaries.json").read_text())
    assert kept["promised"] == pytest.approx(3.0, rel=1e-3)
    assert kept["holds"] is True
