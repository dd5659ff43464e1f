"""Clients added up by a tree of aggregators: the server gets one message, as if from one client.

`ntkfl bench tree` plays the same with 10,000 clients.
"""

from collections.abc import Iterable

import torch

import ntkfl
from ntkfl.methods import ClientRound, SumNTKFL, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message

CLIENTS, FAN = 100, 10

torch.manual_seed(0)
digits = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=20), seed=0)


class SumsOfMany(SumNTKFL):
    """Aggregators add replies up, so that no single client's can be limited."""

    step_limit = 0.0


method = SumsOfMany()
task = Task(ntkfl.models.mlp(64, 50, 10), 10, method.loss, label_smoothing=method.label_smoothing)


def ask(i: int, question: Message) -> Message:
    """What client i answers: it has ten digits."""
    x, y = digits.client(i % 20)
    own = torch.randint(len(y), (10,), generator=torch.Generator().manual_seed(i))
    return method.answer(task, question, ClientRound(i, x[own].flatten(1), y[own], Randomness.simulated(i))).message(1)


def add(replies: Iterable[Message]) -> Message:
    """An aggregator: it holds one running total, and passes it on in the form of a client's reply."""
    total: dict[str, torch.Tensor] = {}
    for reply in replies:
        total = {name: array + total[name] if total else array for name, array in reply.arrays.items()}
    return Message("sums", 1, total)


def tree(clients: range, question: Message) -> Message:
    if len(clients) == 1:
        return ask(clients[0], question)
    step = max(1, len(clients) // FAN)
    return add(tree(clients[i : i + step], question) for i in range(0, len(clients), step))


def server(weights: torch.Tensor, flat: bool) -> torch.Tensor:
    """A round: the method's own server side, which does not know who added up."""
    conversation = method.round(task, method.start(task, weights), 1, range(CLIENTS))
    question = next(conversation)
    assert isinstance(question, Message)
    replies = [ask(i, question) for i in range(CLIENTS)] if flat else [tree(range(CLIENTS), question)]
    try:
        conversation.send([method.replies["weights"].parse(reply, task) for reply in replies])
    except StopIteration as end:
        return end.value.state["weights"]
    raise AssertionError


def accuracy(weights: torch.Tensor) -> float:
    x, y = digits.test
    return float((task.predict(weights, x.flatten(1)).argmax(1) == y).double().mean())


start = task.like
through_the_tree, at_once = server(start, flat=False), server(start, flat=True)
apart = float((through_the_tree - at_once).norm() / (at_once - start).norm())
print(f"accuracy {accuracy(start):.1%} before, {accuracy(through_the_tree):.1%} after one round of {CLIENTS:,} clients")
print(f"the tree's weights differ from the flat sum's by {apart:.1e} of the step")
