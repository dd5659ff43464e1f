"""Ridge regression from sums: the pooled solution in float64, whatever the partition; clients counted once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntkfl.errors import MessageError, ModelError
from ntkfl.methods import ClientRound, SumRidge, Task
from ntkfl.methods.sums.sum_ridge import shares_of
from ntkfl.privacy.randomness import Randomness
from ntkfl.tangent.ridge import RidgeSums, left_out_errors, total
from tests.methods.rounds import broadcast, play

F, CLASSES, N = 7, 3, 120


def pooled() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(0, CLASSES, (N,), generator=generator)
    means = torch.randn(CLASSES, F, generator=generator, dtype=torch.float64)
    return means[y] + torch.randn(N, F, generator=generator, dtype=torch.float64) + 2, y


def direct(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """(W; bᵀ) by a solve of the normal equations with an unpenalised bias, on the pooled samples."""
    a, Y = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1), nn.functional.one_hot(y, CLASSES).to(x)
    variance = (x - x.mean(0)).square().sum() / (len(x) * x.shape[1])
    D = torch.eye(x.shape[1] + 1, dtype=x.dtype)
    D[-1, -1] = 0
    return torch.linalg.solve(a.mT @ a + len(x) * penalty * variance * D, a.mT @ Y)


def partitions() -> dict[str, list[Tensor]]:
    _, y = pooled()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    return {
        "one client": [torch.arange(N)],
        "even": list(order.chunk(10)),
        "uneven": list(order.split([1, 2, 3, 50, 64])),
        "one label per client": [part for c in range(CLASSES) for part in (y == c).nonzero()[:, 0].chunk(3)],
    }


def clients_of(indices: list[Tensor]) -> list[ClientRound]:
    x, y = pooled()
    return [ClientRound(i, x[part], y[part], Randomness.simulated(i)) for i, part in enumerate(indices)]


def task_of(model: nn.Module | None = None) -> Task:
    return Task(model or nn.Linear(F, CLASSES).double(), CLASSES, "mse")


def solution(state: dict[str, Tensor]) -> Tensor:
    """(W; bᵀ) [p, d2] out of flat weights."""
    w = state["weights"]
    return torch.cat([w[: F * CLASSES].view(CLASSES, F).mT, w[F * CLASSES :].unsqueeze(0)])


def sums_of(x: Tensor, y: Tensor) -> RidgeSums:
    return RidgeSums.of(x, nn.functional.one_hot(y, CLASSES).to(x))


@pytest.mark.parametrize("name", partitions())
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 1e-3, 1.0])
def test_one_round_is_the_pooled_solution(name: str, keep: bool, penalty: float) -> None:
    method = SumRidge(penalty=penalty, keep_shares=keep)
    outcome, _ = play(method, task_of(), clients_of(partitions()[name]))
    expected = direct(*pooled(), penalty)
    assert (solution(outcome.state) - expected).abs().max() < 1e-10
    assert outcome.diagnostics["samples"] == N
    x, y = pooled()
    f = torch.cat([x, torch.ones(N, 1, dtype=x.dtype)], 1) @ expected
    assert outcome.train_loss == pytest.approx(0.5 * (f - nn.functional.one_hot(y, CLASSES)).square().mean().item())


def test_clients_are_counted_once_and_replaced() -> None:
    """Rounds of some clients end where one round of all does; one whose data changed counts with its new data."""
    for keep in (False, True):
        clients = clients_of(partitions()["one label per client"])
        method, task = SumRidge(penalty=0.01, keep_shares=keep), task_of()
        state = method.start(task, task.like)
        for number, cohort in enumerate([(0, 1, 2, 3), (2, 3, 4, 5), (0, 5, 6, 7, 8)], 1):
            outcome, _ = play(method, task, [clients[i] for i in cohort], state, number)
            state = outcome.state
        assert (solution(state) - direct(*pooled(), 0.01)).abs().max() < 1e-10
        clients[4].x, clients[4].y = clients[4].x[:5] + 1, clients[4].y[:5]
        state = play(method, task, [clients[4]], state, 4)[0].state
        now = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
        assert (solution(state) - direct(*now, 0.01)).abs().max() < 1e-10


# -- λ -----------------------------------------------------------------------------------------------------------------


def test_left_out_errors_are_those_of_retraining() -> None:
    """For every client left out and every λ: the error from sums is that of a direct solve on the others' samples."""
    indices, penalties = partitions()["even"], (1e-4, 0.1, 1.0)
    x, y = pooled()
    parts = [sums_of(x[part], y[part]) for part in indices]
    found = left_out_errors(parts, total(parts), penalties)
    for penalty, error in zip(penalties, found, strict=True):
        expected = 0.0
        for i, out in enumerate(indices):
            rest = torch.cat([part for j, part in enumerate(indices) if j != i])
            f = torch.cat([x[out], torch.ones(len(out), 1, dtype=x.dtype)], 1) @ direct(x[rest], y[rest], penalty)
            expected += float((f - nn.functional.one_hot(y[out], CLASSES)).square().sum())
        assert float(error) == pytest.approx(expected / N, rel=1e-10)


