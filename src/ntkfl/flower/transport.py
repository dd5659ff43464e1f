"""The way to clients on Flower's nodes: questions through a grid, replies until the strategy's timeout."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ntkfl.errors import ConfigError, MessageError, TooFew
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import MALFORMED
from ntkfl.flower.messages import Notes, content, payload_of
from ntkfl.methods.base import Outgoing
from ntkfl.wire import Message as WireMessage

log = logging.getLogger("flwr")
_PAUSE_S = 0.5  # between two looks for replies
_LONGEST = 300  # characters of a client's reason that are kept


class FlowerTransport(Transport):
    """To the nodes that Flower sampled for the round; a client's number is its node's id.

    The `terms` (plain values) and `config` (the user's own) go along with every question.
    """

    def __init__(self, grid: Grid, timeout: float | None, terms: Notes, config: Mapping[str, ConfigRecord]) -> None:
        self.grid, self.timeout, self.terms, self.config = grid, timeout, terms, config
        self.nodes: list[int] = []
        self._exchanges = 0  # of this round so far

    def available(self) -> Sequence[int]:
        """Flower has drawn them already."""
        return self.nodes

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        self._exchanges = 0

    def exchange(self, message: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[WireMessage]:
        """Replies in the order of node ids. A client that failed in an earlier exchange of the round is not asked."""
        if not isinstance(message, WireMessage):
            raise ConfigError("on Flower all clients are asked the same: this method's questions differ by client")
        asked = [client for client in cohort if str(client) not in traffic.failed]
        question = message.encode()
        traffic.downlink[message.kind] += len(question) * len(asked)
        received, replies = [], self.ask(question, asked, traffic)
        for client in sorted(replies):
            payload = replies.pop(client)  # let go as it is read: uploads are large
            try:
                received.append(WireMessage.decode(payload))
                traffic.uplink[received[-1].kind] += len(payload)
            except MessageError as error:
                traffic.rejected[MALFORMED] += 1
                traffic.rejected_clients += 1
                log.warning("node %d: its reply is not used: %s", client, error)
        return received

    def ask(self, question: bytes, asked: Sequence[int], traffic: Traffic) -> dict[int, bytes]:
        """One exchange in bytes, by node: what a shuffler's transport goes through. `TooFew` where nobody answered."""
        began, found = time.perf_counter(), {}
        notes = {**self.terms, "exchange": self._exchanges}
        self._exchanges += 1
        for node, reply in self.send({node: content(notes, question) for node in asked}, traffic).items():
            try:
                found[node] = payload_of(reply)
            except MessageError as error:
                fail(node, str(error), traffic)
        traffic.client_seconds += time.perf_counter() - began
        if not found:
            raise TooFew(f"none of {len(self.nodes)} nodes answered: {why(traffic)}")
        return found

    def send(self, contents: Mapping[int, RecordDict], traffic: Traffic) -> dict[int, Message]:
        """Replies by node, without those that failed: these are noted in the traffic, with the reason."""
        messages, replies = {}, dict[int, Message]()
        for node, records in contents.items():
            records.update(self.config)
            messages[node] = Message(records, dst_node_id=node, message_type=MessageType.TRAIN)
        waiting = {key for key in self.grid.push_messages(list(messages.values())) if key}
        nodes = {message.metadata.message_id: node for node, message in messages.items()}
        until = time.monotonic() + (self.timeout if self.timeout is not None else float("inf"))
        while waiting and time.monotonic() < until:
            for reply in self.grid.pull_messages(list(waiting)):
                waiting.discard(key := reply.metadata.reply_to_message_id)
                if reply.has_error():
                    fail(nodes[key], reply.error.reason or f"error {reply.error.code}", traffic)
                else:
                    replies[nodes[key]] = reply
            if waiting:
                time.sleep(_PAUSE_S)
        for node in messages.keys() - replies.keys():
            if str(node) not in traffic.failed:
                fail(node, "no answer: it is not connected, or took longer than the timeout", traffic)
        return {node: replies[node] for node in sorted(replies)}


def fail(node: int, reason: str, traffic: Traffic) -> None:
    """Note a node that gave nothing of use. The reason may be the client's: one line, printable, not too long; of a
    traceback in Flower's simulation, the message.
    """
    text = reason.rpartition("Message: ")[2]
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())[-_LONGEST:]
    traffic.failed[str(node)] = line
    log.warning("node %d: %s", node, line)


def why(traffic: Traffic) -> str:
    """Some of the nodes that failed, and their reasons."""
    return "; ".join(f"node {node}: {reason}" for node, reason in list(traffic.failed.items())[:3])
