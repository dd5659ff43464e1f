"""What clients release against the discrete Gaussian that ε counts on, and on neighbouring data; broken samplers fail.

The tests look from outside: at clients' integers with noise and without, through `answer` and `integers` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import beta, chisquare, norm

from ntkfl.methods import ClientRound, PrivateSums
from ntkfl.methods.sums import noisy_sums
from ntkfl.privacy.randomness import Integers, Randomness, discrete_gaussians
from ntkfl.privacy.sum_noise import GRAINS, spent
from tests.methods.private import asked, integers, others, private_task
from tests.methods.rounds import small_clients

Floats = NDArray[np.float64]
Sampler = Callable[..., Integers]
CLIENTS, ROUNDS = 5, 60
FAR = 6.0  # standard deviations that no honest statistic is off by


# -- Five broken samplers ----------------------------------------------------------------------------------------------


def half_the_scale(sigma: float, size: int, *rest: object) -> Integers:
    return discrete_gaussians(sigma / 2, size, *rest)  # type: ignore[arg-type]


def reused_stream(sigma: float, size: int, randomness: Randomness, *rest: object) -> Integers:
    """The same for every question of a client, and for every client."""
    return discrete_gaussians(sigma, size, Randomness(bytes(32)), *rest)  # type: ignore[arg-type]


def float_rounding(sigma: float, size: int, *rest: object) -> Integers:
    """A draw that went through half precision: its last bits are missing."""
    drawn, unit = discrete_gaussians(sigma, size, *rest), 2.0 ** round(math.log2(sigma))  # type: ignore[arg-type]
    return ((drawn / unit).astype(np.float16).astype(np.float64) * unit).astype(np.int64)


def clipped_tails(sigma: float, size: int, *rest: object) -> Integers:
    return discrete_gaussians(sigma, size, *rest).clip(-int(2.5 * sigma), int(2.5 * sigma))  # type: ignore[arg-type]


def dropped_client(clients: int = CLIENTS) -> Sampler:
    """Clients draw their noise in turn; the first one forgets to."""
    numbers = count()

    def drawn(sigma: float, size: int, *rest: object) -> Integers:
        made = discrete_gaussians(sigma, size, *rest)  # type: ignore[arg-type]
        return made if next(numbers) % clients else np.zeros_like(made)

    return drawn


BROKEN: dict[str, Callable[[], Sampler]] = {
    "half the scale": lambda: half_the_scale,
    "reused stream": lambda: reused_stream,
    "float rounding": lambda: float_rounding,
    "clipped tails": lambda: clipped_tails,
    "dropped client": dropped_client,
}


# -- Against the distribution ------------------------------------------------------------------------------------------


def released() -> tuple[Integers, float]:
    """The noise [rounds, clients, numbers] of what every round releases, and its σ. A client's key never changes: what
    differs between rounds is the question.
    """
    method, clients = PrivateSums(), small_clients(*[12] * CLIENTS)
    loud, quiet = private_task(method, noise_clients=CLIENTS), private_task(method, epsilon=None)
    found = np.zeros((ROUNDS, CLIENTS, loud.like.numel() + 1), dtype=np.int64)
    loud.privacy = loud.privacy.model_copy(update={"budget_rounds": ROUNDS})
    quiet.privacy = quiet.privacy.model_copy(update={"budget_rounds": ROUNDS})
    for round in range(ROUNDS):
        for number, client in enumerate(clients):
            one = ClientRound(number, client.x, client.y, Randomness(bytes([number]) * 32))
            noisy, plain = (integers(method, task, one, round + 1) for task in (loud, quiet))
            arrays = [(noisy[name] - plain[name]).numpy() for name in ("gradient", "samples")]
            found[round, number] = np.concatenate(arrays).astype(np.int64)
    return found, method.widths(loud, {"gradient": loud.like.numel(), "samples": 1})["gradient"]


def problems(noise: Integers, sigma: float) -> list[str]:
    """Which properties of independent discrete Gaussians of this σ (above 8) the noise [rounds, clients, numbers] does
    not have.
    """
    z, found = noise / sigma, list[str]()
    for power, mean, spread in ((1, 0.0, 1), (2, 1.0, 2), (3, 0.0, 15), (4, 3.0, 96)):
        if abs(float((z**power).mean()) - mean) > FAR * math.sqrt(spread / z.size):
            found.append(f"moment {power}")
    for axis, name in enumerate(("round", "client", "number")):
        others_of = tuple(a for a in range(3) if a != axis)
        if float(np.abs((z**2).mean(others_of) - 1).max()) > FAR * math.sqrt(2 * z.shape[axis] / z.size):
            found.append(f"variance of a {name}")
        rows = np.moveaxis(z, axis, 0).reshape(z.shape[axis], -1)
        together = (rows @ rows.T / rows.shape[1])[np.triu_indices(len(rows), 1)]
        if float(np.abs(together).max()) > FAR / math.sqrt(rows.shape[1]):
            found.append(f"correlation of {name}s")
    for beyond in (1.0, 2.0, 2.5, 3.0):
        expected = 2 * float(norm.sf((math.floor(beyond * sigma) + 0.5) / sigma)) * z.size
        if abs(int((np.abs(noise) > beyond * sigma).sum()) - expected) > FAR * math.sqrt(expected):
            found.append(f"tail beyond {beyond}")
    for bits in (1, 3):
        if chisquare(np.bincount((noise % 2**bits).reshape(-1), minlength=2**bits)).pvalue < 1e-8:
            found.append(f"last {bits} bits")
    edges = norm.ppf(np.arange(1, 32) / 32) * sigma
    if chisquare(np.bincount(np.searchsorted(edges, noise.reshape(-1)), minlength=32)).pvalue < 1e-8:
        found.append("distribution")
    return found


def test_what_clients_release_is_the_integers_and_a_discrete_gaussian() -> None:
    assert problems(*released()) == []


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("half the scale", "moment 2"),
        ("reused stream", "correlation of rounds"),
        ("float rounding", "last 1 bits"),
        ("clipped tails", "tail beyond 2.5"),
        ("dropped client", "variance of a client"),
    ],
)
def test_a_broken_sampler_is_found(name: str, sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noisy_sums, "discrete_gaussians", BROKEN[name]())
    assert sign in problems(*released())


# -- On neighbouring data ----------------------------------------------------------------------------------------------

TIMES = 2500  # totals of either data set to learn from, and as many to test with


def totals(of: dict[str, torch.Tensor], method: PrivateSums, clients: int, start: int) -> Integers:
    """So many totals [times, numbers] of clients of which the first holds these integers and the others nothing."""
    task = private_task(method, noise_clients=clients, budget_rounds=1)
    question, found = asked(task), []
    vectors = {"gradient": of["gradient"] / GRAINS}
    nothing = {"gradient": torch.zeros_like(vectors["gradient"])}
    for draw in range(start, start + 2 * TIMES):
        total = torch.zeros(len(nothing["gradient"]), dtype=torch.int64)
        for number in range(clients):
            one = ClientRound(number, torch.zeros(1), torch.zeros(1), Randomness.simulated(draw, "client", number))
            total = total + method.integers(task, question, one, nothing if number else vectors).arrays["gradient"]
        found.append(total.numpy())
    return np.stack(found)


def shown(a: Integers, b: Integers, at: Integers, sigma: float, delta: float) -> float:
    """A lower bound at 97 % on ε from totals of neighbours, by the best of three witnesses, found on one half and
    tested on the other: along the difference, by the last bits of the integers `at` that are in `a`,
    by the largest number.
    """
    along = a[:TIMES].mean(0) - b[:TIMES].mean(0)
    witnesses: list[Callable[[Integers], Floats]] = [
        lambda t: t @ along,
        lambda t: ((t - at) % 4 == 0).mean(1),
        lambda t: -np.abs(t - at).max(1) / sigma,
    ]
    best = 0.0
    for witness in witnesses:
        scores = [witness(side) for side in (a, b)]
        low, high = 0.0, 1.0
        for threshold in np.quantile(np.concatenate([side[:TIMES] for side in scores]), [0.05, 0.3, 0.5, 0.7, 0.95]):
            hits, alarms = (int((side[TIMES:] > threshold).sum()) for side in scores)
            low = float(beta.ppf(1e-3, hits, TIMES - hits + 1)) if hits else 0.0
            high = float(beta.ppf(1 - 1e-3, alarms + 1, TIMES - alarms)) if alarms < TIMES else 1.0
            mu = float(norm.ppf(low) - norm.ppf(high))
            best = max(best, spent([(mu**2 / 2, 1)], delta) if mu > 0 else 0.0)
    return best


def neighbours(clients: int) -> tuple[float, float]:
    """ε that totals with and without the record that counts most show at δ, and the promise."""
    method, (client,) = PrivateSums(clip=0.2, input_share=0.0), small_clients(20)
    quiet = private_task(method, epsilon=None)
    whole = integers(method, quiet, client)
    without = [integers(method, quiet, others(client, record)) for record in range(20)]
    less = max(without, key=lambda one: float((whole["gradient"] - one["gradient"]).norm()))
    task = private_task(method, noise_clients=clients, budget_rounds=1)
    sigma = method.widths(task, {"gradient": task.like.numel()})["gradient"] * math.sqrt(clients)
    a, b = totals(whole, method, clients, 0), totals(less, method, clients, 10**6)
    at = whole["gradient"].long().numpy()
    return shown(a, b, at, sigma, task.privacy.delta), task.privacy.epsilon or 0.0


def test_neighbouring_data_are_as_hard_to_tell_apart_as_promised() -> None:
    for clients in (1, 2):
        found, promised = neighbours(clients)
        assert 0.3 * promised < found <= promised


@pytest.mark.parametrize("name", BROKEN)
def test_under_a_broken_sampler_neighbouring_data_are_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = name == "dropped client"
    monkeypatch.setattr(noisy_sums, "discrete_gaussians", dropped_client(2) if dropped else BROKEN[name]())
    found, promised = neighbours(2 if dropped else 1)
    assert found > promised
