"""What tests of differentially private methods share: tasks with settings, one client's integers, how wide noise is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ntkfl.methods import ClientRound, Method, Task
from ntkfl.methods.base import privacy_of
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.settings import Privacy
from ntkfl.wire import Message
from tests.methods.rounds import small_task


def private_task(method: Method, task: Task | None = None, **settings: Any) -> Task:
    """A small task of the same weights every time, or this one, with such privacy settings over the method's own."""
    torch.manual_seed(0)
    task = task or small_task()
    task.privacy = privacy_of(method, Privacy(**settings))
    return task


def asked(task: Task, round: int = 1, asks: bool = False) -> Message:
    arrays = {"weights": task.like} | ({"asks": torch.tensor(1, dtype=torch.uint8)} if asks else {})
    return Message("weights", round, arrays)


def integers(method: Method, task: Task, client: ClientRound, round: int = 1, asks: bool = False) -> dict[str, Tensor]:
    """A client's reply, in float64."""
    reply = method.answer(task, asked(task, round, asks), client)
    return {name: array.double() for name, array in reply.arrays.items()}


def others(client: ClientRound, *rows: int) -> ClientRound:
    """The client without these records."""
    kept = [i for i in range(len(client)) if i not in rows]
    return ClientRound(client.id, client.x[kept], client.y[kept], client.randomness)


def noise(method: Method, loud: Task, quiet: Task, client: ClientRound, asks: bool = False) -> dict[str, Tensor]:
    """Noise of 60 draws of a client's randomness, by array: replies with an ε minus those without."""
    found: dict[str, list[Tensor]] = {}
    for key in range(60):
        one = ClientRound(0, client.x, client.y, Randomness(bytes([key]) * 32))
        noisy, plain = integers(method, loud, one, asks=asks), integers(method, quiet, one, asks=asks)
        for name in noisy:
            found.setdefault(name, []).append(noisy[name] - plain[name])
    return {name: torch.cat(drawn) for name, drawn in found.items()}


def assert_variance(drawn: Tensor, expected: float) -> None:
    """The mean square of independent Gaussians within five standard errors."""
    assert float(drawn.square().mean()) / expected == pytest.approx(1, abs=5 * math.sqrt(2 / len(drawn)))
