"""private-ridge: a record changes little, the noise is as wide as ε says, eigenvalues are cleaned of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import ntkfl
from ntkfl.errors import ConfigError, MessageError, TooFew
from ntkfl.methods import ClientRound, PrivateRidge, Task
from ntkfl.methods.inspection import Participation
from ntkfl.methods.private_ridge import GRAINS, change, cleaned
from ntkfl.methods.whitening import scaled_triangle, unscaled
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sum_accounting import budget
from ntkfl.wire import Message
from tests.methods.rounds import play

FEATURES, OUTPUTS = 6, 3
P = FEATURES + 1


def head_task() -> Task:
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


def asked(task: Task, round: int = 1) -> Message:
    return Message("weights", round, {"weights": task.like})


def reply(method: PrivateRidge, task: Task, client: ClientRound) -> dict[str, torch.Tensor]:
    (answer,) = method.answer(task, asked(task), [client])
    return {name: array.double() for name, array in answer.arrays.items()}


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_record_changes_integers_by_no_more_than_the_noise_is_for(clip: float | None) -> None:
    method, task = PrivateRidge(epsilon=None, clip=clip), head_task()
    (client,) = some_clients(40)
    client.x[3] = math.nan  # adds nothing
    whole = reply(method, task, client)
    largest = dict.fromkeys(whole, 0.0)
    for left_out in range(40):
        kept = [i for i in range(40) if i != left_out]
        less = reply(method, task, ClientRound(0, client.x[kept], client.y[kept], client.randomness))
        for name in largest:
            difference = float((whole[name] - less[name]).norm())
            largest[name] = max(largest[name], difference)
            assert difference <= change(len(whole[name]))
            assert left_out != 3 or difference == 0
    assert min(largest.values()) > 0.8 * GRAINS


def test_noise_has_the_width_that_the_budget_asks_for() -> None:
    """Of all clients together σ² = Δ² / 2ρ, G and C each with their share of ρ."""
    loud, quiet = (PrivateRidge(epsilon=e, delta=1e-6, noise_clients=4, gram_share=0.7) for e in (2.0, None))
    task, (client,) = head_task(), some_clients(20)
    found: dict[str, list[torch.Tensor]] = {"gram": [], "cross": []}
    for key in range(60):
        own = ClientRound(0, client.x, client.y, Randomness(bytes([key]) * 32))
        noisy, plain = reply(loud, task, own), reply(quiet, task, own)
        for name in found:
            found[name].append(noisy[name] - plain[name])
    for name, share in (("gram", 0.7), ("cross", 0.3)):
        drawn = torch.cat(found[name])
        expected = change(len(found[name][0])) ** 2 / (2 * budget(2.0, 1e-6) * share * 4)
        assert float(drawn.square().mean()) / expected == pytest.approx(1, abs=5 * math.sqrt(2 / len(drawn)))


def test_without_noise_it_is_ridge_regression() -> None:
    """Up to rounding: each of two clients' numbers is off by less than a grain."""
    task, clients = head_task(), some_clients(50, 70)
    state = play(PrivateRidge(epsilon=None), task, clients)[0].state
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
    p, noise = 400, 1.0
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(p, p, generator=generator, dtype=torch.float64))[0]
    A = (Q * (200.0 / torch.arange(1, p + 1, dtype=torch.float64))) @ Q.mT
    noisy = scaled_triangle(A) + noise * torch.randn(p * (p + 1) // 2, generator=generator, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(unscaled(noisy))
    along = (vectors * (A @ vectors)).sum(0)
    edge = 2 * noise * math.sqrt(p / 2)
    before, after = (float((v - along).abs().mean()) for v in (values, cleaned(values, edge)))
    assert after < 0.15 * before
    assert before > 5
    assert torch.equal(cleaned(values, 0.0), values.clamp(min=0))


def test_a_scaled_triangle_has_the_norm_of_its_matrix() -> None:
    A = torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A = A + A.mT
    assert float(scaled_triangle(A).norm()) == pytest.approx(float(A.norm()))
    assert torch.allclose(unscaled(scaled_triangle(A)), A, atol=1e-12)


def test_the_record_and_the_guarantee_say_what_was_spent() -> None:
    task, clients = head_task(), some_clients(3000, 3000)
    method = PrivateRidge(noise_clients=2)
    outcome, _ = play(method, task, clients)
    assert outcome.diagnostics == {"epsilon": 3.0, "delta": 1e-5, "unit": "record"}
    assert outcome.train_loss is None
    x, y = (torch.cat([getattr(c, part) for c in clients]) for part in ("x", "y"))
    right = task.predict(outcome.state["weights"], x).argmax(1) == y
    assert float(right.double().mean()) > 0.75  # the two means are 2 apart: 0.8 without noise
    run = Participation(times=1, cohort=2, clients=2, rounds=1, simulated=True)
    (told,) = method.guarantees(run)
    assert told.epsilon == pytest.approx(3.0, rel=1e-3)
    assert "those who see the models" in told.against
    assert "aggregator" in PrivateRidge(secure_sum=True).guarantees(run)[0].against
    assert PrivateRidge(epsilon=None).guarantees(run) == []


def test_what_would_void_the_promise_is_refused() -> None:
    task, clients = head_task(), some_clients(20, 20)
    method = PrivateRidge(noise_clients=3)
    with pytest.raises(TooFew, match="noise of 2 clients"):
        play(method, task, clients)
    with pytest.raises(TooFew, match="sum of 2 clients"):
        method.from_total(task, asked(task), {}, 2)
    with pytest.raises(ConfigError, match="ε was for one round"):
        method.answer(task, asked(task, 2), clients)
    with pytest.raises(ConfigError, match="ε was for one round"):
        next(method.round(task, method.start(task, task.like), 2, [0, 1]))
    with pytest.raises(ConfigError, match="3 clients per round"):
        method.promise(2, 1)
    with pytest.raises(ConfigError, match="the run has 2"):
        method.promise(3, 2)
    with pytest.raises(ConfigError, match="no privacy"):
        play(PrivateRidge(epsilon=1e12), task, clients)


@pytest.mark.parametrize("arrays", [{"gram": torch.zeros(27, dtype=torch.int32)}, {"count": torch.zeros(1)}])
def test_other_replies_are_refused(arrays: dict[str, torch.Tensor]) -> None:
    method, task = PrivateRidge(), head_task()
    (answer,) = method.answer(task, asked(task), some_clients(5))
    method.check(task, answer)
    with pytest.raises(MessageError):
        method.check(task, Message("update", 1, dict(answer.arrays) | arrays))


def test_masked_sums_are_the_plain_ones() -> None:
    digits = ntkfl.data.load("digits").partition(ntkfl.data.Shards(clients=6, per_client=2), seed=0)
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(64, elementwise_affine=False), nn.Linear(64, 10))
    ends = []
    for secure in (False, True):
        method = PrivateRidge(epsilon=100.0, noise_clients=6, secure_sum=secure)
        run = ntkfl.train(model, digits, method, rounds=1, seed=1, callbacks=[])
        assert run.history[-1]["test_accuracy"] > 0.85
        assert run.history[-1].get("bounded_clients", 0) == 0
        ends.append(ntkfl.tangent.parameters.flatten(run.model))
    assert float((ends[0] - ends[1]).norm()) < 1e-3 * float(ends[0].norm())
