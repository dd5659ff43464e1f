"""The driver plays a method's generator to its end, and carries statistics of batch normalisation beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ntkfl.errors import MessageError
from ntkfl.federation.round_driver import drive
from ntkfl.methods import ClientRound, FedAvg, Task
from ntkfl.methods.base import Outgoing
from ntkfl.methods.batchnorm import NAME, answer, start
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from tests.methods.rounds import play, small_clients, small_task


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def client(number: int, n: int) -> ClientRound:
    draws = torch.Generator().manual_seed(number)
    x = torch.randn(n, 5, generator=draws, dtype=torch.float64)
    return ClientRound(number, x, torch.arange(n) % 3, Randomness.simulated(number))


def test_a_round_ends_with_what_the_generator_returns() -> None:
    task, clients, method = small_task(), small_clients(9, 12), FedAvg(local_steps=3)
    state, numbers = method.start(task, task.like), [c.id for c in clients]

    def exchange(message: Outgoing) -> list[Message]:
        assert isinstance(message, Message)
        return method.answer(task, message, clients)

    outcome = drive(method, task, state, 1, numbers, exchange)
    assert torch.equal(outcome.state["weights"], play(method, task, clients, state)[0].state["weights"])
    assert NAME not in outcome.state


def test_statistics_are_sent_along_and_averaged() -> None:
    task, method, clients = Task(normalised(), 3, "ce"), FedAvg(local_steps=3), [client(0, 20), client(3, 30)]
    state = start(method, task, task.like)
    replies: list[Message] = []

    def exchange(message: Outgoing) -> list[Message]:
        assert isinstance(message, Message)
        assert torch.equal(message.arrays[NAME], state[NAME])
        replies.extend(answer(method, task, message, clients))
        return list(replies)

    outcome = drive(method, task, state, 1, [0, 3], exchange)
    own = [reply.arrays[NAME] for reply in replies]
    assert not torch.equal(own[0], own[1])
    assert torch.allclose(outcome.state[NAME], (own[0] + own[1]) / 2)


def test_statistics_of_another_shape_are_no_reply() -> None:
    task, method, clients = Task(normalised(), 3, "ce"), FedAvg(local_steps=1), [client(0, 20)]

    def exchange(message: Outgoing) -> list[Message]:
        assert isinstance(message, Message)
        (reply,) = answer(method, task, message, clients)
        return [Message(reply.kind, reply.round, {**reply.arrays, NAME: torch.zeros(3).double()})]

    with pytest.raises(MessageError):
        drive(method, task, start(method, task, task.like), 1, [0], exchange)
