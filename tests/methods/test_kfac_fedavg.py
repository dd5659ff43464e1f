"""K-FAC FedAvg against its three equations, played by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import MessageError, ModelError
from ntkfl.methods import ClientRound, KfacFedAvg, Task
from ntkfl.tangent import Sums
from ntkfl.tangent.flow import Metric
from ntkfl.tangent.parameters import flatten
from ntkfl.tangent.sums import GRADIENT, SAMPLES
from tests.methods.rounds import play, small_clients, small_task


def federation() -> tuple[Task, list[ClientRound]]:
    return small_task(), small_clients(30, 12, 21)


EXACT = {"values": "float32", "batch_size": 1000, "local_epochs": 1}


def gradient(task: Task, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    model = task.at(w)
    loss = nn.functional.cross_entropy(model(x), y)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])


def metric_of(state: dict[str, Tensor], method: KfacFedAvg, w: Tensor) -> Metric:
    factors = {n.removeprefix("metric/"): t for n, t in state.items() if n.startswith("metric/")}
    return Metric(Sums(factors | {SAMPLES: w.new_ones(()), GRADIENT: torch.zeros_like(w)}), method.damping)


@pytest.mark.parametrize("kl", [1e-4, 1e9])
def test_one_full_batch_step_of_every_client(kl: float) -> None:
    """w + Σ n_m η_m (−P g_m) / N with P of the first exchange: equations (1) and (2), and the bound on η."""
    method = KfacFedAvg(kl=kl, **EXACT)
    task, clients = federation()
    state = method.start(task, task.like)
    first, _ = play(method, task, clients, state)
    w, N = task.like, sum(len(c) for c in clients)
    # The state after a round has the mean of two draws of one metric; a method of one draw has it alone.
    conversation = method.round(task, state, 1, [c.id for c in clients])
    question = next(conversation)
    replies = [method.replies["curvature"].parse(method.answer(task, question, c).message(1), task) for c in clients]
    question = conversation.send(replies)
    P = metric_of(question.arrays, method, w)
    expected = w.clone()
    for client in clients:
        g = gradient(task, w, client.x, client.y)
        step = min(1.0, (2 * kl / float(g @ P(g))) ** 0.5)
        assert 0.5 * step**2 * float(g @ P(g)) <= kl * (1 + 1e-5)
        expected -= len(client) / N * step * P(g)
    assert torch.allclose(first.state["weights"], expected, rtol=1e-4, atol=1e-6)


def test_the_next_metric_is_half_of_this_one_and_half_of_the_rounds_factors() -> None:
    """Equation (3); only the first round asks for factors beforehand."""
    method, (task, clients) = KfacFedAvg(values="float32"), federation()
    first, log = play(method, task, clients)
    assert [m.kind for m in log if m.way == "down" and m.client == clients[0].id] == ["curvature", "weights"]
    second, log = play(method, task, clients, first.state, 2)
    assert [m.kind for m in log if m.way == "down" and m.client == clients[0].id] == ["weights"]
    N = sum(len(c) for c in clients)
    for name in first.state.keys() - {"weights"}:
        sent = [m.message.take(name.removeprefix("metric/")) for m in log if m.way == "up"]
        expected = 0.5 * first.state[name] + 0.5 * torch.stack(sent).sum(0) / N
        assert torch.allclose(second.state[name], expected, rtol=1e-5, atol=1e-7)


def test_half_precision_changes_little_and_takes_half_the_bytes() -> None:
    task, clients = federation()
    ends, sizes = {}, {}
    for values in ("float16", "float32"):
        outcome, log = play(KfacFedAvg(values=values, kl=1e-4), task, clients)
        ends[values], sizes[values] = outcome.state["weights"], sum(m.size for m in log)
    moved = ends["float32"] - flatten(task.model)
    assert float((ends["float16"] - ends["float32"]).norm()) < 0.05 * float(moved.norm())
    assert sizes["float16"] < 0.6 * sizes["float32"]


def test_batch_normalisation_is_refused() -> None:
    normed = Task(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), 3, "ce")
    with pytest.raises(ModelError, match=r"nn\.GroupNorm"):
        KfacFedAvg().start(normed, normed.like)


def test_a_metric_of_another_network_is_refused() -> None:
    method, (task, clients) = KfacFedAvg(values="float32"), federation()
    state = play(method, task, clients)[0].state
    factors = {name: array for name, array in state.items() if name != "weights"}
    beyond = {name.replace("metric/42-", "metric/420-"): array for name, array in factors.items()}
    for arrays in (beyond, dict(list(factors.items())[2:])):
        with pytest.raises(MessageError):
            method.answer(task, method.question("weights", 2, {"weights": state["weights"], **arrays}), clients[0])


def test_it_leads_fedavg_on_clients_of_few_classes() -> None:
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=10, alpha=0.1), seed=3)
    found = []
    for method in (KfacFedAvg(), ntkfl.methods.FedAvg(local_epochs=2, batch_size=50)):
        torch.manual_seed(3)
        model = ntkfl.models.mlp(64, 32, 10)
        run = ntkfl.train(model, fed, method, rounds=6, clients_per_round=5, seed=3, callbacks=[])
        found.append(run.history[-1]["test_accuracy"])
    assert found[0] > found[1] + 0.1
