"""Averaging methods by hand: FedAvg, FedProx, FedNova, FedAdam, SCAFFOLD."""

from __future__ import annotations

import copy

import pytest
import torch

import ntkfl
import ntkfl.models
from ntkfl.errors import NumericalError
from ntkfl.methods import Centralized, FedAdam, FedAvg, FedNova, FedProx, Scaffold
from tests.methods.rounds import ask, gradient, one_weight, play, play_rounds, scalar_client, small_clients, small_task

# fedavg


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_one_full_step_of_equal_clients_is_one_central_step(loss: str) -> None:
    task, clients = small_task(loss), small_clients(9, 9, 9)
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    expected = task.like - 0.3 * gradient(task, task.like, x, y)
    federated, _ = play(FedAvg(loss=loss, lr=0.3, local_steps=1, batch_size=9), task, clients)
    pooled, _ = play(Centralized(loss=loss, lr=0.3, local_steps=1), task, clients)
    torch.testing.assert_close(federated.state["weights"], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(pooled.state["weights"], expected, atol=1e-12, rtol=0)
    at_start = task.losses(task.predict(task.like, x), y).mean()
    assert federated.train_loss == pytest.approx(float(at_start), rel=1e-6)
    assert pooled.train_loss == pytest.approx(float(at_start), rel=1e-6)


def test_by_default_it_is_the_mean_of_what_clients_send_however_long() -> None:
    """Against FedAvg written by hand, with one of four clients whose inputs, and so its update, are larger."""
    generator = torch.Generator().manual_seed(3)
    scales, labels = (1.0, 1.0, 1.0, 6.0), (12, 20, 9, 15)
    own = [
        (scale * torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator))
        for scale, n in zip(scales, labels, strict=True)
    ]
    fed = ntkfl.data.from_clients(own, test=own[0], classes=3)
    model = ntkfl.models.mlp(5, 4, 3).double()
    trained = ntkfl.train(model, fed, FedAvg(), rounds=3, callbacks=[]).model

    plain = copy.deepcopy(model)
    for _ in range(3):
        ends = []
        for x, y in own:
            local = copy.deepcopy(plain)
            descent = torch.optim.SGD(local.parameters(), lr=0.1)
            for _ in range(20):
                descent.zero_grad()
                torch.nn.functional.cross_entropy(local(x.double()), y).backward()
                descent.step()
            ends.append([p.detach() for p in local.parameters()])
        for p, *each in zip(plain.parameters(), *ends, strict=True):
            p.data = torch.stack(each).mean(0)
    for p, q in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-13, rtol=1e-13)


# fedprox


def test_no_pull_is_fedavg() -> None:
    task, clients = small_task(), small_clients(10, 25)
    options = {"lr": 0.3, "local_steps": 5, "batch_size": 8}
    prox, avg = (play_rounds(m, task, clients, 3) for m in (FedProx(mu=0, **options), FedAvg(**options)))
    assert torch.equal(prox["weights"], avg["weights"])


def test_three_steps_by_hand() -> None:
    w, lr, mu = 2.0, 0.1, 0.7
    ends = []
    for x, y in ((1.0, 0.0), (3.0, 3.0)):
        v = w
        for _ in range(3):
            v = v - lr * (x * (x * v - y) + mu * (v - w))
        ends.append(v)
    clients = [scalar_client(0, 1, 0), scalar_client(1, 3, 3)]
    outcome, _ = play(FedProx(loss="mse", lr=lr, mu=mu, local_steps=3), one_weight(w), clients)
    assert float(outcome.state["weights"]) == pytest.approx(sum(ends) / 2, abs=1e-12)


# fednova


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_equal_steps_are_fedavg(weighting: str) -> None:
    task, clients = small_task(), small_clients(10, 25, 40)
    options = {"lr": 0.3, "local_steps": 5, "batch_size": 8, "weighting": weighting}
    nova, avg = (play_rounds(method(**options), task, clients, rounds=3) for method in (FedNova, FedAvg))
    torch.testing.assert_close(nova["weights"], avg["weights"], atol=1e-12, rtol=0)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_round_by_hand(weighting: str) -> None:
    """Client m ends at w_m = y_m + (1 − lr)^τ_m (w − y_m)."""
    w, lr = 3.0, 0.1
    clients = [scalar_client(0, 1, -1), scalar_client(1, 1, 2, n=9)]
    p = (0.5, 0.5) if weighting == "uniform" else (0.1, 0.9)
    ends = [y + (1 - lr) ** tau * (w - y) for y, tau in ((-1, 2), (2, 18))]
    mean = sum(share * (w - end) / (lr * tau) for share, end, tau in zip(p, ends, (2, 18), strict=True))
    tau_eff = 2 * p[0] + 18 * p[1]
    method = FedNova(loss="mse", lr=lr, local_epochs=2, batch_size=1, weighting=weighting)
    outcome, log = play(method, one_weight(w), clients)
    assert float(outcome.state["weights"]) == pytest.approx(w - lr * tau_eff * mean, abs=1e-12)
    assert outcome.diagnostics["effective_steps"] == pytest.approx(tau_eff)
    assert [int(s.message.take("steps")) for s in log if s.way == "up"] == [2, 18]


