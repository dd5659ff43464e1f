"""The way to clients on Flower's nodes: questions through a grid, replies until the strategy's timeout."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ntkfl.errors import MessageError, TooFew
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import MALFORMED
from ntkfl.flower.records import FROZEN, Notes, content, notes_of, payload_of
from ntkfl.methods import State
from ntkfl.methods.base import Outgoing
from ntkfl.wire import Message as WireMessage

log = logging.getLogger("flwr")
_FIRST_LOOK, _LAST_LOOK = 0.05, 3.0  # seconds between two looks for replies: soon at first, then as Flower does
_LONGEST = 300  # characters of a client's reason that are kept
_RAISED = re.compile(r"<class '[\w.]*?(\w+)'>:<'(.*)'>", re.DOTALL)  # how Flower writes what a ClientApp raised
_MEMORY = "flower/run"


class FlowerTransport(Transport):
    """To the nodes that Flower has sampled for the round; a client's number is its node's id.

    `notes` (the run's terms) and `config` (the user's own) go along with every question. `frozen` are the weights that
    do not train: a client that has others asks for them, and is sent them once.
    """

    def __init__(self, grid: Grid, timeout: float | None, notes: Notes, frozen: ArrayRecord) -> None:
        self.grid, self.timeout, self.notes, self.frozen = grid, timeout, notes, frozen
        self.nodes: list[int] = []
        self.config: dict[str, ConfigRecord] = {}
        self._exchanges = 0  # of this round so far
        self._run: int | None = None  # Flower's run, while clients keep something between rounds

    def available(self, wanted: int) -> Sequence[int]:
        return self.nodes

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        self._exchanges = 0

    def exchange(self, message: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[WireMessage]:
        asked = [client for client in cohort if str(client) not in traffic.failed]
        if isinstance(message, WireMessage):
            messages, payloads = dict.fromkeys(asked, message), dict.fromkeys(asked, message.encode())
        else:
            messages = {client: message[client] for client in asked}
            payloads = {client: messages[client].encode() for client in asked}
        for client, payload in payloads.items():
            traffic.downlink[messages[client].kind] += len(payload)
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
        """One exchange in bytes, by node: what a shuffler's transport wraps. `TooFew` where nobody answered."""
        began = time.perf_counter()
        notes = {**self.notes, "exchange": self._exchanges}
        self._exchanges += 1
        questions = {node: content(notes, payload) for node, payload in payloads.items()}
        replies = self.send(questions, traffic)
        lacking = [node for node, reply in replies.items() if notes_of(reply).get("wants") == FROZEN]
        for node in lacking:
            del replies[node]
            questions[node][FROZEN] = self.frozen
            traffic.downlink[FROZEN] += sum(len(array.data) for array in self.frozen.values())
        replies |= self.send({node: questions[node] for node in lacking}, traffic)
        found = {}
        for node, reply in replies.items():
            try:
                found[node] = payload_of(reply)
                self._remember(reply)
            except MessageError as error:
                self._fail(node, str(error), traffic)
        traffic.client_seconds += time.perf_counter() - began
        traffic.heard(len(self.nodes), len(self.nodes) - len(traffic.failed))
        if not found:
            why = "; ".join(f"node {node}: {reason}" for node, reason in list(traffic.failed.items())[:3])
            raise TooFew(f"none of {len(self.nodes)} nodes answered{': ' if why else ''}{why}")
        return found

    def send(self, contents: Mapping[int, RecordDict], traffic: Traffic) -> dict[int, Message]:
        """Replies by node, those that hold an error left out; who fails is noted in the traffic, with the reason."""
        messages = {}
        for node, records in contents.items():
            for name, record in self.config.items():
                records[name] = record
            messages[node] = Message(records, dst_node_id=node, message_type=MessageType.TRAIN)
        waiting = {key for key in self.grid.push_messages(list(messages.values())) if key}
        nodes = {message.metadata.message_id: node for node, message in messages.items()}
        until = time.monotonic() + (self.timeout if self.timeout is not None else float("inf"))
        replies: dict[int, Message] = {}
        silent, pause = set(contents), _FIRST_LOOK
        while waiting and time.monotonic() < until:
            for reply in self.grid.pull_messages(list(waiting)):
                key = reply.metadata.reply_to_message_id
                waiting.discard(key)
                if (node := nodes.get(key, reply.metadata.src_node_id)) not in silent:
                    continue
                silent.discard(node)
                if reply.has_error():
                    self._fail(node, _reason(reply), traffic)
                else:
                    replies[node] = reply
            if waiting:
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
                pause = min(1.5 * pause, _LAST_LOOK)
        for node in sorted(silent):
            gone = nodes.get(messages[node].metadata.message_id) is None or not waiting
            self._fail(node, "it could not be reached" if gone else f"no answer within {self.timeout:g} s", traffic)
        return {node: replies[node] for node in sorted(replies)}

    def _fail(self, node: int, reason: str, traffic: Traffic) -> None:
        traffic.failed[str(node)] = reason
        log.warning("node %d: %s", node, reason)

    # What clients keep between rounds (SCAFFOLD's control variates, …) ends with Flower's run.

    def _remember(self, reply: Message) -> None:
        run = reply.metadata.run_id
        if self._run is not None and self._run != run:
            log.warning(
                "what clients kept between rounds ended with Flower's run %d: they begin anew, and the rounds from here "
                "on differ from those of a run without a break",
                self._run,
            )
            self._run = run
        if notes_of(reply).get("keeps"):
            self._run = run

    def checkpoint(self) -> State:
        return {} if self._run is None else {_MEMORY: torch.tensor(list(self._run.to_bytes(8, "big")), dtype=torch.uint8)}

    def restore(self, tensors: State) -> None:
        if _MEMORY in tensors:
            self._run = int.from_bytes(bytes(tensors[_MEMORY].tolist()), "big")


def _reason(reply: Message) -> str:
    """Why a node failed, fit for a log: one line, printable, not too long."""
    text = reply.error.reason or f"error {reply.error.code}"
    if found := _RAISED.search(text):
        text = f"{found[1]}: {found[2]}"
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
