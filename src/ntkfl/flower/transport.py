"""The way to clients on Flower's nodes: messages through a grid, replies up to a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from ntkfl.errors import MessageError, TooFew
from ntkfl.federation.transport import Traffic, Transport
from ntkfl.federation.validation import MALFORMED
from ntkfl.flower.records import Notes, check_size, payload_of, to_node
from ntkfl.methods.base import Outgoing
from ntkfl.wire import Message

_FIRST_LOOK, _LAST_LOOK = 0.02, 0.5  # seconds between two looks for replies: soon at first, then less often
_ABSENT = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
_GATHER_S = 0.2  # between two looks at who is connected
_SAY_S = 5.0  # of waiting in which no reply came, until it is said
_GONE = "its node is not connected"
_LONGEST = 300  # characters of a client's reason that are kept


class FlowerTransport(Transport):
    """To `nodes` (client -> node id), whose names are `names`; `notes` go along with every message. Nodes that are not
    connected are waited for as long as `patience` says.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[int, int],
        names: Callable[[int], str],
        *,
        seconds: float | None = None,
        patience: float = 0.0,
        expected: int = 0,
        quorum: int = 1,
        limit: int = 1 << 40,
        notes: Notes | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.grid, self.nodes, self.names, self.along = grid, nodes, names, notes or {}
        self.seconds, self.patience, self.expected = seconds, patience, expected
        self.quorum, self.limit, self.say = quorum, limit, say
        self._failed: set[int] = set()  # in this round

    def gather(self) -> None:
        self.available(self.expected)

    def available(self, wanted: int) -> Sequence[int]:
        """Those connected, as soon as there are enough."""
        until = time.monotonic() + self.patience
        while True:
            online = set(self.grid.get_node_ids())
            there = [client for client, node in self.nodes.items() if node in online]
            if len(there) >= wanted:
                return there
            if time.monotonic() > until:
                raise TooFew(f"{len(there)} of {wanted} clients came within {self.patience:g} seconds")
            time.sleep(_GATHER_S)

    def name(self, client: int) -> str:
        return self.names(client)

    def begin(self, round: int, cohort: Sequence[int]) -> None:
        self._failed = set()

    def evaluate(self, message: Message, cohort: Sequence[int]) -> list[Message]:
        """By those that have answered so far: whoever is gone would be waited for once more."""
        return super().evaluate(message, [client for client in cohort if client not in self._failed])

    def exchange(self, message: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[Message]:
        began = time.perf_counter()
        replies = self._ask(message, cohort, traffic)
        traffic.heard(len(cohort), len(cohort) - len(set(map(self.names, cohort)) & traffic.failed.keys()))
        traffic.client_seconds += time.perf_counter() - began
        received = []
        while replies:  # each is let go as it is read: uploads are large
            reply = replies.pop(0)
            try:
                received.append(Message.decode(reply))
                traffic.uplink[received[-1].kind] += len(reply)
            except MessageError:
                traffic.rejected[MALFORMED] += 1
                traffic.rejected_clients += 1
        return received

    def _ask(self, outgoing: Outgoing, cohort: Sequence[int], traffic: Traffic) -> list[bytes]:
        asked = [client for client in cohort if self.names(client) not in traffic.failed]
        payloads = self._encode(outgoing, asked)
        for client in asked:
            message = outgoing if isinstance(outgoing, Message) else outgoing[client]
            traffic.downlink[message.kind] += len(payloads[client])
        replies = self.send(payloads, traffic)
        if len(replies) < self.quorum:
            why = "".join(f"; {name}: {reason}" for name, reason in list(traffic.failed.items())[:3])
            raise TooFew(f"{len(replies)} of {len(cohort)} clients answered, below the quorum of {self.quorum}{why}")
        return [replies[client] for client in sorted(replies)]

    def send(self, payloads: Mapping[int, bytes], traffic: Traffic) -> dict[int, bytes]:
        """Replies by client; those who fail are noted in the traffic, by name and with the reason."""
        ways = {i: to_node(data, self.nodes[i], self.seconds, self.along) for i, data in payloads.items()}
        accepted = set(self.grid.push_messages(list(ways.values())))
        waiting = {message.metadata.message_id: client for client, message in ways.items()}
        del ways
        for message_id in set(waiting) - accepted:
            self._fail(waiting.pop(message_id), _GONE, traffic)
        replies: dict[int, bytes] = {}
        until = None if self.seconds is None else time.monotonic() + self.seconds
        pause, last, said, began = _FIRST_LOOK, time.monotonic(), False, time.monotonic()
        while waiting and (until is None or time.monotonic() < until):
            time.sleep(pause)
            pause = min(_LAST_LOOK, 1.3 * pause)
            for reply in self.grid.pull_messages(list(waiting)):
                client = waiting.pop(reply.metadata.reply_to_message_id, None)
                if client is not None:
                    last = time.monotonic()
                    self._take(client, reply, replies, traffic)
            usual = last - began if replies else (self.seconds or 0.0) / 2  # so long others may take too
            if until is not None and waiting and not said and time.monotonic() > last + max(_SAY_S, usual):
                said, left = True, max(0.0, until - time.monotonic())
                names = ", ".join(sorted(map(self.names, waiting.values())))
                self.say(
                    f"{len(replies)} of {len(payloads)} have answered; waits for {names}, {left:.0f} s more at most"
                )
        traffic.waited_seconds += time.monotonic() - last if waiting else 0.0
        for client in waiting.values():
            self._fail(client, f"no answer within {self.seconds:g} s", traffic)
        return replies

    def _take(self, client: int, reply: FlowerMessage, replies: dict[int, bytes], traffic: Traffic) -> None:
        try:
            if reply.has_error():
                said = reply.error.reason or f"error {reply.error.code}"
                self._fail(client, _GONE if reply.error.code in _ABSENT else one_line(said), traffic)
            else:
                replies[client] = payload_of(reply)
        except MessageError as error:
            self._fail(client, str(error), traffic)

    def _fail(self, client: int, reason: str, traffic: Traffic) -> None:
        self._failed.add(client)
        traffic.failed[self.names(client)] = reason
        self.say(f"{self.names(client)}: {reason}")

    def _encode(self, outgoing: Outgoing, asked: Sequence[int]) -> dict[int, bytes]:
        """Bytes for each client; one message for all is encoded once."""
        if isinstance(outgoing, Message):
            check_size(outgoing, self.limit, "to every client")
            payload = outgoing.encode()
            return dict.fromkeys(asked, payload)
        for client in asked:
            check_size(outgoing[client], self.limit, f"to {self.names(client)}")
        return {client: outgoing[client].encode() for client in asked}


def one_line(text: str) -> str:
    """What a client said, fit for a log: printable, one line, not too long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
