"""What methods with local training share: weights of clients, numbers of steps, combinations, refusals."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import ConfigError, MessageError, NumericalError
from ntkfl.methods import METHODS, Centralized, FedAvg
from ntkfl.methods.local_training import report
from ntkfl.wire import Message
from tests.methods.rounds import gradient, one_weight, play, scalar_client, small_clients, small_task


def test_weightings() -> None:
    task, clients = small_task(), small_clients(2, 9, 30)
    gradients = [gradient(task, task.like, c.x, c.y) for c in clients]
    pooled = gradient(task, task.like, torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients]))
    for weighting, g in (("samples", pooled), ("uniform", sum(gradients) / 3)):
        outcome, _ = play(FedAvg(lr=0.3, local_steps=1, weighting=weighting), task, clients)
        torch.testing.assert_close(outcome.state["weights"], task.like - 0.3 * g, atol=1e-12, rtol=0)
        losses = torch.stack([task.losses(task.predict(task.like, c.x), c.y).mean() for c in clients])
        p = torch.tensor([2, 9, 30.0]) / 41 if weighting == "samples" else torch.ones(3) / 3
        assert outcome.train_loss == pytest.approx(float((losses * p).sum()), rel=1e-6)
    with pytest.raises(ConfigError, match="weighting"):
        FedAvg(weighting="size")


def test_local_epochs_count_steps_by_samples() -> None:
    method = FedAvg(local_epochs=3, batch_size=10)
    assert [method.steps(c) for c in small_clients(1, 10, 11, 40)] == [3, 3, 6, 12]
    assert [FedAvg(local_steps=5).steps(c) for c in small_clients(1, 40)] == [5, 5]
    task, clients = small_task(), small_clients(10, 20)
    by_epochs, _ = play(FedAvg(lr=0.3, local_epochs=2, batch_size=10), task, clients)
    singly = [
        play(FedAvg(lr=0.3, local_steps=n, batch_size=10), task, [c])[0] for c, n in zip(clients, (2, 4), strict=True)
    ]
    mean = (singly[0].state["weights"] + singly[1].state["weights"]) / 2
    torch.testing.assert_close(by_epochs.state["weights"], mean, atol=1e-12, rtol=0)


@pytest.mark.parametrize("steps", [60, 150])  # the loss overflows before the weights do
def test_divergence_has_a_name(steps: int) -> None:
    task, clients = one_weight(1.0), [scalar_client(0, 1, 0), scalar_client(1, 100, 0)]
    with pytest.raises(NumericalError, match=r"client 1 .*diverged"):
        play(FedAvg(loss="mse", lr=0.1, local_steps=steps), task, clients)
    with pytest.raises(NumericalError, match="diverged"):
        play(Centralized(loss="mse", lr=0.1, local_steps=150), task, clients)


def test_the_server_refuses_what_is_no_update() -> None:
    task, client = small_task(), small_clients(5)[0]
    rest = report(client, torch.tensor(1.0))
    nan = torch.full_like(task.like, torch.nan)
    for reply, reason in (
        (Message("update", 1, {"weights": nan} | rest), "not finite"),
        (Message("update", 1, {"weights": task.like[:-1]} | rest), "shape"),
        (Message("weights", 1, {"weights": task.like} | rest), "expected"),
        (Message("update", 1, {"weights": task.like} | rest | {"samples": torch.tensor(0)}), "no samples"),
        (Message("update", 1, {"weights": task.like} | rest | {"loss": torch.tensor(torch.nan)}), "not finite"),
    ):
        conversation = FedAvg().round(task, FedAvg().start(task, task.like), 1, [0])
        next(conversation)
        with pytest.raises(MessageError, match=reason):
            conversation.send([reply])


AVERAGING = (
    "fedavg", "fedprox", "fednova", "scaffold", "fedadam", "fedcom", "qsgd",
    "data-share",
)  # fmt: skip


@pytest.mark.parametrize("robust", ["median", "trimmed", "clip"])
@pytest.mark.parametrize("name", AVERAGING)
def test_equal_clients_are_combined_into_what_each_sent(name: str, robust: str) -> None:
    """Where all agree there is nothing to trim, so every combination is the mean."""
    first, second = ([scalar_client(i, 1.0, 3.0) for i in range(4)] for _ in range(2))
    options = {"loss": "mse", "local_steps": 2, "lr": 0.1}
    plain, _ = play(METHODS[name](**options), one_weight(1.0, total_clients=4), first)
    other, _ = play(METHODS[name](robust=robust, **options), one_weight(1.0, total_clients=4), second)
    assert torch.allclose(plain.state["weights"], other.state["weights"], atol=1e-9)


def test_one_byzantine_client_among_five_decides_a_mean_and_no_robust_combination() -> None:
    clients = [*(scalar_client(i, 1.0, 3.0) for i in range(4)), scalar_client(4, 1.0, -3e4)]
    after = {
        how: float(
            play(FedAvg(loss="mse", local_steps=1, lr=0.1, robust=how), one_weight(1.0), clients)[0].state["weights"]
        )
        for how in ("mean", "median", "trimmed", "clip")
    }
    assert after["mean"] < -100
    assert after["median"] == pytest.approx(1.2)
    assert after["trimmed"] == pytest.approx(1.2)
    assert after["clip"] == pytest.approx(1 + (4 * 0.2 - 1.5 * 0.2) / 5)
