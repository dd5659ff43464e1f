"""NTK-FL from sums over whole runs: steps taken back, resumed, and measured behind masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ntkfl
from ntkfl.federation.server import remarks
from ntkfl.federation.simulation import Simulation
from ntkfl.methods import Privacy, SumNTKFL

RASH = {"mu": 0.01, "delta": 1e-6}  # steps that are too long


@pytest.fixture(scope="module")
def digits() -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=10, alpha=0.1), seed=0)


def model() -> nn.Module:
    torch.manual_seed(0)
    return ntkfl.models.mlp(64, 12, 10)


def files(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("history.jsonl", "model.safetensors")]


@pytest.mark.parametrize("secure_sum", [False, True])
def test_a_run_stopped_after_any_round_goes_on_as_if_it_had_not(
    digits: ntkfl.data.Federated, tmp_path: Path, secure_sum: bool
) -> None:
    """After rounds whose step was taken back as well: what counts in the average is the same, to the byte."""
    method, rounds = SumNTKFL(**RASH), 7
    how: dict[str, Any] = {"clients_per_round": 4, "privacy": Privacy(secure_sum=secure_sum)}
    whole = Simulation(model(), digits, method, **how).run(rounds, out=tmp_path / "whole", callbacks=[])
    back = [record["round"] for record in whole.history if "taken_back" in record]
    assert 0 < len(back) < rounds - 1
    for record in whole.history:
        assert any("taken back" in line for line in remarks(record)) == (record["round"] in back)
    for stop in {1, back[0] - 1, back[0], back[0] + 1, rounds - 1}:
        for end in (stop, rounds):
            simulation = Simulation(model(), digits, method, **how)
            simulation.run(end, out=tmp_path / f"{stop}", resume=end > stop, callbacks=[])
        assert files(tmp_path / f"{stop}") == files(tmp_path / "whole")


def test_a_step_to_weights_whose_loss_is_not_finite_is_not_reported(
    digits: ntkfl.data.Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on: the next cohort takes it back, and until then the last accepted weights are reported."""
    step = SumNTKFL.step
    count = 0

    def too_far(self: SumNTKFL, *args: object) -> tuple[torch.Tensor, float]:
        nonlocal count
        count += 1
        change, curvature = step(self, *args)  # type: ignore[arg-type]
        return (1e30 if count == 3 else 1) * change, curvature

    monkeypatch.setattr(SumNTKFL, "step", too_far)
    torch.manual_seed(0)
    relu = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    run = ntkfl.train(relu, digits, SumNTKFL(average=0), rounds=5, clients_per_round=4, callbacks=[])
    assert [record["round"] for record in run.history if "taken_back" in record] == [4]
    accuracies = [record["test_accuracy"] for record in run.history]
    assert accuracies[2] == accuracies[1] > 0.2  # the step of round 2, which round 3 accepted
    assert accuracies[4] > 0.3


def test_mu_is_measured_behind_masks_as_from_single_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exchanges in a round, and the second one adds a few bytes: a curvature and a number of samples."""
    convolutional = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(24, 10)
    ).double()
    data = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=8, alpha=0.5), seed=0)
    monkeypatch.setattr(SumNTKFL, "step_limit", 0.0)  # which masks leave nothing to compare for
    method = SumNTKFL(mu=0.3, values="float32")
    runs = [
        Simulation(convolutional, data, method, clients_per_round=4, privacy=privacy).run(3, callbacks=[])
        for privacy in (Privacy(), Privacy(secure_sum=True))
    ]
    plain, masked = (run.history for run in runs)
    for one, two in zip(plain, masked, strict=True):
        assert one["mu"] > 2 * 0.3
        assert two["mu"] == pytest.approx(one["mu"], rel=1e-3)
        assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-3)
        assert two["bounded_clients"] == 0
        assert two["summed_clients"] == 4
        assert one["downlink"] == two["downlink"]
        # The second exchange; a round that takes a step back has its sums already.
        assert ("candidates" in two["downlink"]) == ("taken_back" not in two)
    assert sum("candidates" in record["downlink"] for record in masked) > 1
