"""FedAvg, what all local methods share, and pooled training as its yardstick."""

from __future__ import annotations

import pytest
import torch

import ntkfl.models
from ntkfl.errors import ConfigError, MessageError, NumericalError
from ntkfl.methods import Centralized, ClientRound, FedAvg, Task
from ntkfl.methods.local_training import report
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from tests.methods.rounds import gradient, one_weight, play, play_rounds, scalar_client, small_clients, small_task


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_one_full_step_of_equal_clients_is_one_central_step(loss: str) -> None:
    task, clients = small_task(loss), small_clients(9, 9, 9)
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    expected = task.like - 0.3 * gradient(task, task.like, x, y)
    federated, _ = play(FedAvg(loss=loss, lr=0.3, local_steps=1, batch_size=9, robust="mean"), task, clients)
    pooled, _ = play(Centralized(loss=loss, lr=0.3, local_steps=1), task, clients)
    torch.testing.assert_close(federated.state["weights"], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(pooled.state["weights"], expected, atol=1e-12, rtol=0)
    at_start = task.losses(task.predict(task.like, x), y).mean()
    assert federated.train_loss == pytest.approx(float(at_start), rel=1e-6)
    assert pooled.train_loss == pytest.approx(float(at_start), rel=1e-6)


def test_weightings() -> None:
    task, clients = small_task(), small_clients(2, 9, 30)
    gradients = [gradient(task, task.like, c.x, c.y) for c in clients]
    pooled = gradient(task, task.like, torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients]))
    for weighting, g in (("samples", pooled), ("uniform", sum(gradients) / 3)):
        outcome, _ = play(FedAvg(lr=0.3, local_steps=1, weighting=weighting, robust="mean"), task, clients)
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


def test_upload_of_the_papers_network() -> None:
    model = ntkfl.models.mlp(784, 100, 10)
    task = Task(model, 10, "ce")
    clients = [ClientRound(i, torch.randn(4, 784), torch.arange(4), Randomness.simulated(i)) for i in range(2)]
    _, log = play(FedAvg(local_steps=1), task, clients)
    ups, downs = ([s for s in log if s.way == way] for way in ("up", "down"))
    assert [s.kind for s in ups] == ["update"] * 2
    assert [s.kind for s in downs] == ["weights"] * 2
    for sent in log:
        assert 79_510 * 4 < sent.size < 79_510 * 4 + 128


def test_bits_follow_from_seeds() -> None:
    method, task = FedAvg(lr=0.3, local_steps=3, batch_size=4), small_task(dtype=torch.float32)
    clients = small_clients(20, 30, dtype=torch.float32)
    first, again = (play(method, task, clients)[0].state["weights"] for _ in range(2))
    assert torch.equal(first, again)
    clients[1].randomness = Randomness.simulated(1000)
    assert not torch.equal(first, play(method, task, clients)[0].state["weights"])


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


def test_pooled_training_is_descent_on_all_samples() -> None:
    task, clients = small_task(), small_clients(3, 8, 14)
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    w = task.like
    for _ in range(6):
        w = w - 0.3 * gradient(task, w, x, y)
    state = play_rounds(Centralized(lr=0.3, local_steps=3), task, clients, rounds=2)
    torch.testing.assert_close(state["weights"], w, atol=1e-12, rtol=0)
    batches = play_rounds(Centralized(lr=0.3, local_steps=3, batch_size=5), task, clients, rounds=2)
    assert not torch.allclose(batches["weights"], w)


def test_pooled_samples_are_counted() -> None:
    task, clients = small_task(dtype=torch.float32), small_clients(30, 80, dtype=torch.float32)
    for number in (1, 2):
        _, log = play(Centralized(), task, clients, number=number)
        for client, sent in zip(clients, [s for s in log if s.way == "up"], strict=True):
            assert sent.kind == "data"
            exact = len(client) * (5 * 4 + 1)
            assert exact < sent.size < exact + 64
        assert all(s.size < 64 for s in log if s.way == "down")


@pytest.mark.parametrize(
    ("x", "labels"),
    [((3, 5), (4,)), ((0, 5), (0,)), ((), ()), ((3, 4), (3,)), ((3, 5), (3, 1)), ((3, 5), ())],
)
def test_pooled_samples_are_checked(x: tuple[int, ...], labels: tuple[int, ...]) -> None:
    task = small_task()
    good = Message("data", 1, {"x": torch.zeros(2, 5), "labels": torch.zeros(2, dtype=torch.uint8)})
    conversation = Centralized().round(task, Centralized().start(task, task.like), 1, [0, 1])
    next(conversation)
    bad = Message("data", 1, {"x": torch.zeros(x), "labels": torch.zeros(labels, dtype=torch.uint8)})
    with pytest.raises(MessageError, match="fit together"):
        conversation.send([good, bad])
