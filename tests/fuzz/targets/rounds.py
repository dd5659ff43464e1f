"""`methods/`: a round in which one client, or the server, says something else than it should."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ntkfl.federation.evaluation import add_up, counts, question
from ntkfl.federation.round_driver import drive
from ntkfl.methods import METHODS, ClientRound, Method, Outcome, SumRidge, Task
from ntkfl.methods.base import Outgoing
from ntkfl.methods.batchnorm import answer
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from tests.fuzz.target import Target
from tests.fuzz.targets.twists import sealed_again, twisted

_OPTIONS: dict[str, dict[str, object]] = {
    "ntk-fl": {"steps": (5.0, 20.0, 50.0, 200.0, 1000.0, 4000.0)},
    "fedavg": {"local_steps": 2},
    "scaffold": {"local_steps": 2},
    "fednova": {"local_steps": 2},
    "fedadam": {"local_steps": 2},
    "fedcom": {"local_steps": 2},
    "qsgd": {},
}


def targets(scratch: Path) -> list[Target]:
    found = []
    for name, options in _OPTIONS.items():
        method = METHODS[name](**options)
        found += _of(method)
    found += [_ridge(values) for values in ("float32", "float16", "8bit")]
    task = _task()
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    said = counts(task, question(1, task.like), x, y)
    found.append(Target("counts", (said.encode(),), lambda data: _score(Message.decode(data)), sealed_again, twisted))
    return found


def _ridge(values: str) -> Target:
    """What a server takes for a client's sums is finite, symmetric and of the last layer's size."""
    method, task = SumRidge(values=values), _task()
    (reply,) = method.answer(task, Message("weights", 1, {"weights": task.like}), _clients()[:1])

    def check(data: bytes) -> None:
        forged = Message.decode(data)
        sums = method.read(task, forged)
        method.check(task, forged)
        assert all(bool(part.isfinite().all()) for part in sums.parts())
        assert sums.gram.shape == (5, 5)
        assert bool((sums.gram == sums.gram.mT).all())

    return Target(f"server sum-ridge {values}", (reply.encode(),), check, sealed_again, twisted, share=0.25)


def _task() -> Task:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    return Task(model, 3, "ce", total_clients=4)


def _clients() -> list[ClientRound]:
    return [
        ClientRound(i, torch.randn(3 + i, 5), torch.randint(0, 3, (3 + i,)), Randomness.simulated(i)) for i in range(2)
    ]


def _score(message: Message) -> None:
    score = add_up([message], real_targets=False)
    assert score.accuracy is not None
    assert 0 <= score.accuracy <= 1
    assert score.loss is not None
    assert 0 <= score.loss <= 1e6


def _of(method: Method) -> list[Target]:
    """A target for every message of the method's round, either way."""
    task, clients = _task(), _clients()
    state = method.start(task, task.like)
    asked: list[Message] = []
    told: list[list[Message]] = []

    def exchange(outgoing: Outgoing) -> list[Message]:
        each = [outgoing if isinstance(outgoing, Message) else outgoing[client.id] for client in clients]
        asked.append(each[0])
        told.append([answer(method, task, m, [c])[0] for m, c in zip(each, clients, strict=True)])
        return list(told[-1])  # a round may let go of replies as it reads them

    drive(method, task, state, 1, [0, 1], exchange)

    def server(number: int, data: bytes) -> None:
        forged = Message.decode(data)
        replies = iter(
            [[forged if i == number and k == 0 else m for k, m in enumerate(own)] for i, own in enumerate(told)]
        )
        outcome: Outcome = drive(method, task, state, 1, [0, 1], lambda _: next(replies))
        assert all(bool(t.isfinite().all()) for t in outcome.state.values() if t.is_floating_point())
        assert {k: t.shape for k, t in outcome.state.items()} == {k: t.shape for k, t in state.items()}

    def client(data: bytes) -> None:
        for reply in answer(method, task, Message.decode(data), [clients[0]]):
            reply.encode()

    found = []
    for number, (question_, replies) in enumerate(zip(asked, told, strict=True)):
        check: Callable[[bytes], None] = partial(server, number)
        name = f"{method.name} {replies[0].kind}"
        found.append(Target(f"server {name}", (replies[0].encode(),), check, sealed_again, twisted, share=0.25))
        name = f"{method.name} {question_.kind}"
        found.append(Target(f"client {name}", (question_.encode(),), client, sealed_again, twisted, share=0.25))
    return found
