"""`sum-ntk-fl`: clients' sums and the server's messages, in every form they take over a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

import torch

from ntkfl.errors import NTKFLError
from ntkfl.federation.round_driver import drive
from ntkfl.methods import ClientRound, State, SumNTKFL, Task
from ntkfl.methods.base import Outgoing
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from ntkfl.wire.container import pack, unpack
from tests.fuzz.target import Target
from tests.fuzz.targets.twists import sealed_again, twisted

# Round 1 asks for factors of inputs; round 3 does not, and of a judge it holds steps. A network with a layer that has
# no factors beside those that do sends the diagonal of the rest, and `largest` makes diagonals of factors.
_METHODS = {
    "halves": SumNTKFL(input_cohorts=2),
    "floats": SumNTKFL(values="float32", input_cohorts=2, largest=4, control="fixed"),
    "judge": SumNTKFL(control="judge", input_cohorts=1),
}
_DIGITS = "0123456789"


def targets(scratch: Path) -> list[Target]:
    return [target for name, method in _METHODS.items() for number in (1, 3) for target in _of(name, method, number)]


def _task(method: SumNTKFL) -> Task:
    layers = [torch.nn.Linear(5, 4), torch.nn.PReLU(), torch.nn.Linear(4, 3)]
    return Task(torch.nn.Sequential(*layers), 3, method.loss, label_smoothing=method.label_smoothing)


def _client(i: int) -> ClientRound:
    return ClientRound(i, torch.randn(3 + i, 5), torch.randint(0, 3, (3 + i,)), Randomness.simulated(i))


def _of(name: str, method: SumNTKFL, last: int) -> list[Target]:
    """The server's message of round `last`, and a client's reply to it, after honest rounds before it."""
    task, state = _task(method), {}
    asked: list[Message] = []
    told: list[Message] = []

    def exchange(clients: list[ClientRound], outgoing: Outgoing) -> list[Message]:
        assert isinstance(outgoing, Message)
        asked.append(outgoing)
        told[:] = method.answer(task, outgoing, clients)
        return list(told)

    before: State = method.start(task, task.like)
    for number in range(1, last + 1):
        clients = [_client(2 * number), _client(2 * number + 1)]
        state = before
        before = drive(method, task, state, number, [0, 1], partial(exchange, clients)).state

    def server(data: bytes) -> None:
        forged = Message.decode(data)
        measures = method.check(task, forged)  # what comes first: a reply may also be refused here
        assert measures is None or not bool(measures.isnan().any())  # inf is as extreme as can be, and dropped
        after = drive(method, task, state, last, [0, 1], lambda _: [forged, told[1]]).state
        assert "weights" in after
        for key, tensor in after.items():
            assert bool(tensor.isfinite().all())
            # A lie may end the asking early, or move μ to its bound, where one alternative is left; no more than that.
            if key not in ("mu", "alternatives"):
                assert tensor.shape == before.get(key, tensor).shape
            else:
                assert len(tensor) <= 3

    def client(data: bytes) -> None:
        one = _client(0)
        (reply,) = method.answer(task, Message.decode(data), [one])
        reply.encode()
        assert int(one.memory.get("constant_factors_sent", torch.tensor(0))) < 2**32

    return [
        Target(f"server sums {name} {last}", (told[0].encode(),), server, sealed_again, _twisted, share=0.25),
        Target(f"client sums {name} {last}", (asked[-1].encode(),), client, sealed_again, _twisted, share=0.25),
    ]


def _twisted(rng: Random, data: bytes) -> bytes:
    """As any message is twisted; or one array's name, which says what layer it is of, by a character."""
    if rng.random() < 0.7:
        return twisted(rng, data)
    try:
        kind, number, arrays = unpack(data)
    except NTKFLError:
        return data
    names = [name for name in arrays if "/" in name]
    if not names:
        return twisted(rng, data)
    name = rng.choice(names)
    at = rng.randrange(len(name))
    with_another = name[:at] + rng.choice([*_DIGITS, "", "-", "+", "T", "/", ".", "x"]) + name[at + rng.randrange(2) :]
    # In its place: halves are told apart by their order.
    renamed = {with_another if own == name else own: array for own, array in arrays.items()}
    return pack(kind, number, renamed) if with_another else data