def test_unequal_steps_do_not_move_the_optimum() -> None:
    clients = [scalar_client(0, 1, 0), scalar_client(1, 1, 1, n=9)]
    options = {"loss": "mse", "lr": 0.02, "local_epochs": 1, "batch_size": 1}
    nova = play_rounds(FedNova(**options), one_weight(0.3), clients, rounds=60)
    avg = play_rounds(FedAvg(**options), one_weight(0.3), clients, rounds=60)
    assert float(nova["weights"]) == pytest.approx(0.5, abs=0.03)
    assert float(avg["weights"]) == pytest.approx(0.9, abs=0.03)


# fedadam


def test_the_papers_two_rounds_by_hand() -> None:
    w, m, v = 2.0, 0.0, 1e-6
    method = FedAdam(loss="mse", lr=0.1, local_steps=1)
    task, clients = one_weight(w), [scalar_client(0, 1, 0), scalar_client(1, 3, 6)]
    state = method.start(task, task.like)
    for number in (1, 2):
        delta = 0.1 * (w + 3 * (3 * w - 6)) / 2
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        w = w - 0.01 * m / (v**0.5 + 1e-3)
        state = play(method, task, clients, state, number)[0].state
        assert float(state["weights"]) == pytest.approx(w, abs=1e-12)


def test_an_update_whose_square_overflows_is_refused() -> None:
    """It would hold the second moment at infinity, and every later step at zero, in silence."""
    task, clients = small_task(dtype=torch.float32), small_clients(3, 4, dtype=torch.float32)
    method = FedAdam()
    conversation = method.round(task, method.start(task, task.like), 1, [0, 1])
    next(conversation)
    replies = [ask(method, task, client) for client in clients]
    replies[0].arrays["weights"][0] = 1e30
    with pytest.raises(NumericalError, match="squared updates"):
        conversation.send(replies)


# scaffold


OPTIONS = {"lr": 0.3, "local_steps": 5, "batch_size": 8}


@pytest.mark.parametrize("cohorts", [[(0, 1, 2, 3)] * 3, [(0, 1), (2,), (1, 2, 3), (0, 3)]])
def test_control_is_the_mean_of_all_clients(cohorts: list[tuple[int, ...]]) -> None:
    task, clients = small_task(total_clients=4), small_clients(10, 25, 7, 12)
    method = Scaffold(**OPTIONS)
    state = method.start(task, task.like)
    for number, cohort in enumerate(cohorts, 1):
        state = play(method, task, [clients[i] for i in cohort], state, number)[0].state
        own = torch.stack([c.memory.get("control", torch.zeros_like(task.like)) for c in clients])
        torch.testing.assert_close(state["control"], own.mean(0), atol=1e-12, rtol=0)
        assert float(state["control"].norm()) > 1e-3


def test_two_rounds_by_hand() -> None:
    w, c, lr, steps, server_lr = 2.0, 0.0, 0.05, 3, 0.8
    data = ((1.0, 0.0), (3.0, 6.0))
    clients = [scalar_client(i, *sample) for i, sample in enumerate(data)]
    own = [0.0, 0.0]
    task = one_weight(w, total_clients=5)
    method = Scaffold(loss="mse", lr=lr, local_steps=steps, server_lr=server_lr)
    state = method.start(task, task.like)
    for number in (1, 2):
        ends, changes = [], []
        for i, (x, y) in enumerate(data):
            v = w
            for _ in range(steps):
                v = v - lr * (x * (x * v - y) - own[i] + c)
            new = own[i] - c + (w - v) / (steps * lr)
            ends.append(v)
            changes.append(new - own[i])
            own[i] = new
        w, c = w + server_lr * (sum(ends) / 2 - w), c + 2 / 5 * sum(changes) / 2
        state = play(method, task, clients, state, number)[0].state
        assert float(state["weights"]) == pytest.approx(w, abs=1e-12)
        assert float(state["control"]) == pytest.approx(c, abs=1e-12)


def test_it_finds_the_optimum_that_fedavg_misses() -> None:
    """½w² and ½(3w − 6)²: together least at 1.8; the clients' own optima, 0 and 2, have their mean at 1."""
    clients = [scalar_client(0, 1, 0), scalar_client(1, 3, 6)]
    options = {"loss": "mse", "lr": 0.1, "local_steps": 10}
    avg = play_rounds(FedAvg(**options), one_weight(0.5), clients, rounds=30)
    scaffold = play_rounds(Scaffold(**options), one_weight(0.5, total_clients=2), clients, rounds=60)
    assert float(scaffold["weights"]) == pytest.approx(1.8, abs=1e-6)
    assert abs(float(avg["weights"]) - 1.8) > 0.5
