"""What every method must do, whatever its paper."""

from __future__ import annotations

import copy

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from ntkfl.methods import METHODS, ClientRound, Method, Task
from ntkfl.privacy.randomness import Randomness
from tests.methods.rounds import DIMENSIONS, Sent, play, small_clients, small_task

OPTIONS: dict[str, dict[str, object]] = {
    "fedadam": {"server_lr": 0.05},
    "private-sums": {"epsilon": None, "clip": 1.0, "lr": 0.3},  # its noise is tested beside it
    "private-ridge": {"epsilon": None},
    "dp-fedavg": {"epsilon": None, "clip": 10.0},
}
VARIANTS = [
    *((name, {}) for name in METHODS),
    ("fedadam", {"bias_correction": True}),
    ("fednova", {"local_epochs": 2, "batch_size": 5}),
    ("ntk-fl", {"codec": "dense"}),
    ("ntk-fl", {"sparsity": 0.5, "values": "float16"}),
    ("sum-ntk-fl", {"values": "float32", "largest": 4}),
    ("sum-ridge", {"keep_shares": True}),
]
NTK = ("ntk-fl", "cp-ntk-fl", "sum-ntk-fl", "private-sums", "sum-ridge", "private-ridge")
IDS = [" ".join([name, *map(str, options)]) for name, options in VARIANTS]
every_method = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)


def build(name: str, options: dict[str, object], **more: object) -> Method:
    steps = {} if name in NTK else {"local_steps": 8}
    return METHODS[name](**(steps | OPTIONS.get(name, {}) | options | more))


def shared(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    (client,) = small_clients(9, dtype=dtype, seed=5)
    return client.x, client.y


def mean_loss(task: Task, w: Tensor, clients: list[ClientRound]) -> float:
    return float(torch.stack([task.losses(task.predict(w, c.x), c.y).mean() for c in clients]).mean())


@every_method
@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_three_rounds_train(name: str, options: dict[str, object], loss: str) -> None:
    task = small_task(loss, torch.float32, shared=shared(torch.float32), total_clients=3)
    clients = small_clients(30, 12, 21, dtype=torch.float32)
    method = build(name, options, loss=loss)
    state = method.start(task, task.like)
    losses = [mean_loss(task, task.like, clients)]
    for number in (1, 2, 3):
        outcome, log = play(method, task, clients, state, number)
        state = outcome.state
        losses.append(mean_loss(task, state["weights"], clients))
        assert state["weights"].dtype == torch.float32
        if name in ("private-sums", "private-ridge", "dp-fedavg"):
            assert outcome.train_loss is None  # a loss would cost privacy of its own
        else:
            assert 0 < outcome.train_loss < 1.5 * losses[0]
        assert {s.client for s in log if s.way == "up"} == {0, 1, 2}
    assert losses[-1] < 0.99 * losses[0]


@every_method
def test_real_targets(name: str, options: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(0)
    clients = small_clients(30, 12)
    for client in clients:
        client.y = torch.randn(len(client), DIMENSIONS[1], generator=generator, dtype=torch.float64)
    task = small_task("mse", shared=(clients[0].x[:4], clients[0].y[:4]), total_clients=2)
    outcome, _ = play(build(name, options, loss="mse"), task, clients)
    assert mean_loss(task, outcome.state["weights"], clients) < mean_loss(task, task.like, clients)


@every_method
def test_convolutions(name: str, options: dict[str, object]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 9, 3))
    clients = [
        ClientRound(i, torch.randn(6 + i, 1, 5, 5), torch.arange(6 + i) % 3, Randomness.simulated(i)) for i in range(2)
    ]
    task = Task(model, 3, "ce", shared=(clients[0].x[:2], clients[0].y[:2]), total_clients=2)
    outcome, _ = play(build(name, options), task, clients)
    assert outcome.state["weights"].shape == task.like.shape
    assert not torch.equal(outcome.state["weights"], task.like)


@every_method
def test_a_run_can_be_broken_off_and_continued(name: str, options: dict[str, object]) -> None:
    """State and memories survive a file, and with them the rounds that follow are the same to the bit."""
    method = build(name, options, **({} if name in (*NTK, "centralized") else {"batch_size": 5}))
    task, clients = small_task(shared=shared(), total_clients=4), small_clients(30, 12, 21, 8)
    state = method.start(task, task.like)
    logs: list[list[Sent]] = []
    for number, cohort in enumerate([(0, 1), (1, 2), (0, 1, 3), (2, 3)], 1):
        if number == 3:
            tensors = {f"state/{k}": t for k, t in state.items()}
            tensors |= {f"{c.id}/{k}": t for c in clients for k, t in c.memory.items()}
            loaded = safetensors.torch.load(safetensors.torch.save(tensors))
            other_state = {k: loaded[f"state/{k}"] for k in state}
            others = [replaced(c, {k: loaded[f"{c.id}/{k}"] for k in c.memory}) for c in clients]
        outcome, log = play(method, task, [clients[i] for i in cohort], state, number)
        state = outcome.state
        if number >= 3:
            resumed, other_log = play(method, task, [others[i] for i in cohort], other_state, number)
            other_state = resumed.state
            assert [s[:4] for s in log] == [s[:4] for s in other_log]
            assert all(torch.equal(state[k], other_state[k]) for k in state)
        logs.append(log)
    assert torch.isfinite(state["weights"]).all()


def replaced(client: ClientRound, memory: dict[str, Tensor]) -> ClientRound:
    other = copy.copy(client)
    other.memory = memory
    return other


def test_names_and_papers() -> None:
    assert set(METHODS) >= {
        "fedavg", "fedprox", "fednova", "scaffold", "fedadam", "fedcom", "qsgd", "data-share", "centralized", "ntk-fl",
        "cp-ntk-fl", "sum-ntk-fl", "sum-ridge", "private-ridge",
    }  # fmt: skip
    for name, method in METHODS.items():
        assert method.name == name
        assert method.paper
