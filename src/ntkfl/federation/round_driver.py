"""One round: the method's generator driven to its end.

Running statistics of batch normalisation travel beside the weights of any method that trains locally, and are averaged
from the replies: a step of the driver, so that no method needs to know of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from torch import Tensor

from ntkfl.errors import ConfigError
from ntkfl.methods import Method, Outcome, State, Task
from ntkfl.methods.base import Outgoing
from ntkfl.methods.batchnorm import NAME, attach, averaged, load_statistics
from ntkfl.wire import Message

Exchange = Callable[[Outgoing], list[Message]]


def drive(method: Method, task: Task, state: State, round: int, cohort: Sequence[int], exchange: Exchange) -> Outcome:
    """What the round ends with; `exchange` turns a message of the server into the clients' replies."""
    statistics = state.get(NAME)
    if statistics is not None:
        load_statistics(task.model, statistics)
    generator = method.round(task, state, round, cohort)
    if not isinstance(generator, Generator):
        raise ConfigError(f"{method.name}: `round` has no yield: it must yield a message, then return an Outcome")
    message = next(generator)
    while True:
        replies = exchange(message if statistics is None else attach(message, state[NAME]))
        statistics = averaged(replies, statistics)
        try:
            message = generator.send(replies)
        except StopIteration as end:
            outcome = _checked(method, task, end.value)
            return outcome if statistics is None else replace(outcome, state={NAME: statistics} | outcome.state)


def _checked(method: Method, task: Task, outcome: object) -> Outcome:
    """What `round` returned, if the server can go on from it: else an error that says what a method must return."""
    if not isinstance(outcome, Outcome):
        raise ConfigError(f"{method.name}: `round` must return an Outcome, not {outcome!r:.80}")
    weights, d = outcome.state.get("weights"), task.like.numel()
    if not isinstance(weights, Tensor) or weights.shape != (d,):
        found = "none" if weights is None else f"{list(getattr(weights, 'shape', []))}"
        raise ConfigError(f"{method.name}: the Outcome's state must have 'weights' of shape [{d}], found {found}")
    return outcome if outcome.train_loss is None else replace(outcome, train_loss=float(outcome.train_loss))
