"""One round: the method's generator driven to its end.

Running statistics of batch normalisation travel beside the weights of any method that trains locally, and are averaged
from the replies: a step of the driver, so that no method needs to know of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

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
    message = next(generator)
    while True:
        replies = exchange(message if statistics is None else attach(message, state[NAME]))
        statistics = averaged(replies, statistics)
        try:
            message = generator.send(replies)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome if statistics is None else replace(outcome, state={NAME: statistics} | outcome.state)
