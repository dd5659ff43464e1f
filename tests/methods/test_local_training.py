"""One client's descent against PyTorch written out, and what methods of local training share."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import ConfigError, ModelError, NumericalError
from ntkfl.methods import NTKFL, Centralized, ClientRound, FedAvg, Task
from ntkfl.methods.averaging.local_training import train_locally
from ntkfl.methods.robust import Robust
from ntkfl.methods.task import STATISTICS, load_statistics, statistics_of
from ntkfl.privacy.randomness import Randomness
from tests.methods.known import METHODS
from tests.methods.rounds import gradient, one_weight, play, scalar_client, small_clients, small_task

AVERAGING = ("fedavg", "fedprox", "fednova", "scaffold", "fedadam", "fedcom", "qsgd", "data-share")


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


# Descent.


@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize(("n", "steps"), [(11, 5), (1, 3), (4, 0)])
def test_full_batches_are_plain_descent(loss: str, n: int, steps: int) -> None:
    task, (client,) = small_task(loss), small_clients(n)
    w, losses = task.like, []
    for _ in range(steps):
        losses.append(float(task.losses(task.predict(w, client.x), client.y).mean()))
        w = w - 0.3 * (gradient(task, w, client.x, client.y) + 0.1 * (w - task.like))
    trained = train_locally(task, task.like, client, steps, 0.3, 50, lambda g, v: g + 0.1 * (v - task.like))
    torch.testing.assert_close(trained.weights, w, atol=1e-12, rtol=0)
    assert float(trained.loss) == pytest.approx(sum(losses) / max(steps, 1))


def test_batches_are_plain_stochastic_descent_without_replacement() -> None:
    """The batches of a client are those that its gradients are seen at; another seed draws others."""
    task, (client,) = small_task(), small_clients(23)

    def batches(steps: int) -> list[Tensor]:
        order = client.randomness.orders("batches", -(-steps // 4), 23)[:, :20].reshape(-1, 5)[:steps]
        return list(torch.from_numpy(order))

    for epoch in (batches(12)[at : at + 4] for at in range(0, 12, 4)):
        assert len(torch.cat(epoch).unique()) == 20
    w = task.like
    for rows in batches(9):
        w = w - 0.3 * gradient(task, w, client.x[rows], client.y[rows])
    torch.testing.assert_close(train_locally(task, task.like, client, 9, 0.3, 5).weights, w, atol=1e-12, rtol=0)
    client.randomness = Randomness.simulated(1000)
    assert not torch.allclose(train_locally(task, task.like, client, 9, 0.3, 5).weights, w)


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


@pytest.mark.parametrize("steps", [60, 150])  # the loss overflows before the weights do
def test_divergence_has_a_name(steps: int) -> None:
    task, clients = one_weight(1.0), [scalar_client(0, 1, 0), scalar_client(1, 100, 0)]
    with pytest.raises(NumericalError, match=r"client 1 .*diverged"):
        play(FedAvg(loss="mse", lr=0.1, local_steps=steps), task, clients)
    with pytest.raises(NumericalError, match="diverged"):
        play(Centralized(loss="mse", lr=0.1, local_steps=150), task, clients)


# Robust combinations.


def test_a_client_that_claims_many_samples_counts_for_three_where_updates_are_robust() -> None:
    clients = [*(scalar_client(i, 1.0, 3.0, n=10) for i in range(4)), scalar_client(4, 1.0, -3.0, n=10_000)]
    method = FedAvg(loss="mse", local_steps=1, lr=0.1, weighting="samples")
    plain, bounded = (
        float(play(method, one_weight(0.0, robust=Robust(updates=how)), clients)[0].state["weights"])
        for how in ("mean", "clip")
    )
    assert plain == pytest.approx(0.3 * (40 - 10_000) / 10_040)
    assert bounded == pytest.approx(0.3 * (40 - 30) / 70)


# Networks that train in another way than they predict.


def test_batch_normalisation_trains_as_in_plain_pytorch() -> None:
    model, (client,) = normalised(), small_clients(20)
    task = Task(model, 3, "ce")
    trained = train_locally(task, task.like, client, 7, 0.1, 100)
    reference = copy.deepcopy(model).train()
    optimiser = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(7):
        optimiser.zero_grad()
        nn.functional.cross_entropy(reference(client.x), client.y).backward()
        optimiser.step()
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    torch.testing.assert_close(trained.weights, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(trained.statistics[STATISTICS], statistics_of(reference)[STATISTICS], atol=1e-12, rtol=0)
    assert torch.equal(
        statistics_of(task.model)[STATISTICS], statistics_of(model)[STATISTICS]
    )  # the task's own are as they were
    with pytest.raises(ModelError, match="GroupNorm"):
        train_locally(task, task.like, small_clients(1)[0], 1, 0.1, 100)


def test_ntk_fl_leaves_statistics_as_they_came_and_says_so() -> None:
    model = normalised()
    load_statistics(model, {STATISTICS: torch.rand(16, dtype=torch.float64) + 0.5})
    fed = ntkfl.data.from_clients([(torch.randn(20, 5), torch.randint(0, 3, (20,))) for _ in range(3)],
                                  test=(torch.randn(9, 5), torch.arange(9) % 3))  # fmt: skip
    with pytest.warns(UserWarning, match=r"ntk-fl trains weights alone.* nn\.GroupNorm"):
        run = ntkfl.train(model, fed, NTKFL(), rounds=2, clients_per_round=3)
    assert torch.equal(statistics_of(run.model)[STATISTICS], statistics_of(model)[STATISTICS])


@pytest.mark.parametrize("name", ["fedavg", "centralized"])
def test_methods_of_local_training_train_batch_normalisation(name: str, tmp_path: Path) -> None:
    """Its statistics move towards the data's, in the model that is reported, and survive a checkpoint."""
    centres, clients = 3 * torch.randn(3, 5), []
    for _ in range(4):
        y = torch.randint(0, 3, (40,))
        clients.append((4 + centres[y] + torch.randn(40, 5), y))
    y = torch.arange(60) % 3
    fed = ntkfl.data.from_clients(clients, test=(4 + centres[y] + torch.randn(60, 5), y))
    method = METHODS[name](local_steps=10, **({"server_lr": 0.05} if name == "fedadam" else {}))
    model = normalised().float()
    options: dict[str, Any] = {"clients_per_round": 2, "seed": 0, "callbacks": []}
    whole = ntkfl.train(model, fed, method, rounds=6, out=tmp_path / "whole", **options)
    assert whole.history[-1]["test_accuracy"] > 0.8
    assert (statistics_of(whole.model)[STATISTICS] - statistics_of(model)[STATISTICS]).abs().max() > 0.1
    with torch.no_grad():
        right = (whole.model.eval()(fed.test[0]).argmax(1) == fed.test[1]).double().mean()
    assert float(right) == whole.history[-1]["test_accuracy"]
    ntkfl.train(model, fed, method, rounds=3, out=tmp_path / "parts", **options)
    ntkfl.train(model, fed, method, rounds=6, out=tmp_path / "parts", resume=True, **options)
    for file in ("history.jsonl", "model.safetensors"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_dropout_is_on_in_local_training_and_repeats() -> None:
    model = nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double().eval()
    task, (client,) = Task(model, 3, "ce"), small_clients(20)
    a, b = (train_locally(task, task.like, client, 3, 0.1, 100).weights for _ in range(2))
    assert torch.equal(a, b)
    other = ClientRound(0, client.x, client.y, Randomness.simulated(5))
    assert not torch.equal(train_locally(task, task.like, other, 3, 0.1, 100).weights, a)
    assert not any(m.training for m in task.model.modules())
