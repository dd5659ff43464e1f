"""What all methods share."""

from __future__ import annotations

import pytest
import torch

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.methods import NTKFL, FedAvg, Task
from tests.methods.rounds import gradient, small_clients, small_task


class TestLabelSmoothing:
    def test_equals_torchs(self) -> None:
        f, y = torch.randn(6, 5).double(), torch.tensor([0, 4, 2, 2, 1, 3])
        task = Task(ntkfl.models.mlp(3, 5).double(), 5, "ce", label_smoothing=0.3)
        ours = ntkfl.tangent.losses.per_sample("ce", f, task.training_targets(y)).mean()
        torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(f, y, label_smoothing=0.3))

    def test_targets_of_squared_error_stay(self) -> None:
        task = Task(ntkfl.models.mlp(3, 2), 2, "mse", label_smoothing=0.3)
        y = torch.randn(4, 2)
        assert torch.equal(task.training_targets(y), y)
        assert torch.equal(task.training_targets(torch.tensor([0, 1])), torch.eye(2))

    def test_local_training_uses_it(self) -> None:
        plain, smooth = small_task(), small_task(label_smoothing=0.5)
        smooth.model.load_state_dict(plain.model.state_dict())
        smooth.like = plain.like
        (client,) = small_clients(6)
        step = plain.like - FedAvg(local_steps=1, lr=1.0).train(plain, plain.like, client).weights
        assert torch.allclose(step, gradient(plain, plain.like, client.x, client.y))
        other = plain.like - FedAvg(local_steps=1, lr=1.0).train(smooth, plain.like, client).weights
        assert not torch.allclose(step, other)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lr": 0}, "option 'lr'"),
        ({"lr": float("nan")}, "option 'lr'"),
        ({"average": 1.0}, "option 'average'"),
        ({"label_smoothing": 1.0}, "option 'label_smoothing'"),
        ({"los": "ce"}, "did you mean 'loss'"),
        ({"scheme": "paper"}, "takes whole steps: give them"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        NTKFL(**options)
    assert "\n" not in str(raised.value)
