"""What a Flower message holds, and which messages are never made."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from ntkfl.errors import TooFew
from ntkfl.federation.transport import Traffic
from ntkfl.flower.records import in_reply, notes_of, payload_of, to_node
from ntkfl.flower.transport import FlowerTransport
from ntkfl.wire import Message as WireMessage
from tests.flower.federations import NODES
from tests.flower.local_grid import LocalGrid, crossed


def test_a_message_arrives_as_it_was_sent() -> None:
    LocalGrid({})
    asked = WireMessage("weights", 3, {"weights": torch.randn(2_000_000)})  # 8 MB: more than one of Flower's pieces
    sent = to_node(asked.encode(), 5, 60, {"run": "ab", "client": 3})
    arrived = crossed(sent)
    assert payload_of(arrived) == asked.encode()
    assert notes_of(arrived) == {"run": "ab", "client": 3}
    back = crossed(in_reply(b"receipt", arrived))
    assert payload_of(back) == b"receipt"
    assert notes_of(back) == {}


def test_nothing_that_crosses_is_a_pickle() -> None:
    LocalGrid({})
    sent = to_node(WireMessage("weights", 1, {"weights": torch.ones(4)}).encode(), 5, 60, {"run": "ab"})
    for part in get_all_nested_objects(sent).values():
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, UnicodeDecodeError)):
            pickle.loads(part.deflate())


def test_replies_are_ordered_by_client_and_counted(tmp_path: Path) -> None:
    def echo(message: Message, context: object) -> Message:
        node = torch.tensor(message.metadata.dst_node_id)
        return in_reply(WireMessage("update", 1, {"node": node}).encode(), message)

    transport = FlowerTransport(
        LocalGrid(dict.fromkeys(NODES, echo)), dict(enumerate(NODES)), "client-{}".format, quorum=2
    )
    asked, traffic = WireMessage("weights", 1, {"weights": torch.ones(3)}), Traffic()
    replies = transport.exchange(asked, [0, 2, 3], traffic)
    assert [int(reply.arrays["node"]) for reply in replies] == [1001, 1003, 1004]
    assert traffic.downlink == {"weights": 3 * len(asked.encode())}
    assert traffic.uplink == {"update": 3 * len(replies[0].encode())}
    with pytest.raises(TooFew, match="1 of 1 clients answered, below the quorum of 2"):
        transport.exchange(asked, [1], traffic)
