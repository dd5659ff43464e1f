"""NTK-FL from sums: what a round computes, against dense algebra and autograd on the pooled data."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from ntkfl_experiments import networks
from torch import Tensor, nn

import ntkfl
from ntkfl.methods import ClientRound, SumNTKFL, Task
from ntkfl.methods.base import fitted
from ntkfl.options import written
from ntkfl.privacy.settings import Privacy
from ntkfl.tangent import Flow, Sums, curvature_sums
from ntkfl.tangent.curvature import step_curvature
from ntkfl.tangent.losses import per_sample
from tests.methods.rounds import convolutional, dealt, play, play_rounds, pooled, small_clients, small_task
from tests.tangent.test_curvature import blocks

D, HIDDEN, OUT = 5, 7, 3


class Unlimited(SumNTKFL):
    """Without the limit on single clients: it compares them, so that a round knows how samples are dealt."""

    fisher: Literal["mc", "exact"] = "exact"
    step_limit: ClassVar[float] = 0.0


def sums_at(task: Task, w: Tensor, clients: list[ClientRound]) -> Sums:
    x, y = pooled(clients)
    return curvature_sums(task.at(w), x, task.training_targets(y), task.loss, task.plan(x))


def dense(sums: Sums) -> tuple[Tensor, Tensor]:
    """The mean gradient [d], and A ⊗ G of all layers as one matrix [d, d]."""
    g = sums.arrays["gradient"] / sums.arrays["samples"]
    C = torch.zeros(len(g), len(g)).to(g)
    for shaped in sums.layers():
        for columns, kronecker in blocks(sums, shaped):
            C[columns.unsqueeze(1), columns] = kronecker.to(g)
    return g, C


def step_by_dense_algebra(sums: Sums, method: SumNTKFL, unit: float, times: float = 1.0) -> tuple[Tensor, float]:
    """(−s φ(t(μC + δ)) g with μ ΔᵀCΔ ≤ 2 `unit`, s), with `times` μ and δ and a bound as much smaller."""
    g, C = dense(sums)
    mu, delta = times * method.mu, times * method.delta
    values, vectors = torch.linalg.eigh(mu * C + delta * torch.eye(len(g)).to(g))
    assert method.time is not None
    phi = -torch.expm1(-method.time * values) / values
    change = -vectors @ (phi * (vectors.T @ g))
    s = min(1.0, math.sqrt(2 * unit / times / float(mu * change @ C @ change)))
    return s * change, s


def mean_loss(task: Task, w: Tensor, clients: list[ClientRound]) -> float:
    x, y = pooled(clients)
    return float(per_sample(task.loss, task.predict(w, x), task.training_targets(y)).mean())


def test_a_round_is_the_flow_of_the_pooled_data_however_they_are_dealt() -> None:
    task = small_task(label_smoothing=0.1)
    method, (x, y) = Unlimited(values="float32"), pooled(small_clients(30, 12, 21))
    loss = mean_loss(task, task.like, small_clients(30, 12, 21))
    flow = Flow(sums_at(task, task.like, small_clients(30, 12, 21)))
    expected = task.like + flow.change(method.time, method.mu, method.delta)
    everyone = torch.arange(len(y))
    for rows in [[everyone], [everyone[y == c] for c in range(OUT)], list(everyone.split(1))]:
        outcome, log = play(method, task, dealt(x, y, rows))
        assert float((outcome.state["weights"] - expected).norm()) <= 1e-10 * float(expected.norm())
        assert outcome.train_loss == pytest.approx(loss, rel=1e-12)
        assert [s.way for s in log].count("up") == len(rows)  # one exchange
        assert outcome.diagnostics["samples"] == len(y)
    assert torch.equal(
        play(SumNTKFL(fisher="exact", time=0), task, dealt(x, y, [everyone]))[0].state["weights"], task.like
    )


def test_one_round_is_ridge_regression_for_a_model_linear_in_its_weights() -> None:
    """The pooled solution from one message per client, whatever each of them holds: AFL's."""
    task = Task(nn.Linear(5, 3).double(), 3, "mse")
    x, y = torch.randn(40, 5).double(), torch.randn(40, 3).double()
    clients = dealt(x, y, list(torch.arange(40).split([1, 7, 32])))
    X = torch.cat([x, torch.ones(40, 1).double()], dim=1)
    W = torch.cat([task.like[:15].view(3, 5).T, task.like[15:].view(1, 3)])
    for delta in (0.0, 0.2):
        method = Unlimited(loss="mse", mu=1, delta=delta, time=None, values="float32")
        weights = play(method, task, clients)[0].state["weights"]
        left = X.T @ X / (40 * 3) + delta * torch.eye(6).double()
        solved = torch.linalg.solve(left, X.T @ y / (40 * 3) + delta * W)
        found = torch.cat([weights[:15].view(3, 5).T, weights[15:].view(1, 3)])
        assert torch.allclose(found, solved, atol=1e-9)


