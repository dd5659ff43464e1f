"""A grid in this process: real ClientApps, asked by a real strategy; only the network between them is missing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

try:
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:  # before 1.38
    TaskIdentity = None  # type: ignore[assignment, misc]


class LocalGrid(Grid):
    """`apps` by node id. A node that raises replies with an error, one in `silent` never replies."""

    def __init__(self, apps: Mapping[int, ClientApp], run_id: int = 1, silent: Iterable[int] = ()) -> None:
        if TaskIdentity is not None:  # Flower makes messages on behalf of a task, which nobody has started here
            TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.apps, self.run_id, self.silent = dict(apps), run_id, set(silent)
        self.contexts = {
            node: Context(run_id, node, {"partition-id": number}, RecordDict(), {})
            for number, node in enumerate(sorted(apps))
        }
        self.asked: list[Message] = []
        self.heard: list[Message] = []
        self.replies: dict[str, Message] = {}
        self._ids = itertools.count()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            key = f"message-{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = key
            message.metadata.__dict__["_run_id"] = self.run_id
            if message.metadata.dst_node_id in self.apps:
                self.asked.append(copy.deepcopy(message))
                ids.append(key)
                if message.metadata.dst_node_id not in self.silent:
                    self.replies[key] = self.reply(message)
                    self.heard.append(copy.deepcopy(self.replies[key]))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies in an order of no meaning: the last asked answers first."""
        return [self.replies.pop(key) for key in sorted(message_ids, reverse=True) if key in self.replies]

    def reply(self, message: Message) -> Message:
        """What a node answers. What it sends is its own: nothing is shared with the server's objects."""
        node = message.metadata.dst_node_id
        arrived = copy.deepcopy(message)
        try:
            reply = self.apps[node](arrived, self.contexts[node])
        except Exception as error:  # as Flower words it
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=arrived)
        return copy.deepcopy(reply)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def set_run(self, *_: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError
