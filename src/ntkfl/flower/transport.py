"""The way to clients on Flower's nodes: questions through a grid, replies until the strategy's timeout."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ntkfl.errors import MessageError, TooFew
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import MALFORMED
from ntkfl.flower.records import FROZEN, Notes, content, payload_of, wants_frozen
from ntkfl.methods.base import Outgoing
from ntkfl.wire import Message as WireMessage

log = logging.getLogger("flwr")
_FIRST_LOOK, _LAST_LOOK = 0.05, 3.0  # seconds between two looks for replies: soon at first, then as Flower does
_LONGEST = 300  # characters of a client's reason that are kept
_RAISED = re.compile(r"<class '[\w.]*?(\w+)'>:<'(.*)'>", re.DOTALL)  # how Flower writes what a ClientApp raised
_SIMULATED = "Exception ClientAppException occurred. Message: "  # what Ray's traceback ends with


class FlowerTransport(Transport):
    """To the nodes that Flower sampled for the round; a client's number is its node's id.

    The `terms` (plain values) and `config` (the user's own) go along with every question. `frozen` is what of the
    network does not train: a client whose own differs asks for it, and is sent it once.
    """

    def __init__(self, grid: Grid, timeout: float | None, terms: Notes, frozen: ArrayRecord) -> None:
        self.grid, self.timeout, self.terms, self.frozen = grid, timeout, terms, frozen
        self.nodes: list[int] = []
        self.config: dict[str, ConfigRecord] = {}
        self._exchanges = 0  # of this round so far

    def available(self, wanted: int) -> Sequence[int]:
        return self.nodes

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        self._exchanges = 0

    def exchange(self, message: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[WireMessage]:
        """Replies in the order of node ids. A client that failed in an earlier exchange of the round is not asked."""
        asked = [client for client in cohort if str(client) not in traffic.failed]
        questions = dict.fromkeys(asked, message) if isinstance(message, WireMessage) else message
        encoded = {id(question): question.encode() for question in questions.values()}  # once, where all get the same
        payloads = {client: encoded[id(questions[client])] for client in asked}
        for client, payload in payloads.items():
            traffic.downlink[questions[client].kind] += len(payload)
        received, replies = [], self.ask(payloads, traffic)
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

    def ask(self, payloads: Mapping[int, bytes], traffic: Traffic) -> dict[int, bytes]:
        """One exchange in bytes, by node: what a shuffler's transport goes through. `TooFew` where nobody answered."""
        began = time.perf_counter()
        notes = {**self.terms, "exchange": self._exchanges}
        self._exchanges += 1
        questions = {node: content(notes, payload) for node, payload in payloads.items()}
        replies = self.send(questions, traffic)
        lacking = {node: questions[node] for node, reply in replies.items() if wants_frozen(reply)}
        for node, question in lacking.items():
            del replies[node]
            question[FROZEN] = self.frozen
            traffic.downlink["frozen"] += sum(len(array.data) for array in self.frozen.values())
        replies |= self.send(lacking, traffic)
        found = {}
        for node, reply in replies.items():
            try:
                found[node] = payload_of(reply)
            except MessageError as error:
                self._fail(node, str(error), traffic)
        traffic.client_seconds += time.perf_counter() - began
        if not found:
            why = "; ".join(f"node {node}: {reason}" for node, reason in list(traffic.failed.items())[:3])
            raise TooFew(f"none of {len(self.nodes)} nodes answered: {why}")
        return found

    def send(self, contents: Mapping[int, RecordDict], traffic: Traffic) -> dict[int, Message]:
        """Replies by node, without those that failed: these are noted in the traffic, with the reason."""
        messages, replies = {}, dict[int, Message]()
        for node, records in contents.items():
            records.update(self.config)
            messages[node] = Message(records, dst_node_id=node, message_type=MessageType.TRAIN)
        waiting = {key for key in self.grid.push_messages(list(messages.values())) if key}
        nodes = {message.metadata.message_id: node for node, message in messages.items()}
        for key in nodes.keys() - waiting:
            self._fail(nodes[key], "it is not connected", traffic)
        until = time.monotonic() + (self.timeout if self.timeout is not None else float("inf"))
        pause = _FIRST_LOOK
        while waiting and time.monotonic() < until:
            for reply in self.grid.pull_messages(list(waiting)):
                waiting.discard(key := reply.metadata.reply_to_message_id)
                if not reply.has_error():
                    replies[nodes[key]] = reply
                else:
                    self._fail(nodes[key], _reason(reply), traffic)
            if waiting:
                time.sleep(max(0.0, min(pause, until - time.monotonic())))
                pause = min(1.5 * pause, _LAST_LOOK)
        for key in waiting:
            self._fail(nodes[key], f"no answer within {self.timeout:g} s", traffic)
        return {node: replies[node] for node in sorted(replies)}

    def _fail(self, node: int, reason: str, traffic: Traffic) -> None:
        traffic.failed[str(node)] = reason
        log.warning("node %d: %s", node, reason)


def _reason(reply: Message) -> str:
    """Why a node failed, fit for a log: one line, printable, not too long."""
    text = reply.error.reason or f"error {reply.error.code}"
    if found := _RAISED.search(text):
        text = f"{found[1]}: {found[2]}"
    text = text.rpartition(_SIMULATED)[2]
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
