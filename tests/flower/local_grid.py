"""A grid in this process: ServerApp and ClientApps are the real ones, and every message goes through Flower's own
serialisation; only the network between them is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

App = Callable[[Message, Context], Message]


def crossed(message: Message) -> Message:
    """The message as it arrives elsewhere: taken apart into bytes and put together again."""
    contents = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(arrived, Message)
    return arrived


class LocalGrid(Grid):
    """`apps` by node id. A node that raises replies with an error, one in `silent` never replies."""

    def __init__(
        self, apps: Mapping[int, App], silent: Iterable[int] = (), online: Iterable[int] | None = None
    ) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.apps, self.silent = dict(apps), set(silent)
        self.online = set(apps) if online is None else set(online)
        self.sent: list[Message] = []
        self._pending: dict[str, Message] = {}
        self._ids = itertools.count()
        super().__init__()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message-{next(self._ids)}"
            if message.metadata.dst_node_id not in self.online:
                continue
            self._pending[message.metadata.message_id] = message
            self.sent.append(message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies in an order of no meaning: the last asked answers first."""
        replies = []
        for key in sorted(message_ids, reverse=True):
            asked = self._pending[key]
            node = asked.metadata.dst_node_id
            if node not in self.silent:
                del self._pending[key]
                replies.append(self._reply(asked, node))
        return replies

    def _reply(self, asked: Message, node: int) -> Message:
        context = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
        arrived = crossed(asked)
        arrived.metadata.__dict__["_message_id"] = asked.metadata.message_id
        try:
            reply = self.apps[node](arrived, context)
        except Exception as error:
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=arrived)
        return crossed(reply)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.online)

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError
