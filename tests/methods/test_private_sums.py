"""private-sums: what leaves a client changes little with a record, the noise is as wide as ε says, and sums train."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntkfl
from ntkfl.errors import ConfigError, MessageError, TooFew
from ntkfl.federation.secure_sum import SumSchema
from ntkfl.methods import ClientRound, PrivateSums, Task
from ntkfl.methods.sums.noisy_sums import guarantees, promises, scaled_triangle
from ntkfl.methods.sums.private_sums import (
    REST,
    WHITENING,
    GradientSums,
    directions,
    noise_advice,
    read_whitening,
    whitening_arrays,
)
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sum_noise import COUNT, GRAINS, budget, integer_change, spent
from ntkfl.wire import Message
from tests.methods.private import asked, assert_variance, integers, noise, others, private_task
from tests.methods.rounds import gradient, play, play_rounds, small_clients, small_task

NAME, DAMPING = "0-35+35-42", 0.05  # the first layer of 5-7-3
MOMENTS = f"moments/{NAME}"


def of_round(arrays: dict[str, Tensor]) -> Tensor:
    """What every round releases, in one vector."""
    return torch.cat([array for name, array in sorted(arrays.items()) if name != MOMENTS])


# -- What a record changes, and the noise on it ------------------------------------------------------------------------


def test_a_record_changes_integers_by_no_more_than_the_noise_is_for() -> None:
    method, (client,) = PrivateSums(clip=0.2), small_clients(40)
    task = private_task(method, epsilon=None)
    whole, changes, inputs = integers(method, task, client, asks=True), list[float](), list[float]()
    for record in range(40):
        less = integers(method, task, others(client, record), asks=True)
        changes.append(float((of_round(whole) - of_round(less)).norm()))
        inputs.append(float((whole[MOMENTS] - less[MOMENTS]).norm()))
    assert 0.9 * GRAINS < max(changes) <= integer_change([task.like.numel()], counted=True)
    assert 0.5 * GRAINS < max(inputs) <= integer_change([len(whole[MOMENTS])])


def test_under_masks_the_count_of_a_large_client_keeps_all_of_its_noise() -> None:
    """It is cut to `sum_samples` before the noise: nothing is scaled down after it."""
    method, (client,) = PrivateSums(), small_clients(80)
    task = private_task(method, secure_sum=True, sum_samples=8)
    counts = []
    for key in range(200):
        one = ClientRound(0, client.x, client.y, Randomness(bytes([key]) * 32))
        reply = method.answer(task, asked(task), one)
        assert isinstance(reply, GradientSums)
        addends = reply.addends(method, task, asked(task))
        schema = SumSchema.of(addends, 1)
        counts.append(schema.decode(schema.encode(addends, one.randomness), 1)[0]["samples"].double())
    drawn, width = torch.cat(counts) - 8 * COUNT, method.widths(task, {"gradient": task.like.numel(), "samples": 1})
    assert abs(float(drawn.mean())) < 5 * width["samples"] / math.sqrt(200)
    assert_variance(drawn, width["samples"] ** 2)


@pytest.mark.parametrize("method", [PrivateSums(), PrivateSums(clip=1e-6)])
def test_noisy_sums_say_nothing_without_noise(method: PrivateSums) -> None:
    """Not even whether a client had to scale something down; sums without an ε may."""
    (client,) = small_clients(40)
    for epsilon in (3.0, None):
        task = private_task(method, epsilon=epsilon, secure_sum=True)
        reply = method.answer(task, asked(task), client)
        schema = SumSchema.of(reply.addends(method, task, asked(task)), 2)
        assert {name for name, *_ in schema.parts} - set(reply.arrays) == (set() if epsilon else {"bounded"})


def test_noise_has_the_width_that_the_budget_asks_for() -> None:
    """Of all clients together σ² = Δ² / 2ρ, each ρ a share of the budget; gradients and moments have their own."""
    method, (client,) = PrivateSums(input_share=0.2), small_clients(20)
    shared = {"budget_rounds": 10, "noise_clients": 4}
    loud, quiet = private_task(method, epsilon=2.0, delta=1e-6, **shared), private_task(method, epsilon=None, **shared)
    drawn, rho = noise(method, loud, quiet, client, asks=True), budget(2.0, 1e-6)
    assert spent([(rho, 1)], 1e-6) == pytest.approx(2.0)
    change = integer_change([loud.like.numel()], counted=True)
    assert_variance(torch.cat([drawn["gradient"], drawn["samples"]]), change**2 / (2 * rho * 0.8 / 10 * 4))
    assert_variance(drawn[MOMENTS], integer_change([21]) ** 2 / (2 * rho * 0.2 * 4))


def test_noise_is_new_for_every_question_and_client() -> None:
    method, (client,) = PrivateSums(), small_clients(20)
    task = private_task(method, epsilon=2.0)
    one, other = (ClientRound(0, client.x, client.y, Randomness(bytes([key]) * 32)) for key in (0, 1))
    first = integers(method, task, one, 2)["gradient"]
    assert torch.equal(first, integers(method, task, one, 2)["gradient"])
    assert not torch.equal(first, integers(method, task, one, 3)["gradient"])
    assert not torch.equal(first, integers(method, task, other, 2)["gradient"])


# -- A round -----------------------------------------------------------------------------------------------------------


def test_without_noise_a_round_is_a_clipped_step_with_momentum() -> None:
    method = PrivateSums(clip=1e3, input_share=0, lr=2.0, momentum=0.5, label_smoothing=0)
    task, clients = private_task(method, epsilon=None), small_clients(12, 9)
    state = play_rounds(method, task, clients, 2)
    x, y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
    w, v = task.like, torch.zeros_like(task.like)
    for _ in range(2):
        v = 0.5 * v + gradient(task, w, x, y) / 1e3
        w = w - 2.0 * v
    assert float((state["weights"] - w).abs().max()) < 2 * 2 * 2 / GRAINS  # steps · lr · what rounding may change


# -- Whitening ---------------------------------------------------------------------------------------------------------


def test_inputs_are_whitened_by_their_moments() -> None:
    """After the first round P² (A/mean + damping) = 1, with A of inputs at one norm."""
    method, clients = PrivateSums(damping=DAMPING), small_clients(300, 200)
    task = private_task(method, epsilon=None)
    outcome, _ = play(method, task, clients)
    known = {name: outcome.state[name] for name in (WHITENING + NAME, REST + NAME)}
    (P,) = read_whitening(known, task.like, DAMPING).values()
    x = torch.cat([c.x for c in clients])
    rows = torch.cat([x / x.square().mean(1, keepdim=True).sqrt(), torch.ones(len(x), 1).double()], dim=1)
    rows = rows / rows.norm(dim=1, keepdim=True)
    A = rows.T @ rows
    A = A / A.trace() * len(A)
    assert torch.allclose(P @ P @ (A + DAMPING * torch.eye(6)), torch.eye(6).double(), atol=1e-3)
    second, later = play(method, task, clients, outcome.state, 2)
    assert WHITENING + NAME in later[0].message.arrays
    assert not any(part.startswith("moments") for sent in later for part in sent.message.arrays)
    assert torch.equal(second.state[WHITENING + NAME], outcome.state[WHITENING + NAME])


def symmetric() -> Tensor:
    """A [6, 6] of eigenvalues that differ by a factor of about 10,000."""
    rows = torch.randn(400, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = (rows * torch.logspace(-1, 0, 6, dtype=torch.float64)).T @ rows
    return A @ A.T


@pytest.mark.parametrize("rank", [1, 3, 5, 50])
def test_strong_directions_are_whitened_and_the_others_by_their_mean(rank: int) -> None:
    A = symmetric()
    assert float(scaled_triangle(A).norm()) == pytest.approx(float(A.norm()))
    arrays = whitening_arrays(NAME, *directions(scaled_triangle(A), DAMPING, rank))
    (P,) = read_whitening(arrays, small_task().like, DAMPING).values()
    values, vectors = torch.linalg.eigh(A)
    values = values / values.mean()
    kept = min(rank, 5)
    values[: 6 - kept] = values[: 6 - kept].mean()
    expected = vectors @ torch.diag((values + DAMPING).rsqrt()) @ vectors.T
    assert torch.allclose(P, expected, atol=1e-9)
    assert arrays[WHITENING + NAME].shape == (6, kept)
    noisy = A - 2 * torch.eye(6, dtype=torch.float64) * A.trace() / 6  # noise has made eigenvalues negative
    read_whitening(whitening_arrays(NAME, *directions(scaled_triangle(noisy), DAMPING, 3)), small_task().like, DAMPING)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda V, rest: (V, 1e-6 * rest),
        lambda V, rest: (V, 1e6 * rest),
        lambda V, rest: (V, -rest),
        lambda V, rest: (3 * V, rest),
        lambda V, rest: (V * float("nan"), rest),
        lambda V, rest: (V[:4], rest),
        lambda V, rest: (V.flatten(), rest),
        lambda V, rest: (V, torch.cat([rest, rest])),
        lambda V, rest: (V, None),
    ],
)
def test_whitening_that_no_moments_give_is_refused_by_clients(spoil: Any) -> None:
    """Of a badly conditioned one, rounding would give one sample more than its clip."""
    method, (client,) = PrivateSums(), small_clients(30)
    task = private_task(method, epsilon=None)
    V, rest = directions(scaled_triangle(symmetric()), DAMPING, 50)
    method.answer(task, Message("weights", 2, {"weights": task.like} | whitening_arrays(NAME, V, rest)), client)
    V, rest = spoil(V, rest)
    arrays = {"weights": task.like, WHITENING + NAME: V} | ({} if rest is None else {REST + NAME: rest})
    with pytest.raises(MessageError):
        method.answer(task, Message("weights", 2, arrays), client)


@pytest.mark.parametrize(("features", "whitens"), [(1023, True), (1024, False)])
def test_where_nothing_is_whitened_all_of_the_budget_goes_to_gradients(features: int, whitens: bool) -> None:
    """A layer of at most 1,024 inputs, the bias's 1 among them, is whitened; beyond, noise is as narrow as without."""
    generator = torch.Generator().manual_seed(0)
    sites = [(torch.randn(200, features, generator=generator), torch.arange(200) % 2) for _ in range(3)]
    fed, method = ntkfl.data.from_clients(sites[:2], test=sites[2]), PrivateSums()
    heard: list[str] = []

    class Heard:
        def on_start(self, note: str) -> None:
            heard.append(note)

    settings = Privacy(epsilon=2.0, budget_rounds=2)
    how = {"rounds": 2, "privacy": settings, "callbacks": [Heard()]}
    run = ntkfl.train(ntkfl.models.mlp(features, 2, 2), fed, method, **how)
    assert any("inputs are not whitened" in line and "1,024" in line for line in heard) != whitens
    assert any("not covered: the 200 test samples: the server measures on them" in line for line in heard)
    assert any(name.startswith(f"state/{WHITENING}") for name in run.checkpoint) == whitens
    assert run.history[-1]["epsilon"] == pytest.approx(2.0, rel=1e-3)  # all of it is spent, either way
    task = Task(ntkfl.models.mlp(features, 2, 2), 2, "ce", privacy=settings)
    task.example = torch.zeros(1, features), torch.zeros(1, dtype=torch.int64)
    wider = method.widths(task, {"gradient": 100})["gradient"]
    wider /= PrivateSums(input_share=0).widths(task, {"gradient": 100})["gradient"]
    assert wider == pytest.approx(0.9**-0.5 if whitens else 1.0, rel=1e-6)


# -- What is promised, and refused -------------------------------------------------------------------------------------


def test_the_record_and_the_guarantee_say_what_was_spent() -> None:
    method, clients = PrivateSums(), small_clients(3000, 3000)
    task = private_task(method, budget_rounds=2, noise_clients=2)
    first, _ = play(method, task, clients)
    second, _ = play(method, task, clients, first.state, 2)
    assert 0 < first.diagnostics["epsilon"] < second.diagnostics["epsilon"] == pytest.approx(3.0)
    assert second.diagnostics["epsilon"] <= 3.0 + 1e-9
    assert (second.diagnostics["delta"], second.diagnostics["unit"]) == (1e-5, "record")
    assert second.train_loss is None
    (told,) = guarantees(method, task, 2)
    assert told["epsilon"] == pytest.approx(3.0, rel=1e-3)
    assert "those who see the models" in told["against"]
    hidden = private_task(method, budget_rounds=2, noise_clients=2, secure_sum=True)
    assert "aggregator" in guarantees(method, hidden, 2)[0]["against"]
    assert guarantees(method, private_task(method, epsilon=None), 2) == []


def test_sampling_earns_credit_where_it_is_real() -> None:
    method, clients, settings = PrivateSums(), small_clients(3000, 3000), {"budget_rounds": 10, "noise_clients": 2}
    plain = private_task(method, **settings)
    task = private_task(method, small_task(total_clients=20), sampling_rate=0.1, **settings)
    numbers = {"gradient": 100, MOMENTS: 21}
    sampled, always = method.widths(task, numbers), method.widths(plain, numbers)
    assert all(sampled[name] < 0.8 * always[name] for name in numbers)
    outcome, _ = play(method, task, clients)
    assert outcome.diagnostics["epsilon"] < outcome.diagnostics["epsilon_always_drawn"]
    credit, none = guarantees(method, task, 10)
    assert credit["epsilon"] == pytest.approx(3.0, rel=1e-3)
    assert none["epsilon"] > 4.5
    assert any("at random" in line for line in credit["assumptions"])
    assert any("no credit" in line for line in none["assumptions"])
    with pytest.raises(ConfigError, match="more than sampling_rate"):
        play(method, private_task(method, small_task(total_clients=19), sampling_rate=0.1, **settings), clients)
    assert "drawn at random" in promises(method, task, 2, 10)[1]


def test_what_would_void_the_promise_is_refused() -> None:
    method, clients = PrivateSums(), small_clients(20, 20)
    task = private_task(method, budget_rounds=2, noise_clients=3)
    with pytest.raises(TooFew, match="noise of 2 clients"):
        play(method, task, clients)
    with pytest.raises(TooFew, match="sum of 2 clients"):
        GradientSums.from_total(method, task, asked(task), {}, 2)
    with pytest.raises(ConfigError, match="ε was for 2 rounds"):
        method.answer(task, asked(task, 3), clients[0])
    with pytest.raises(ConfigError, match="ε was for 2 rounds"):
        next(method.round(task, method.start(task, task.like), 3, [0, 1]))
    with pytest.raises(MessageError, match="first round, once"):
        method.answer(task, asked(task, 2, asks=True), clients[0])
    with pytest.raises(ConfigError, match="3 clients per round"):
        promises(method, task, 2, 2)
    with pytest.raises(ConfigError, match="round 3: ε was for 2"):
        promises(method, task, 3, 3)
    with pytest.raises(ConfigError, match="no privacy"):
        method.widths(private_task(method, epsilon=1e9, noise_clients=10**4), {"gradient": 10})


# -- Noise that drowns what is learned is said before the first round --------------------------------------------------

NUMBERS, RECORDS, ROUNDS = 7510, 923, 20


