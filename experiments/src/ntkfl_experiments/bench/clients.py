"""A round's clients: batched local training against the loop, and a Jacobian against a local step."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ntkfl.methods.base import ClientRound, Task
from ntkfl.methods.local_sgd import train_locally
from ntkfl.models import mlp
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent.parameters import flatten
from ntkfl_experiments.bench.inputs import fashion, synthetic
from ntkfl_experiments.bench.race import race
from ntkfl_experiments.bench.rows import BenchRow, Setting

_LR = 0.1
_ALIKE = 1e-5
_BATCH = 20


def clients(setting: Setting) -> list[BenchRow]:
    """Local training of a round's clients, and a client's Jacobian beside it."""
    M, n, steps, side, hidden = (3, 12, 4, 14, 16) if setting.quick else (20, 200, 20, 28, 100)
    x, y = synthetic(M * n, side) if setting.quick else fashion(M * n)[:2]
    torch.manual_seed(0)
    model = mlp(side * side, hidden, 10).to(setting.device)
    x, y = x.to(setting.device), y.to(setting.device)
    cohort = [ClientRound(i, x[i * n : (i + 1) * n], y[i * n : (i + 1) * n], Randomness.simulated(i)) for i in range(M)]
    task, start = Task(model, 10, "ce"), flatten(model)
    timed = race(
        {
            "batched": lambda: train_locally(task, start, cohort, steps, _LR, n).weights,
            "loop": lambda: _loop(model, cohort, steps),
            "factors": lambda: task.jacobian(start, cohort[0].x),
            "step": lambda: _loop(model, cohort[:1], 1),
            "epoch": lambda: _loop(model, cohort[:1], 1, _BATCH),
            "our step": lambda: train_locally(task, start, cohort[:1], 1, _LR, n),
        },
        turns=7,
        setting=setting,
    )
    seconds = {name: timing.seconds for name, timing in timed.items()}
    # Forward and weight gradients of each layer, and the gradient through the last.
    flop = 2.0 * M * n * steps * (2 * side * side * hidden + 3 * hidden * 10)
    ours, exact = timed["batched"].result, _float64_difference(model, cohort, steps)
    goal = None if setting.quick else 1.0

    def against(what: str, name: str, goal: float | None) -> BenchRow:
        theirs = timed[name].result
        apart = (ours - theirs).norm(dim=1) / (theirs - start).norm(dim=1)
        difference, off = float(apart.median()), int((apart > _ALIKE).sum())
        # Rounding may put a sample on the other side of a ReLU's kink; from there on a client goes its own way.
        note = "median client" + (f"; {off} crossed a ReLU's kink" if off else "") + f"; float64 {exact:.0e}"
        details = {"worst_client": float(apart.max()), "float64_difference": exact}
        return BenchRow(what, seconds[name], seconds[name] / seconds["batched"], goal, flop, difference, note, details)

    return [
        BenchRow(
            "all clients at once",
            seconds["batched"],
            1.0,
            flop=flop,
            note=f"{M} clients, {n} samples, {steps} steps, {side * side}-{hidden}-10",
        ),
        against("the loop: a copy, torch.optim.SGD", "loop", goal),
        BenchRow("Jacobian factors of a client", seconds["factors"], 1.0, note=f"{n} samples"),
        *(
            BenchRow(what, seconds[name], seconds[name] / seconds["factors"], 1.0 if goal else None)
            for what, name in (
                ("a local epoch of it, one batch of all", "step"),
                (f"a local epoch in batches of {_BATCH}", "epoch"),
                ("one batch of all, our local training", "our step"),
            )
        ),
    ]


def _loop(model: nn.Module, cohort: list[ClientRound], epochs: int, batch: int | None = None) -> Tensor:
    """Local training as it is usually written."""
    ends = []
    loss_of = nn.CrossEntropyLoss()
    for client in cohort:
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=_LR)
        for _ in range(epochs):
            for x, y in zip(
                torch.split(client.x, batch or len(client)), torch.split(client.y, batch or len(client)), strict=True
            ):
                optimizer.zero_grad()
                loss_of(net(x), y).backward()
                optimizer.step()
        ends.append(flatten(net))
    return torch.stack(ends)


def _float64_difference(model: nn.Module, cohort: list[ClientRound], steps: int) -> float:
    """Batched against the loop in float64, where rounding hardly ever meets a kink: the same algorithm?"""
    exact = copy.deepcopy(model).double()
    doubled = [ClientRound(c.id, c.x.double(), c.y, c.randomness) for c in cohort]
    start, theirs = flatten(exact), _loop(exact, doubled, steps)
    ours = train_locally(Task(exact, 10, "ce"), start, doubled, steps, _LR, len(cohort[0])).weights
    return float((ours - theirs).norm() / (theirs - start).norm())
