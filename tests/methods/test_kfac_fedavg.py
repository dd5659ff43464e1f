"""K-FAC FedAvg against its three equations, played by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import MessageError, ModelError
from ntkfl.methods import ClientRound, KfacFedAvg, Task
from ntkfl.methods.base import fitted
from ntkfl.methods.sums.kfac_fedavg import weighed
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


def local_ends(method: KfacFedAvg, task: Task, clients: list[ClientRound]) -> list[Tensor]:
    """v_m of one full-batch step of every client, by hand: w − min(1, √(2κ / gᵀP g)) P g, P of the first exchange."""
    conversation = method.round(task, method.start(task, task.like), 1, [c.id for c in clients])
    question = next(conversation)
    replies = [method.replies["curvature"].parse(method.answer(task, question, c).message(1), task) for c in clients]
    P, ends = metric_of(conversation.send(replies).arrays, method, task.like), []
    for client in clients:
        g = gradient(task, task.like, client.x, client.y)
        step = min(1.0, (2 * method.kl / float(g @ P(g))) ** 0.5)
        assert 0.5 * step**2 * float(g @ P(g)) <= method.kl * (1 + 1e-5)
        ends.append(task.like - step * P(g))
    return ends


@pytest.mark.parametrize("kl", [1e-4, 1e9])
def test_without_weighing_the_server_takes_the_mean_of_where_steps_end(kl: float) -> None:
    """ρ → ∞ in equation (2): 1/N Σ n_m v_m."""
    method, (task, clients) = KfacFedAvg(kl=kl, mixing=1e9, **EXACT), federation()
    N = sum(len(c) for c in clients)
    expected = sum(len(c) / N * v for c, v in zip(clients, local_ends(method, task, clients), strict=True))
    first = play(method, task, clients)[0]
    assert torch.allclose(first.state["weights"], expected, rtol=1e-4, atol=1e-6)


def test_changes_are_weighed_by_the_inputs_of_whoever_sends_them() -> None:
    """(2) of each layer is the least-squares solution W of W a = V_m a for the inputs a that client m has, with
    √(n_m ρ s) (W − V_m) beside them: solved here without any factor.
    """
    rho = 0.1
    method, (task, clients) = KfacFedAvg(kl=1e9, mixing=rho, **EXACT), federation()
    ends, first = local_ends(method, task, clients), play(method, task, clients)[0].state["weights"]
    model, start = task.at(task.like), 0
    for layer in (model[0], model[2]):
        inputs = [c.x if start == 0 else model[:2](c.x).detach() for c in clients]
        inputs = [torch.cat([a, a.new_ones(len(a), 1)], dim=1) for a in inputs]
        s = torch.cat(inputs).square().sum(1).mean() / inputs[0].shape[1]
        n, m = layer.weight.shape
        stop = start + n * m + n
        rows, wanted = [], []
        for a, v in zip(inputs, ends, strict=True):
            V = torch.cat([v[start : start + n * m].view(n, m), v[start + n * m : stop].view(n, 1)], dim=1)
            seen = torch.cat([a, (len(a) * rho * s) ** 0.5 * torch.eye(m + 1, dtype=a.dtype)])
            rows.append(seen)
            wanted.append(seen @ V.T)
        W = torch.linalg.lstsq(torch.cat(rows), torch.cat(wanted)).solution.T
        expected = torch.cat([W[:, :-1].reshape(-1), W[:, -1]])
        assert torch.allclose(first[start:stop], expected, rtol=1e-6, atol=1e-9)
        start = stop


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


def test_weights_are_averaged_where_only_some_clients_are_asked() -> None:
    task, _ = federation()
    averages = [
        fitted(KfacFedAvg(**given), task.model, 3, all_).average
        for given in ({}, {"average": 0.5})
        for all_ in (False, True)
    ]
    assert averages == [0.8, 0.0, 0.5, 0.5]


def test_what_clients_send_cannot_make_the_servers_division_blow_up() -> None:
    """Factors with eigenvalues below zero, as one client can add: no direction grows more than 1/ρ."""
    method, (task, clients) = KfacFedAvg(values="float32"), federation()
    state = play(method, task, clients)[0].state
    known = {name.removeprefix("metric/"): a for name, a in state.items() if name.startswith("metric/")}
    metric = Sums(known | {SAMPLES: task.like.new_ones(())})
    bad = Sums({name: a if name == SAMPLES else -0.1 * a for name, a in metric.arrays.items()})
    change = torch.randn_like(task.like)
    assert float(weighed(change, bad, metric, 0.1, inverse=True).norm()) <= 10.001 * float(change.norm())
    there_and_back = weighed(weighed(change, metric, metric, 0.1), metric, metric, 0.1, inverse=True)
    assert torch.allclose(there_and_back, change, rtol=1e-6, atol=1e-8)