def large_task(method: PrivateSums, **settings: Any) -> Task:
    task = private_task(method, **settings)
    task.like = 13.0 * nn.functional.normalize(torch.ones(NUMBERS), dim=0)
    return task


def test_the_way_that_is_said_is_the_way_that_noise_goes() -> None:
    method = PrivateSums()
    task = large_task(method)
    width = method.widths(task, {"gradient": NUMBERS, "samples": 1})["gradient"]
    deviation = width * math.sqrt(6) / (GRAINS * RECORDS)
    draw = torch.Generator().manual_seed(0)
    w, v = task.like, torch.zeros(NUMBERS)
    for _ in range(ROUNDS):
        v = method.momentum * v + deviation * torch.randn(NUMBERS, generator=draw)
        w = w + method.lr * v
    gone = float((w - task.like).norm() / task.like.norm())
    (said,) = noise_advice(method, task, RECORDS, 6, ROUNDS)
    # A sum of squares of D normal numbers is off by √(2/D) = 1.6 %, and the text has two digits.
    assert float(said.split(" times their norm")[0].split()[-1]) == pytest.approx(gone, rel=0.12)
    named = float(said.split("lr = ")[1])
    assert not noise_advice(PrivateSums(lr=0.95 * named), task, RECORDS, 6, ROUNDS)
    assert noise_advice(PrivateSums(lr=1.05 * named), task, RECORDS, 6, ROUNDS)
    task.like = torch.zeros_like(task.like)  # a head that begins at zero has no norm to compare with
    assert not noise_advice(method, task, RECORDS, 6, ROUNDS)
