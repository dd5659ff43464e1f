"""Messages as Flower's records: the bytes of `wire`, whole, in an array that Flower cuts into pieces of 5 MB.

Nothing is pickled. A number or a name that goes along (which client, which run) is a plain value in a `ConfigRecord`.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from ntkfl.errors import MessageError
from ntkfl.wire import Message as WireMessage

_RECORD, _NOTES, _STYPE = "ntkfl", "notes", "ntkfl.wire"
_GRACE = 10.0  # seconds: who waits says that there was no answer, before Flower says that there is no message
Notes = dict[str, int | str]


def to_node(payload: bytes, node: int, seconds: float | None, notes: Notes) -> Message:
    """The payload for a node. Flower forgets it soon after `seconds`, in which a reply is waited for."""
    return Message(_records(payload, notes), node, MessageType.TRAIN, ttl=None if seconds is None else seconds + _GRACE)


def in_reply(payload: bytes, asked: Message) -> Message:
    return Message(_records(payload, {}), reply_to=asked)


def payload_of(message: Message) -> bytes:
    """The bytes that another `to_node` or `in_reply` put into the message; `MessageError` if it holds none."""
    record = message.content.array_records.get(_RECORD) if message.has_content() else None
    array = record.get("message") if record is not None else None
    if array is None or array.stype != _STYPE:
        raise MessageError("a Flower message without one of ours in it")
    return array.data


def notes_of(message: Message) -> Notes:
    notes = message.content.config_records.get(_NOTES, ConfigRecord())
    return {name: value for name, value in notes.items() if isinstance(value, int | str)}


def _records(payload: bytes, notes: Notes) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(payload),), stype=_STYPE, data=payload)
    records = RecordDict({_RECORD: ArrayRecord({"message": array})})
    if notes:
        records[_NOTES] = ConfigRecord(dict(notes))
    return records


def check_size(message: WireMessage, limit: int, to: str) -> None:
    """Refuse a message above `limit` bytes before anything of it is made or sent."""
    size = sum(array.numel() * array.element_size() for array in message.arrays.values())
    if size > limit:
        largest = max(message.arrays, key=lambda name: message.arrays[name].numel())
        raise MessageError(
            f"a {message.kind!r} message {to} would have {size / 1e6:,.0f} MB "
            f"({largest!r} {list(message.arrays[largest].shape)}), above max_message_mb = {limit / 1e6:g}"
        )
