"""TCT: its linearised network against autograd; federated averaging, then SCAFFOLD on a linear model, written out; and
where it ends up.
"""

from __future__ import annotations

import torch
from ntkfl_experiments.rivals.models import Convexified
from ntkfl_experiments.rivals.tct import TCT
from torch import Tensor, nn

from ntkfl.methods import ClientRound, FedAvg, Task
from ntkfl.tangent.parameters import call_with, flatten, unflatten
from tests.methods.rounds import DIMENSIONS, play, play_rounds, small_clients, small_task

LOCAL = {"lr": 0.3, "local_steps": 5, "batch_size": 8}
LINEAR = {"convex_lr": 0.02, "convex_steps": 7}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def test_features_are_derivatives_of_one_output_with_another_last_layer() -> None:
    model, x = Convexified(network(), 3), torch.randn(5, 4).double()
    single = nn.Sequential(*network()[:2], nn.Linear(6, 1)).double()
    with torch.no_grad():
        single[2].weight[0] = model.readout
        single[2].bias[0] = 0.0
    rows = []
    for one in x:
        single.zero_grad()
        single(one.unsqueeze(0)).sum().backward()
        rows.append(torch.cat([p.grad.flatten() for p in single.parameters()]))
    torch.testing.assert_close(model.features(x), torch.stack(rows))
    assert float(model.readout.abs().max()) <= 6**-0.5


def test_a_random_part_of_many_features() -> None:
    x, whole = torch.randn(5, 4).double(), Convexified(network(), 3)
    few, again = (Convexified(network(), 3, features=10) for _ in range(2))
    other = Convexified(network(), 3, features=10, seed=1)
    assert torch.equal(few.coordinates, again.coordinates)
    assert not torch.equal(few.coordinates, other.coordinates)
    place = {int(c): i for i, c in enumerate(whole.coordinates)}
    kept = whole.features(x)[:, [place[int(c)] for c in few.coordinates]]
    torch.testing.assert_close(few.features(x), kept)


def test_the_network_answers_until_the_linear_model_has_been_trained() -> None:
    plain, x = network(), torch.randn(5, 4).double()
    model = Convexified(network(), 3)
    torch.testing.assert_close(model(x), plain(x))
    theta = torch.randn_like(model.theta)
    flat = torch.cat([theta.reshape(-1), flatten(plain)])
    torch.testing.assert_close(call_with(model, unflatten(model, flat), x), model.features(x) @ theta)
    with torch.no_grad():
        model.theta.copy_(theta)
    torch.testing.assert_close(model(x), model.features(x) @ theta)


def convex_task(total_clients: int = 3) -> Task:
    return Task(Convexified(small_task().model, DIMENSIONS[1], 25), DIMENSIONS[1], "ce", total_clients=total_clients)


def problem(task: Task, w: Tensor, client: ClientRound) -> tuple[Tensor, Tensor]:
    """(Φ, Y) of a client at these flat weights."""
    phi = task.at(w).features(client.x)
    return phi, nn.functional.one_hot(client.y, DIMENSIONS[1]).to(phi) - 1 / DIMENSIONS[1]


def split(task: Task, w: Tensor) -> tuple[Tensor, Tensor]:
    shape = task.model.theta.shape
    return w[: shape.numel()].view(shape), w[shape.numel() :]


def test_first_rounds_are_fedavg_on_the_network() -> None:
    task, clients = convex_task(), small_clients(10, 25, 7)
    plain = Task(task.model.network, DIMENSIONS[1], "ce")
    one = play_rounds(TCT(train_rounds=3, **LOCAL), task, clients, rounds=3)["weights"]
    two = play_rounds(FedAvg(**LOCAL), plain, clients, rounds=3)["weights"]
    theta, network = split(task, one)
    torch.testing.assert_close(network, two, atol=1e-12, rtol=0)
    assert not bool(theta.any())


def test_then_scaffold_on_the_linear_model() -> None:
    """Written out in the weights, with cohorts that differ; all clients' control variates have the server's as mean."""
    task, clients = convex_task(total_clients=4), small_clients(10, 25, 7, 12)
    method = TCT(train_rounds=1, **LOCAL, **LINEAR)
    state = play(method, task, clients[:2])[0].state
    lr, K = LINEAR["convex_lr"], LINEAR["convex_steps"]
    theta, network = split(task, state["weights"])
    own = [torch.zeros_like(theta) for _ in clients]
    c = torch.zeros_like(theta)
    for number, cohort in enumerate([(0, 1), (1, 2, 3), (0, 3)], 2):
        ends, changes = [], []
        for i in cohort:
            phi, Y = problem(task, state["weights"], clients[i])
            v = theta.clone()
            for _ in range(int(K)):
                v = v - lr * (phi.mT @ (phi @ v - Y) / len(Y) - own[i] + c)
            new = own[i] - c + (theta - v) / (K * lr)
            ends.append(v)
            changes.append(new - own[i])
            own[i] = new
        theta, c = torch.stack(ends).mean(0), c + len(cohort) / 4 * torch.stack(changes).mean(0)
        state = play(method, task, [clients[i] for i in cohort], state, number)[0].state
        found, kept = split(task, state["weights"])
        torch.testing.assert_close(found, theta, atol=1e-10, rtol=0)
        torch.testing.assert_close(state["control"], c, atol=1e-10, rtol=0)
        torch.testing.assert_close(c, torch.stack(own).mean(0), atol=1e-10, rtol=0)
        assert torch.equal(kept, network)


def test_it_ends_at_the_optimum_of_all_clients_whatever_they_hold() -> None:
    """Clients of one label each; the mean of their own optima is elsewhere."""
    task, clients = convex_task(), small_clients(10, 12, 8)
    for client in clients:
        client.y = torch.full_like(client.y, client.id)
    method = TCT(train_rounds=1, convex_lr=0.3, convex_steps=40, **LOCAL)
    state = play_rounds(method, task, clients, rounds=1)
    each = [problem(task, state["weights"], client) for client in clients]

    def slope(theta: Tensor) -> float:
        return float(sum(phi.mT @ (phi @ theta - Y) / len(Y) for phi, Y in each).norm())

    alone = torch.stack([torch.linalg.pinv(phi) @ Y for phi, Y in each]).mean(0)
    for number in range(2, 82):
        state = play(method, task, clients, state, number)[0].state
    found = slope(split(task, state["weights"])[0])
    assert found < 0.05 * slope(torch.zeros_like(alone))
    assert found < 0.05 * slope(alone)