def test_a_linear_head_begins_with_the_ridge_solution() -> None:
    """From zero, with δ → 0: K/μ times least squares of one-hot targets; later rounds lower the loss further."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (90,), generator=generator)
    x = torch.randn(90, 5, generator=generator, dtype=torch.float64) + nn.functional.one_hot(y, 5)
    head = nn.Linear(5, 3).double()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    task, clients = Task(head, 3, "ce"), dealt(x, y, list(torch.arange(90).split(30)))
    method = fitted(SumNTKFL(fisher="exact", delta=0), head, 3, everyone=True)
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

    said = "average = 0, label_smoothing = 0, values = float32, time = none, mu = 2, largest = 4096, fisher = exact"
    assert task.notes[0] == f"only a last linear layer trains: {said}"


def test_what_was_given_is_kept_whatever_the_network() -> None:
    head, deep, given = nn.Linear(5, 3), small_task().model, SumNTKFL(fisher="exact", mu=7.0, time=200.0)
    assert fitted(given, deep, 3, everyone=True) is fitted(given, head, 3, everyone=False) is given
    assert written(fitted(given, head, 3, everyone=True)) == written(given) | {
        "average": 0.0, "label_smoothing": 0.0, "values": "float32", "delta": 1e-4, "largest": 4096,
    }  # fmt: skip

    class Stiff(SumNTKFL):
        mu: float = 100.0

    assert fitted(Stiff(), head, 3, everyone=True).mu == 100  # type: ignore[attr-defined]


# -- How far a step goes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "larger", "mu", "short"),
    [
        ("ce", 1.0, 12.0, False),
        ("ce", 1.0, 0.02, True),
        ("ce", 30.0, 0.02, True),  # a loss far above 1 nat, and the bound stays at that
        ("mse", 1.0, 12.0, False),
        ("mse", 1.0, 0.05, True),
        ("mse", 30.0, 0.05, True),  # and here there is no unit: twice the loss, however large
    ],
)
def test_a_step_is_shortened_until_its_model_promises_no_loss_below_zero(
    loss: str, larger: float, mu: float, short: bool
) -> None:
    task, clients = small_task(loss), small_clients(30, 12, 21)
    method = Unlimited(loss=loss, mu=mu, delta=1e-4, label_smoothing=0, values="float32")
    w = larger * task.like
    L = mean_loss(task, w, clients)
    assert larger == 1 or L > 2
    change, s = step_by_dense_algebra(sums_at(task, w, clients), method, L if loss == "mse" else min(L, 1))
    assert (s < 0.95) == short
    assert s == 1 or short
    outcome, _ = play(method, task, clients, method.start(task, w))
    assert float((outcome.state["weights"] - w - change).norm()) <= 1e-8 * float(change.norm())
    assert outcome.train_loss == pytest.approx(L, rel=1e-12)
    assert "taken_back" not in outcome.diagnostics


@pytest.mark.parametrize("mu", [1.0, 1e-3, 1e4])
def test_mu_is_measured_where_positions_share_weights(mu: float) -> None:
    """μ is what the step's own curvature is to that of the factored form, with one more exchange of one number."""
    task, clients = convolutional()
    method = Unlimited(values="float32", mu=mu)
    outcome, log = play(method, task, clients)
    assert [s.kind for s in log if s.client == 0] == ["weights", "sums", "candidates", "sums"]
    assert all("curvature" not in s.message.arrays or s.size < 100 for s in log if s.way == "up")
    x, y = pooled(clients)
    sums = sums_at(task, task.like, clients)
    change = next(s.message for s in log if s.kind == "candidates").take("change")
    L = min(1.0, mean_loss(task, task.like, clients))
    expected, s = step_by_dense_algebra(sums, method, L)
    assert float((change - expected).norm()) <= 1e-7 * float(change.norm())
    assert (s < 1) == (mu < 1)
    _, C = dense(sums)
    met = float(step_curvature(task.at(task.like), x, task.training_targets(y), change, "ce", task.plan(x)))
    ratio = met / len(x) / float(change @ C @ change)
    assert outcome.diagnostics["mu"] == pytest.approx(max(mu, ratio), rel=1e-7)
    assert (ratio > 2 * mu) == (mu <= 1)  # what a fixed one lacks here
    again = method.model_copy(update={"mu": max(mu, ratio)})
    expected, _ = step_by_dense_algebra(sums, again, L)
    moved = outcome.state["weights"] - task.like
    assert float((moved - expected).norm()) <= 1e-6 * float(moved.norm())
    assert float(outcome.state["mu"]) == outcome.diagnostics["mu"]  # from which the next round starts


