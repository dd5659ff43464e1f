"""Running statistics of batch normalisation: what local training changes beside weights, and averaging methods average.

They travel beside the weights, around any method's own messages, so that no method needs to know of them. NTK-FL
evolves weights alone: there they stay as they were broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ntkfl.errors import ConfigError
from ntkfl.methods.base import ClientRound, Method, Outgoing, State, Task
from ntkfl.wire import Message

NAME = "statistics"


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Running means and variances of the model's batch normalisations, by name; none of a backbone, which keeps its."""
    owners = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, _BatchNorm) and m.track_running_stats and not getattr(m, "statistics_stay", False)
    }
    found = {}
    for name, module in owners.items():
        for kind in ("running_mean", "running_var"):
            found[f"{name}.{kind}" if name else kind] = getattr(module, kind)
    return found


def flat_statistics(model: nn.Module) -> Tensor | None:
    """All of them as one vector [b]; None where there are none."""
    values = list(statistics(model).values())
    return torch.cat([v.detach().reshape(-1) for v in values]) if values else None


def load_statistics(model: nn.Module, vector: Tensor) -> None:
    """Write a vector [b] into the model's own, in place."""
    parts = torch.split(vector, [v.numel() for v in statistics(model).values()])
    for own, part in zip(statistics(model).values(), parts, strict=True):
        own.copy_(part.view_as(own))


def start(method: Method, task: Task, weights: Tensor) -> State:
    """The method's first state, with the model's statistics where it trains them."""
    state = method.start(task, weights)
    own = flat_statistics(task.model)
    return state if own is None or not method.trains_locally else state | {NAME: own}


def advice(method: Method, task: Task) -> list[str]:
    """What the method advises, and what becomes of batch normalisation where weights alone are trained."""
    if method.trains_locally or not statistics(task.model):
        return method.advice()
    frozen = (
        f"the network has batch normalisation, and {method.name} trains weights alone: running means and variances "
        "stay as they are, which costs accuracy unless they come pretrained; use nn.GroupNorm in its place, or a "
        "method whose clients train locally (fedavg)"
    )
    return [*method.advice(), frozen]


def attach(outgoing: Outgoing, vector: Tensor) -> Outgoing:
    """The server's message, or each client's own, with statistics [b] beside what it says."""
    if isinstance(outgoing, Message):
        return _with(outgoing, vector)
    return {client: _with(message, vector) for client, message in outgoing.items()}


def averaged(replies: Sequence[Message], before: Tensor | None) -> Tensor | None:
    """The mean of the clients' statistics; those from before the exchange where not all replies hold some."""
    if before is None or not all(NAME in reply.arrays for reply in replies):
        return before
    return torch.stack([reply.take(NAME, tuple(before.shape), before) for reply in replies]).mean(0)


def answer(method: Method, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
    """`method.answer`, beginning from the statistics sent, and with those the clients ended with in their replies."""
    if NAME not in message.arrays:
        return _answered(method, task, message, clients)
    own = flat_statistics(task.model)
    if own is None:
        raise ConfigError("the server sends statistics of batch normalisation, and this model has none")
    load_statistics(task.model, message.take(NAME, tuple(own.shape), own))
    replies = _answered(method, task, message, clients)
    return [
        reply if client.statistics is None else _with(reply, client.statistics)
        for reply, client in zip(replies, clients, strict=True)
    ]


def _answered(method: Method, task: Task, message: Message, clients: Sequence[ClientRound]) -> list[Message]:
    """`method.answer`, if it is one message of tensors per client: else clients would be lost without a word."""
    replies = method.answer(task, message, clients)
    if not isinstance(replies, list) or len(replies) != len(clients):
        found = f"a list of {len(replies)}" if isinstance(replies, list) else f"{type(replies).__name__}"
        raise ConfigError(
            f"{method.name}: `answer` must return a list with one message per client, here {len(clients)}, got {found}"
        )
    for name, array in (pair for reply in replies for pair in reply.arrays.items()):
        if not isinstance(array, Tensor):
            raise ConfigError(f"{method.name}: {name!r} in a reply must be a tensor, not {array!r:.60}")
    return replies


def _with(message: Message, vector: Tensor) -> Message:
    return Message(message.kind, message.round, {**message.arrays, NAME: vector})
