"""One-run auditing of private-sums: canaries are guessed no better than ε allows, and always without noise.

Steinke, Nasr, Jagielski, Privacy Auditing with One (1) Training Run (2023): of m canaries, each in or out by a fair
coin, an (ε, 0)-private mechanism lets nobody guess more than Binomial(m, e^ε / (1 + e^ε)) right, stochastically.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ntkfl.methods import ClientRound, PrivateSums, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.sum_noise import GRAINS
from ntkfl.wire import Message

CANARIES = 400


def right_guesses(method: PrivateSums) -> int:
    """Canary j is the j-th unit vector, so that its clipped gradient lies in columns that no other touches."""
    model = nn.Linear(CANARIES, 2, bias=False).double()
    nn.init.zeros_(model.weight)
    task = Task(model, 2, "ce")
    inside = torch.from_numpy(Randomness.simulated(3).integers("flips", CANARIES, 2)).bool()
    x = 100 * torch.eye(CANARIES, dtype=torch.float64)[inside]
    client = ClientRound(0, x, torch.zeros(len(x), dtype=torch.int64), Randomness.simulated(4))
    (reply,) = method.answer(task, Message("weights", 1, {"weights": task.like}), [client])
    gradient = reply.arrays["gradient"].double().view(2, CANARIES)
    score = (gradient[1] - gradient[0]) / math.sqrt(2)  # along the gradient of class 0 at equal probabilities
    return int(((score > GRAINS / 2) == inside).sum())


def least_epsilon(right: int) -> float:
    """The smallest ε that 95 % confidence leaves: P[Binomial(m, e^ε/(1+e^ε)) ≥ right] ≥ 0.05."""

    def tail(epsilon: float) -> float:
        p = 1 / (1 + math.exp(-epsilon))
        logs = [
            math.lgamma(CANARIES + 1) - math.lgamma(k + 1) - math.lgamma(CANARIES - k + 1)
            + k * math.log(p) + (CANARIES - k) * math.log1p(-p)
            for k in range(right, CANARIES + 1)
        ]  # fmt: skip
        return math.fsum(map(math.exp, logs))

    low, high = 0.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if tail(middle) >= 0.05 else (middle, high)
    return low


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_canaries_stay_below_what_epsilon_allows(epsilon: float) -> None:
    method = PrivateSums(epsilon=epsilon, budget_rounds=1, input_share=0, clip=1.0, label_smoothing=0)
    assert least_epsilon(right_guesses(method)) <= epsilon


def test_without_noise_they_exceed_it() -> None:
    method = PrivateSums(epsilon=None, budget_rounds=1, input_share=0, clip=1.0, label_smoothing=0)
    assert least_epsilon(right_guesses(method)) > 3.0


def test_with_a_hundredth_of_the_noise_they_exceed_it() -> None:
    """The audit has power: noise that an ε of 1 does not get away with is found out."""
    method = PrivateSums(epsilon=1.0, budget_rounds=1, input_share=0, clip=1.0, label_smoothing=0, noise_clients=10**4)
    assert least_epsilon(right_guesses(method)) > 1.0
