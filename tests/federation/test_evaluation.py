"""Scores on the server's own data, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ntkfl.federation.evaluation import OwnTestSet
from ntkfl.federation.server_state import ServerState
from ntkfl.methods import FedAvg, Task


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("average", [0.5, 0.0])
def test_the_average_and_the_last_model_are_each_measured_with_their_own_statistics(average: float, real: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    x, y = torch.randn(50, 4).double(), torch.randn(50, 3).double() if real else torch.randint(0, 3, (50,))
    state = ServerState(Task(model, 3, "mse" if real else "ce"), FedAvg(average=average))
    state.average.settled = state.average.settled + torch.rand(len(state.flat_weights())).double()

    def by_hand(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[float | None, float]:
        W, b, scale, shift, mean, var = torch.split(flat, [12, 3, 3, 3, 3, 3])
        f = (x @ W.view(3, 4).T + b - mean) / (var + 1e-5).sqrt() * scale + shift
        if real:
            return None, float(0.5 * nn.functional.mse_loss(f, y))
        return float((f.argmax(1) == y).double().mean()), float(nn.functional.cross_entropy(f, y))

    score, more = OwnTestSet((x, y), (x[:20], y[:20])).measure(state)
    accuracy, loss = by_hand(state.average.value, x, y)
    assert (score.accuracy, score.loss, score.samples) == (accuracy, pytest.approx(loss), 50)
    assert more["last_accuracy"] == (by_hand(state.flat_weights(), x, y)[0] if average else accuracy)
    assert real or not average or more["last_accuracy"] != accuracy
    held = by_hand(state.average.value, x[:20], y[:20])
    assert (more["validation_accuracy"], more["validation_loss"]) == (held[0], pytest.approx(held[1]))