def test_mu_is_not_measured_where_factors_are_whole_and_positions_share_nothing() -> None:
    def exchanges(**options: Any) -> int:
        return len(play(SumNTKFL(fisher="exact", **options), small_task(), small_clients(9))[1]) // 2

    assert exchanges() == 1
    assert exchanges(largest=5) == 2  # sketches lose curvature, too


# -- Curvature of one's own --------------------------------------------------------------------------------------------


def test_the_example_has_the_exact_block_of_the_last_layer() -> None:
    """examples/own_curvature.py: Σ JᵀHJ by autograd, and the step that dense algebra makes of it; masked as well."""
    path = Path(__file__).parents[2] / "examples" / "own_curvature.py"
    assert len(path.read_text().splitlines()) <= 30
    kind: type[SumNTKFL] = runpy.run_path(str(path))["ExactLastLayer"]
    kind.step_limit = 0.0
    method, task, clients = (
        kind(values="float32", label_smoothing=0, fisher="exact"),
        small_task(),
        small_clients(30, 12, 21),
    )
    outcome, _ = play(method, task, clients)
    x, y = pooled(clients)
    g, C = dense(sums_at(task, task.like, clients))

    def loss(w: Tensor) -> Tensor:
        hidden = torch.tanh(x @ task.like[:35].view(7, 5).T + task.like[35:42])
        return nn.functional.cross_entropy(hidden @ w[:21].view(3, 7).T + w[21:], y)

    last = slice(42, 66)
    C[last, :] = C[:, last] = 0
    C[last, last] = torch.func.hessian(loss)(
        task.like[last]
    )  # linear in the last layer: the Gauss–Newton matrix itself
    values, vectors = torch.linalg.eigh(method.mu * C + method.delta * torch.eye(len(g)).to(g))
    change = -vectors @ (-torch.expm1(-200.0 * values) / values * (vectors.T @ g))
    assert float((outcome.state["weights"] - task.like - change).norm()) <= 1e-8 * float(change.norm())

    digits = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=4), seed=0)
    torch.manual_seed(0)
    model = ntkfl.models.mlp(64, 8, 10)
    plain, masked = (
        ntkfl.train(model, digits, method, rounds=3, privacy=Privacy(secure_sum=secure), callbacks=[]).history[-1]
        for secure in (False, True)
    )
    assert masked["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-3)
    assert masked["bounded_clients"] == 0


# -- Any network -------------------------------------------------------------------------------------------------------


def test_frozen_weights_stay_and_the_others_flow_as_if_alone() -> None:
    """The frozen first layer as part of the network, and as part of the data, give the same round."""
    task, clients = small_task(), small_clients(30, 12)
    first, act, last = task.model.children()
    first.requires_grad_(False)
    whole, head = Task(task.model, OUT, "ce"), Task(last, OUT, "ce")
    seen = [ClientRound(c.id, act(first(c.x)).detach(), c.y, c.randomness) for c in clients]
    ends = [play(SumNTKFL(fisher="exact"), t, c)[0].state["weights"] for t, c in ((whole, clients), (head, seen))]
    assert torch.allclose(*ends, rtol=1e-9)
    assert len(ends[0]) == (HIDDEN + 1) * OUT


@pytest.mark.parametrize("name", [*ntkfl.models.MODELS, "gru", "transformer"])
def test_networks_of_every_kind(name: str) -> None:
    shapes = {"cnn": (1, 12, 12), "resnet": (1, 12, 12), "mlp": (5,), "gru": (6, 5), "transformer": (6, 5)}
    build = ntkfl.models.MODELS.get(name) or getattr(networks, name)
    model, x, y = build(shapes[name], 3), torch.randn(24, *shapes[name]), torch.arange(24) % 3
    if name == "transformer":  # of tokens
        model, x = nn.Sequential(nn.Embedding(20, 5), model), torch.randint(0, 20, (24, 6))
    task = Task(model, 3, "ce")
    cautious = SumNTKFL(
        fisher="exact", delta=3.0
    )  # short enough a step to descend on any network: the direction is what is tested
    state = play_rounds(cautious, task, dealt(x, y, list(torch.arange(24).split(9))), 2)
    before, after = (task.losses(task.predict(w, x), y).mean() for w in (task.like, state["weights"]))
    assert after < before