def test_the_penalty_is_chosen_by_clients_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of targets that are all noise a larger λ is chosen than of targets that follow the features."""
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr("ntkfl.methods.sums.sum_ridge.PENALTIES", (1e-6, 1e-3, 1, 100))
    chosen = []
    for noise in (0.01, 30.0):
        clients = []
        for i in range(6):
            x = torch.randn(8, F, generator=generator, dtype=torch.float64)
            y = x[:, :2] + noise * torch.randn(8, 2, generator=generator, dtype=torch.float64)
            clients.append(ClientRound(i, x, y, Randomness.simulated(i)))
        task = Task(nn.Linear(F, 2).double(), 2, "mse")
        for slack in (0.0, 1e9):
            monkeypatch.setattr("ntkfl.methods.sums.sum_ridge.SLACK", slack)
            for client in clients:
                client.memory.clear()
            chosen.append(play(SumRidge(), task, clients)[0].diagnostics["penalty"])
    assert chosen[0] <= 1e-3
    assert chosen[2] >= 1
    assert chosen[1] == chosen[3] == 1e-6  # the smallest is as good as any


def test_new_clients_alone_are_left_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are added up into as many groups as `FOLDS`, without any client's being kept; who comes back is in none."""
    clients, method, task = clients_of(partitions()["one label per client"]), SumRidge(), task_of()
    monkeypatch.setattr("ntkfl.methods.sums.sum_ridge.FOLDS", 3)
    state = play(method, task, clients[:1])[0].state
    seen, solve_them = list[tuple[list[RidgeSums], RidgeSums]](), SumRidge.solve

    def watched(
        self: SumRidge, parts: list[RidgeSums], whole: RidgeSums, before: float | None = None
    ) -> tuple[Tensor, float]:
        seen.append((parts, whole))
        return solve_them(self, parts, whole, before)

    monkeypatch.setattr(SumRidge, "solve", watched)
    play(method, task, clients[:8], state, 2)
    ((groups, whole),) = seen
    own = [sums_of(c.x, c.y) for c in clients[:8]]
    expected = [total(own[1:][fold::3]) for fold in range(3)]
    for found, wanted in zip([*groups, whole], [*expected, total(own)], strict=True):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found.parts(), wanted.parts(), strict=True))


# -- Networks and replies ----------------------------------------------------------------------------------------------


def test_only_the_last_layer_trains() -> None:
    model = nn.Sequential(nn.Linear(F, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    task, clients = task_of(model), clients_of(partitions()["even"])
    outcome, log = play(SumRidge(penalty=1e-3), task, clients)
    first = 5 * F + 5
    assert torch.equal(outcome.state["weights"][:first], task.like[:first])
    x, y = pooled()
    with torch.no_grad():
        expected = direct(model[1](model[0](x)), y, 1e-3)
    flat = torch.cat([expected[:-1].mT.reshape(-1), expected[-1]])
    assert (outcome.state["weights"][first:] - flat).abs().max() < 1e-10
    # A triangle, Σ a yᵀ, two scalars in float64: nothing grows with a client's samples.
    sizes = {s.size for s in log if s.way == "up"}
    assert max(sizes) < 8 * (6 * 7 // 2 + 6 * CLASSES + 2) + 300


def test_a_network_without_a_last_linear_layer() -> None:
    clients = clients_of(partitions()["even"])
    with pytest.raises(ModelError, match="outputs are its last linear layer's"):
        play(SumRidge(), task_of(nn.Sequential(nn.Linear(F, CLASSES), nn.Tanh()).double()), clients)
    with pytest.raises(ModelError, match="that trains, with a bias"):
        play(SumRidge(), task_of(nn.Linear(F, CLASSES, bias=False).double()), clients)


def test_a_client_can_replace_its_own_share_alone() -> None:
    method, task = SumRidge(keep_shares=True), task_of()
    clients = clients_of(partitions()["even"])[:3]
    state = play(method, task, clients)[0].state
    before = shares_of(state)
    clients[1].x = clients[1].x + 1
    after = shares_of(play(method, task, [clients[1]], state, 2)[0].state)
    assert [torch.equal(before[i].gram, after[i].gram) for i in range(3)] == [True, False, True]

    round = method.round(task, state, 3, [0, 1])
    asked = next(round)
    assert isinstance(asked, dict)
    reply = method.answer(task, asked[0], clients[0])
    reply.arrays["tag"] = torch.tensor(5)
    with pytest.raises(MessageError, match="which no client of the round was given"):
        round.send([reply])


def test_a_client_that_comes_back_with_the_same_data_sends_zeros() -> None:
    task, (client,) = task_of(), clients_of(partitions()["one client"])
    first, second = (SumRidge().answer(task, broadcast(task, number), client) for number in (1, 2))
    assert (first.is_new, second.is_new) == (True, False)
    assert all(not array.any() for array in second.arrays.values())
