"""NTK-FL from sums: what a round computes, on every kind of network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.methods import ClientRound, SumNTKFL, Task
from ntkfl.tangent import Flow, curvature_sums
from ntkfl.tangent.losses import per_sample
from tests.methods.rounds import dealt, play, play_rounds, pooled, small_clients, small_task

D, HIDDEN, OUT = 5, 7, 3


def test_a_linear_head_begins_with_the_ridge_solution() -> None:
    """From zero, with δ → 0: K/μ times least squares of one-hot targets; later rounds lower the loss further."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (90,), generator=generator)
    x = torch.randn(90, 5, generator=generator, dtype=torch.float64) + nn.functional.one_hot(y, 5)
    head = nn.Linear(5, 3).double()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    task, clients = Task(head, 3, "ce"), dealt(x, y, list(torch.arange(90).split(30)))
    method = SumNTKFL(linear_head=True, delta=0)
    assert (method.mu, method.time, method.average, method.largest) == (2.0, None, 0.0, 4096)
    assert SumNTKFL(linear_head=True, mu=5).mu == 5
    with pytest.raises(ConfigError, match="a last linear layer alone trains"):
        method.start(small_task("ce"), small_task("ce").like)
    outcome, _ = play(method, task, clients)
    a = torch.cat([x, torch.ones(90, 1, dtype=torch.float64)], 1)
    expected = 3 / 2 * torch.linalg.lstsq(a, nn.functional.one_hot(y, 3).double() - 1 / 3).solution
    found = outcome.state["weights"]
    torch.testing.assert_close(found[:15].view(3, 5).mT, expected[:-1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found[15:], expected[-1], rtol=1e-6, atol=1e-9)
    for child in clients:
        child.memory.clear()
    later = play_rounds(method, task, clients, 3)["weights"]
    losses = [float(task.losses(task.predict(w, x), y).mean()) for w in (task.like, found, later)]
    assert losses == sorted(losses, reverse=True)


def test_a_round_is_the_flow_of_the_pooled_data_however_they_are_dealt() -> None:
    task = small_task(label_smoothing=0.1)
    method = SumNTKFL(values="float32", step_limit=0)  # which compares clients, and so knows how they are dealt
    x, y = pooled(small_clients(30, 12, 21))
    Y = task.training_targets(y)
    sums = curvature_sums(task.at(task.like), x, Y, "ce", task.plan(x))
    loss = float(per_sample("ce", task.predict(task.like, x), Y).mean())
    expected = task.like + Flow(sums).change(method.time, method.mu, method.delta)
    everyone = torch.arange(len(y))
    ways = [[everyone], [everyone[y == c] for c in range(OUT)], list(everyone.split(1))]
    for rows in ways:
        outcome, log = play(method, task, dealt(x, y, rows))
        assert float((outcome.state["weights"] - expected).norm()) <= 1e-10 * float(expected.norm())
        assert outcome.train_loss == pytest.approx(loss, rel=1e-12)
        assert [s.way for s in log].count("up") == len(rows)  # one exchange
        assert outcome.diagnostics["samples"] == len(y)


def test_one_round_is_ridge_regression_for_a_model_linear_in_its_weights() -> None:
    """The pooled solution from one message per client, whatever each of them holds: AFL's."""
    torch.manual_seed(0)
    task = Task(nn.Linear(5, 3).double(), 3, "mse")
    x, y = torch.randn(40, 5).double(), torch.randn(40, 3).double()
    clients = dealt(x, y, list(torch.arange(40).split([1, 7, 32])))
    X = torch.cat([x, torch.ones(40, 1).double()], dim=1)
    W = torch.cat([task.like[:15].view(3, 5).T, task.like[15:].view(1, 3)])
    for delta in (0.0, 0.2):
        method = SumNTKFL(loss="mse", mu=1, delta=delta, time=None, values="float32", step_limit=0)
        weights = play(method, task, clients)[0].state["weights"]
        left = X.T @ X / (40 * 3) + delta * torch.eye(6).double()
        solved = torch.linalg.solve(left, X.T @ y / (40 * 3) + delta * W)
        found = torch.cat([weights[:15].view(3, 5).T, weights[15:].view(1, 3)])
        assert torch.allclose(found, solved, atol=1e-9)


def test_no_time_no_change() -> None:
    task = small_task()
    assert torch.equal(play(SumNTKFL(time=0), task, small_clients(8))[0].state["weights"], task.like)


def test_frozen_weights_stay_and_the_others_flow_as_if_alone() -> None:
    """The frozen first layer as part of the network, and as part of the data, give the same round."""
    task, clients = small_task(), small_clients(30, 12)
    first, act, last = task.model.children()
    first.requires_grad_(False)
    whole, head = Task(task.model, OUT, "ce"), Task(last, OUT, "ce")
    seen = [ClientRound(c.id, act(first(c.x)).detach(), c.y, c.randomness) for c in clients]
    method = SumNTKFL()
    ends = [play(method, t, c)[0].state["weights"] for t, c in ((whole, clients), (head, seen))]
    assert torch.allclose(*ends, rtol=1e-9)
    assert len(ends[0]) == (HIDDEN + 1) * OUT


class Adapted(nn.Module):
    """A frozen linear layer beside two small ones, as low-rank adapters have it: W x + B (A x), from B = 0."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def test_low_rank_adapters_learn_around_a_frozen_network() -> None:
    torch.manual_seed(0)
    first, last = Adapted(nn.Linear(D, HIDDEN), 2), Adapted(nn.Linear(HIDDEN, OUT), 2)
    x = torch.randn(90, D)
    y = x[:, :OUT].argmax(1)
    fed = ntkfl.data.from_clients([(x[i::3], y[i::3]) for i in range(3)], test=(x, y))
    model = nn.Sequential(first, nn.Tanh(), last)
    run = ntkfl.train(model, fed, SumNTKFL(average=0), rounds=6, clients_per_round=3, callbacks=[])
    assert run.history[-1]["train_loss"] < 0.8 * run.history[0]["train_loss"]
    after = dict(run.model.named_parameters())
    for name, before in model.named_parameters():
        assert torch.equal(before, after[name]) == ("base" in name)


def test_regression_from_end_to_end() -> None:
    """Real targets and a nonlinear network: the error falls towards the noise that was put on them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    clean = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2].tanh()], dim=1)
    y = clean + 0.1 * torch.randn(400, 2, generator=generator)
    fed = ntkfl.data.from_clients([(x[i:320:8], y[i:320:8]) for i in range(8)], test=(x[320:], clean[320:]))
    torch.manual_seed(0)
    method = SumNTKFL(loss="mse", mu=4, average=0)
    run = ntkfl.train(ntkfl.models.mlp(3, 40, 2), fed, method, rounds=15, clients_per_round=8, callbacks=[])
    assert run.history[-1]["test_loss"] < 0.2 * run.history[0]["test_loss"]
    assert all(record["test_accuracy"] is None for record in run.history)


@pytest.mark.parametrize("name", ntkfl.models.MODELS)
def test_every_network_of_the_package(name: str) -> None:
    torch.manual_seed(0)
    shapes = {
        "cnn": (1, 12, 12),
        "resnet": (1, 12, 12),
        "mlp": (5,),
        "gru": (6, 5),
        "transformer": (6,),
    }
    options: dict[str, Any] = {"vocabulary": 20} if name == "transformer" else {}
    x = torch.randint(0, 20, (24, 6)) if name == "transformer" else torch.randn(24, *shapes[name])
    task, y = Task(ntkfl.models.MODELS[name](shapes[name], 3, **options), 3, "ce"), torch.arange(24) % 3
    cautious = SumNTKFL(delta=3.0)  # short enough a step to descend on any network: the direction is what is tested
    state = play_rounds(cautious, task, dealt(x, y, list(torch.arange(24).split(9))), 2)
    before, after = (task.losses(task.predict(w, x), y).mean() for w in (task.like, state["weights"]))
    assert after < before
