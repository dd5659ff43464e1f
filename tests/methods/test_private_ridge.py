"""private-ridge: a record changes little, the noise is as wide as ε says, eigenvalues are cleaned of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ntkfl.errors import ConfigError, TooFew
from ntkfl.methods import ClientRound, PrivateRidge, Task
from ntkfl.methods.sums.noisy_sums import guarantees, promises, scaled_triangle, unscaled
from ntkfl.methods.sums.private_ridge import RidgeIntegers, cleaned
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sum_noise import budget, integer_change
from tests.methods.private import asked, assert_variance, integers, noise, others, private_task
from tests.methods.rounds import play

FEATURES, OUTPUTS, GRAINS = 6, 3, PrivateRidge.grains
P = FEATURES + 1


def head_task() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(FEATURES, elementwise_affine=False), nn.Linear(FEATURES, OUTPUTS)).double()
    return Task(model, OUTPUTS, "ce")


def some_clients(*sizes: int) -> list[ClientRound]:
    generator = torch.Generator().manual_seed(0)
    clients = []
    for number, size in enumerate(sizes):
        y = torch.randint(OUTPUTS, (size,), generator=generator)
        x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        x[torch.arange(size), y] += 2
        clients.append(ClientRound(number, x, y, Randomness.simulated(number)))
    return clients


def change(*numbers: int) -> float:
    return integer_change(numbers, grains=GRAINS, rounding=PrivateRidge.rounding)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_record_changes_integers_by_no_more_than_the_noise_is_for(clip: float | None) -> None:
    method, (client,) = PrivateRidge(clip=clip), some_clients(40)
    task = private_task(method, head_task(), epsilon=None)
    client.x[3] = math.nan  # adds nothing
    whole = integers(method, task, client)
    largest = dict.fromkeys(whole, 0.0)
    for record in range(40):
        less = integers(method, task, others(client, record))
        for name in largest:
            difference = float((whole[name] - less[name]).norm())
            largest[name] = max(largest[name], difference)
            assert difference <= change(len(whole[name]))
            assert record != 3 or difference == 0
    assert min(largest.values()) > 0.8 * GRAINS


def test_noise_has_the_width_that_the_budget_asks_for() -> None:
    """Of all clients together σ² = Δ² / 2ρ, for G and C as one vector."""
    method, (client,) = PrivateRidge(), some_clients(20)
    loud = private_task(method, head_task(), epsilon=2.0, delta=1e-6, noise_clients=4)
    drawn = noise(method, loud, private_task(method, head_task(), epsilon=None), client)
    expected = change(*(len(drawn[name]) // 60 for name in drawn)) ** 2 / (2 * budget(2.0, 1e-6) * 4)
    for name in ("gram", "cross"):
        assert_variance(drawn[name], expected)


def test_without_noise_it_is_ridge_regression() -> None:
    """Up to rounding: each of two clients' numbers is off by less than a grain."""
    method, clients = PrivateRidge(), some_clients(50, 70)
    state = play(method, private_task(method, head_task(), epsilon=None), clients)[0].state
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    a = torch.cat([nn.functional.layer_norm(x, (FEATURES,)), x.new_ones(len(x), 1)], dim=1) / math.sqrt(P)
    G, C = a.mT @ a, a.mT @ nn.functional.one_hot(y, OUTPUTS).double()
    # Features of mean 0 leave one direction of G empty; the floor is 1e-6 of the mean eigenvalue.
    values = torch.linalg.eigvalsh(G)
    regular = G + 1e-6 * values.mean() * torch.eye(P, dtype=G.dtype)
    expected = torch.linalg.solve(regular, C)
    seen = a @ expected
    W, b = state["weights"][:-OUTPUTS].view(OUTPUTS, FEATURES).mT, state["weights"][-OUTPUTS:].unsqueeze(0)
    got = a @ torch.cat([W, b]) * math.sqrt(P)
    # |δG| and |δC| as matrices of numbers below 2 grains; the empty direction is not seen by any sample.
    off = 2 * math.sqrt(2) / GRAINS
    bound = (off * math.sqrt(P * OUTPUTS) + off * P * float(expected.norm())) / float(values[1])
    assert float((got - seen).norm(dim=1).max()) < 10 * bound
    assert bound < 1e-2 * float(seen.norm(dim=1).mean())


def test_cleaned_eigenvalues_are_those_along_noisy_eigenvectors() -> None:
    p, deviation = 400, 1.0
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(p, p, generator=generator, dtype=torch.float64))[0]
    A = (Q * (200.0 / torch.arange(1, p + 1, dtype=torch.float64))) @ Q.mT
    assert torch.allclose(unscaled(scaled_triangle(A)), A, atol=1e-12)
    noisy = scaled_triangle(A) + deviation * torch.randn(p * (p + 1) // 2, generator=generator, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(unscaled(noisy))
    along = (vectors * (A @ vectors)).sum(0)
    edge = 2 * deviation * math.sqrt(p / 2)
    before, after = (float((v - along).abs().mean()) for v in (values, cleaned(values, edge)))
    assert after < 0.15 * before
    assert before > 5
    assert torch.equal(cleaned(values, 0.0), values.clamp(min=0))


def test_the_record_and_the_guarantee_say_what_was_spent() -> None:
    method, clients = PrivateRidge(), some_clients(3000, 3000)
    task = private_task(method, head_task(), noise_clients=2)
    outcome, _ = play(method, task, clients)
    assert outcome.diagnostics == {"epsilon": pytest.approx(3.0), "delta": 1e-5, "unit": "record"}
    assert outcome.train_loss is None
    x, y = (torch.cat([getattr(c, part) for c in clients]) for part in ("x", "y"))
    right = task.predict(outcome.state["weights"], x).argmax(1) == y
    assert float(right.double().mean()) > 0.75  # the two means are 2 apart: 0.8 without noise
    (told,) = guarantees(method, task, 1)
    assert told["epsilon"] == pytest.approx(3.0, rel=1e-3)
    assert told["against"] == "those who see the models, 1 round"


def test_what_would_void_the_promise_is_refused() -> None:
    method, clients = PrivateRidge(), some_clients(20, 20)
    task = private_task(method, head_task(), noise_clients=3)
    with pytest.raises(TooFew, match="noise of 2 clients"):
        play(method, task, clients)
    with pytest.raises(TooFew, match="sum of 2 clients"):
        RidgeIntegers.from_total(method, task, asked(task), {}, 2)
    with pytest.raises(ConfigError, match="ε was for 1 round"):
        method.answer(task, asked(task, 2), clients[0])
    with pytest.raises(ConfigError, match="ε was for 1 round"):
        next(method.round(task, method.start(task, task.like), 2, [0, 1]))
    with pytest.raises(ConfigError, match="3 clients per round"):
        promises(method, task, 2, 1)
    with pytest.raises(ConfigError, match="no privacy"):
        play(method, private_task(method, head_task(), epsilon=1e12), clients)
