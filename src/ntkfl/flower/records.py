"""What travels in Flower's messages: the bytes of `wire` whole, in one array, and beside them a few plain values.

    question   ArrayRecord "ntkfl" {message}, ConfigRecord "ntkfl.notes" {terms, run, exchange, network}; to a client
               that asked for them ArrayRecord "ntkfl.frozen"; the user's own train_config as ConfigRecord "config"
    reply      ArrayRecord "ntkfl" {message}; or ConfigRecord "ntkfl.notes" {wants: "ntkfl.frozen"}

Nothing is pickled. Flower cuts large arrays into pieces, so a message may be of any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from ntkfl.errors import MessageError

MESSAGE, NOTES, FROZEN = "ntkfl", "ntkfl.notes", "ntkfl.frozen"
Notes = Mapping[str, int | str | bool | list[int]]
_STYPE = "ntkfl.wire"
_Value = TypeVar("_Value")


def content(notes: Notes, payload: bytes | None = None) -> RecordDict:
    """The records of a question or a reply."""
    records = RecordDict({NOTES: ConfigRecord(dict(notes))})
    if payload is not None:
        array = Array(dtype="uint8", shape=(len(payload),), stype=_STYPE, data=payload)
        records[MESSAGE] = ArrayRecord({"message": array})
    return records


def payload_of(message: Message) -> bytes:
    """The bytes of `wire` in a message; raises `MessageError` if the message has no such field."""
    array = message.content.array_records.get(MESSAGE, ArrayRecord()).get("message")
    if array is None or array.stype != _STYPE:
        raise MessageError("not an ntkfl message: do both ends use ntkfl.flower?")
    return array.data


def notes_of(message: Message) -> ConfigRecord:
    """The plain values beside the bytes; raises `MessageError` if it is not an ntkfl message."""
    if NOTES not in message.content:
        raise MessageError("not an ntkfl message: do both ends use ntkfl.flower?")
    return message.content.config_records[NOTES]


def wants_frozen(reply: Message) -> bool:
    """Whether a client asks for what does not train before it answers."""
    return reply.content.config_records.get(NOTES, ConfigRecord()).get("wants") == FROZEN


def note(message: Message, name: str, kind: type[_Value]) -> _Value:
    """One of them; `MessageError` where it is missing or of another type."""
    value = notes_of(message).get(name)
    if type(value) is not kind:
        raise MessageError(
            f"a Flower message without a {kind.__name__} {name!r} in it: is ntkfl the same at both ends?"
        )
    return value
