"""NTK-FL against its box in the paper, worked out by hand, and its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.methods import NTKFL, ClientRound, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent.parameters import unflatten, with_values
from tests.methods.rounds import DIMENSIONS, Whole, play, small_clients, small_task


def run(fed: ntkfl.data.Federated, method: NTKFL, **options: Any) -> ntkfl.Run:
    return ntkfl.train(net(), fed, method, **({"rounds": 2, "clients_per_round": 8} | options))


def net() -> nn.Module:
    torch.manual_seed(0)
    return ntkfl.models.mlp(64, 24, 10)


def linear_flow(task: Task, x: Tensor, Y: Tensor, lr: float, t: float, kernel: str) -> Tensor:
    """w(t) along w' = −η ∇ ½|f − Y|²/(N d2) with f linear in w at task.like, by eigenvectors of the dense kernel.

    J is autograd's, [N, d2, d]. The paper's kernel H_ij = (1/d2) Σ_c J_ic·J_jc moves every output by itself.
    """
    w, (N, d2) = task.like, Y.shape
    J = torch.func.jacrev(lambda v: with_values(task.model, unflatten(task.model, v))(x))(w)
    if kernel == "full":
        theta = J.reshape(N * d2, -1) @ J.reshape(N * d2, -1).T
    else:
        theta = torch.kron(torch.einsum("icd,jcd->ij", J, J) / d2, torch.eye(d2).double())
    values, vectors = torch.linalg.eigh(lr / (N * d2) * theta)
    r0 = vectors.T @ (Y - task.predict(w, x)).reshape(-1)
    reached = torch.where(values > 1e-14, -torch.expm1(-values * t) / values, t)  # ∫ e^(−λu) du up to t
    return w + lr / (N * d2) * (vectors @ (reached * r0)) @ J.reshape(N * d2, -1)


@pytest.mark.parametrize("kernel", ["full", "trace"])
@pytest.mark.parametrize("form", ["factored", "dense"])
def test_a_round_is_the_box(kernel: str, form: str) -> None:
    """Broadcast, uploads, evolution to a grid of t, candidates, the cohort's choice: new weights."""
    task, clients = small_task("mse"), small_clients(9, 4, 6)
    steps, lr = (30.0, 300.0, 3e4), 0.05
    method = Whole(loss="mse", kernel=kernel, form=form, lr=lr, steps=steps)
    outcome, log = play(method, task, clients)
    assert [sent.kind for sent in log if sent.client == 0] == ["weights", "rows", "candidates", "rows"]
    x = torch.cat([client.x for client in clients])
    Y = nn.functional.one_hot(torch.cat([client.y for client in clients]), DIMENSIONS[1]).double()
    candidates = [linear_flow(task, x, Y, lr, t, kernel) for t in steps]
    (asked,) = {sent.message.arrays["weights"] for sent in log if sent.kind == "candidates" and sent.client == 0}
    for ours, by_hand in zip(asked, candidates, strict=True):
        assert float((ours - by_hand).norm() / (by_hand - task.like).norm()) < 1e-6
    losses = [float(0.5 * (task.predict(w, x) - Y).square().mean()) for w in candidates]
    best = min(range(len(steps)), key=losses.__getitem__)
    assert outcome.steps == steps[best]
    assert outcome.train_loss == pytest.approx(losses[best], rel=1e-6)
    assert torch.equal(outcome.state["weights"], asked[best])
    assert outcome.diagnostics["samples"] == len(x)


def test_choosing_by_held_out_clients(digits: ntkfl.data.Federated) -> None:
    finished = run(digits, NTKFL(steps=(50.0, 400.0), choose="validation"), hold_out=8)
    record = finished.history[-1]
    assert set(record["downlink"]) == {"weights"}  # no candidate leaves the server
    assert 0 < record["validation_accuracy"] <= 1
    assert all(0 <= i < 12 for i in record["clients"])
    with pytest.raises(ConfigError, match="needs held-out clients"):
        run(digits, NTKFL(choose="validation"))


def test_the_papers_own_round_is_the_sum_in_its_authors_code() -> None:
    """Cross-entropy, the trace kernel, residuals at u = 0 … t − 1 of f' = (η/N) H (Y − softmax f)."""
    task, clients = small_task("ce"), small_clients(9, 4, 6)
    lr, steps = 0.5, (4.0, 9.0)
    method = Whole(kernel="trace", scheme="paper", lr=lr, steps=steps, average=0, label_smoothing=0)
    _, log = play(method, task, clients)
    x, y = torch.cat([client.x for client in clients]), torch.cat([client.y for client in clients])
    Y = nn.functional.one_hot(y, DIMENSIONS[1]).double()
    J = torch.func.jacrev(lambda v: with_values(task.model, unflatten(task.model, v))(x))(task.like)
    H = torch.einsum("icd,jcd->ij", J, J) / DIMENSIONS[1] * (lr / len(x))
    f, R, h, by_hand = task.predict(task.like, x), torch.zeros_like(Y), 1 / 200, []
    for u in range(9):
        R = R + (Y - f.softmax(1))
        for _ in range(200):
            f = f + h * H @ (Y - (f + h / 2 * H @ (Y - f.softmax(1))).softmax(1))
        if u + 1 in steps:
            by_hand.append(lr / len(x) * torch.einsum("icd,ic->d", J, R))
    (asked,) = {sent.message.arrays["weights"] for sent in log if sent.kind == "candidates" and sent.client == 0}
    for ours, change in zip(asked, by_hand, strict=True):
        assert float((ours - task.like - change).norm() / change.norm()) < 1e-4


def test_the_flow_knows_eta_times_t_alone(digits: ntkfl.data.Federated) -> None:
    """Times go with 1/η by default."""
    fast, slow = run(digits, NTKFL(lr=0.1)), run(digits, NTKFL())
    for ours, theirs in zip(fast.history, slow.history, strict=True):
        assert ours["steps"] == pytest.approx(0.1 * theirs["steps"])
        assert ours["test_accuracy"] == pytest.approx(theirs["test_accuracy"], abs=0.01)


def test_adjustment_makes_a_skewed_round_predict_as_a_balanced_one() -> None:
    """A model of biases alone learns log shares; with τ = 1 it learns nothing of them."""
    model = torch.nn.Linear(1, 3).double()
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    task = ntkfl.methods.Task(model, 3, "ce")
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    client = ClientRound(0, torch.zeros(100, 1).double(), y, Randomness.simulated(0))
    options: dict[str, Any] = {"label_smoothing": 0, "steps": (40000.0,)}
    plain, _ = play(NTKFL(**options), task, [client])
    f = plain.state["weights"][3:]
    assert np.allclose((f - f[0]).numpy(), np.log([1, 0.5, 1 / 6]), atol=1e-2)

    class Adjusted(NTKFL):
        prior = 1.0

    adjusted, _ = play(Adjusted(**options), task, [client])
    f = adjusted.state["weights"][3:]
    assert float((f - f[0]).abs().max()) < 0.02
