"""What a Flower message holds, and which messages are never made."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from ntkfl.errors import MessageError, TooFew
from ntkfl.federation.transport import Traffic
from ntkfl.flower.apps import client_app
from ntkfl.flower.records import check_size, in_reply, notes_of, payload_of, to_node
from ntkfl.flower.transport import FlowerTransport, one_line
from ntkfl.wire import Message as WireMessage
from tests.flower.federations import NODES, NTK, apps, member, settings
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


def test_a_message_of_somebody_elses_is_refused() -> None:
    LocalGrid({})
    with pytest.raises(MessageError, match="without one of ours"):
        payload_of(Message(RecordDict({"ntkfl": ConfigRecord({"message": 1})}), 1, "train"))


def test_a_message_above_the_limit_is_refused_with_its_size_before_it_is_made() -> None:
    """20 candidates of ten million weights would be 800 MB; as a view of one number they take no memory here."""
    large = WireMessage("candidates", 2, {"weights": torch.zeros(1).expand(20, 10_000_000)})
    with pytest.raises(MessageError, match=r"'candidates' message to all would have 800 MB .*max_message_mb = 500"):
        check_size(large, 500_000_000, "to all")
    check_size(large, 800_000_000, "to all")
    grid = LocalGrid(dict.fromkeys(NODES, lambda message, context: message))
    transport = FlowerTransport(grid, dict(enumerate(NODES)), "client-{}".format, limit=500_000_000)
    with pytest.raises(MessageError, match="800 MB"):
        transport.exchange(large, [0, 1], Traffic())
    with pytest.raises(MessageError, match="to client-1 would have 800 MB"):
        transport.exchange({0: WireMessage("weights", 2, {}), 1: large}, [0, 1], Traffic())
    assert grid.sent == []


def test_a_reply_above_the_limit_is_an_error_with_the_clients_name(tmp_path: Path) -> None:
    run = settings(NTK)
    programs = apps(run, tmp_path)
    programs[NODES[1]] = client_app(member(run, tmp_path, 1, limit=100_000))
    grid = LocalGrid(programs)
    transport = FlowerTransport(
        grid, dict(enumerate(NODES)), "client-{}".format, notes=lambda client: {"run": "0" * 16}
    )
    weights = WireMessage("weights", 1, {"weights": torch.cat([p.flatten() for p in run.build_model(0).parameters()])})
    traffic = Traffic()
    assert len(transport.exchange(weights, [0, 1, 2], traffic)) == 2
    assert list(traffic.failed) == ["client-1"]
    assert "'upload' message from this client would have 1 MB" in traffic.failed["client-1"]
    assert len(transport.exchange(weights, [0, 1, 2], traffic)) == 2  # who failed is not asked again in the round
    assert [message.metadata.dst_node_id for message in grid.sent] == [*NODES[:3], NODES[0], NODES[2]]


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


def test_a_node_that_is_not_connected_is_named(tmp_path: Path) -> None:
    grid = LocalGrid(dict.fromkeys(NODES, lambda message, context: in_reply(b"yes", message)), online=NODES[1:])
    transport, traffic = FlowerTransport(grid, dict(enumerate(NODES)), "client-{}".format), Traffic()
    assert transport.exchange(WireMessage("weights", 1, {}), [0, 1], traffic) == []
    assert traffic.rejected == {"malformed": 1}  # b"yes" is no message of ours
    assert traffic.failed == {"client-0": "its node is not connected"}


def test_what_a_client_says_is_one_printable_line() -> None:
    assert one_line("a\nb\x1b[31m\tc") == "a b [31m c"
    assert len(one_line("x" * 10_000)) == 300
