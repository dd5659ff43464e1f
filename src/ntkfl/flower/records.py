"""What travels in Flower's messages: the bytes of `wire` whole, in one array, and beside them a few plain values.

    question   ArrayRecord "ntkfl" {message}     ConfigRecord "ntkfl.notes" {terms, run, exchange, layout, frozen}
               ArrayRecord "ntkfl.frozen"        only to a client whose frozen weights differ from the server's
               ConfigRecord "config"             the user's own train_config, with "server-round"
    reply      ArrayRecord "ntkfl" {message}     ConfigRecord "ntkfl.notes" {keeps}, or {wants: "frozen"} alone

Flower cuts large arrays into pieces, so a message may be of any size. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from ntkfl.errors import MessageError

MESSAGE, NOTES, FROZEN = "ntkfl", "ntkfl.notes", "ntkfl.frozen"
Notes = Mapping[str, int | str | bool | list[int]]
_STYPE = "ntkfl.wire"


def content(notes: Notes, payload: bytes | None = None) -> RecordDict:
    """The records of a question or a reply."""
    records = RecordDict({NOTES: ConfigRecord(dict(notes))})
    if payload is not None:
        array = Array(dtype="uint8", shape=(len(payload),), stype=_STYPE, data=payload)
        records[MESSAGE] = ArrayRecord({"message": array})
    return records


def payload_of(message: Message) -> bytes:
    """The bytes of `wire` in a message; `MessageError` where there are none."""
    record = message.content.array_records.get(MESSAGE) if message.has_content() else None
    array = record.get("message") if record is not None else None
    if array is None or array.stype != _STYPE:
        raise MessageError("a Flower message without one of ntkfl in it: do both ends use ntkfl.flower?")
    return array.data


def notes_of(message: Message) -> ConfigRecord:
    """The plain values beside the bytes; empty where a message has none."""
    return message.content.config_records.get(NOTES, ConfigRecord()) if message.has_content() else ConfigRecord()


def note(notes: ConfigRecord, name: str, kind: type) -> object:
    """One of them; `MessageError` where it is missing or of another type."""
    if type(notes.get(name)) is not kind:
        raise MessageError(f"a Flower message without {name!r} in its notes: do both ends run the same ntkfl?")
    return notes[name]


def tensors_of(message: Message, record: str) -> dict[str, Tensor]:
    """An array record as tensors by name; `MessageError` where numpy cannot read it without unpickling."""
    try:
        return dict(message.content.array_records[record].to_torch_state_dict())
    except (TypeError, ValueError) as error:
        raise MessageError(f"the arrays {record!r} of a Flower message cannot be read: {error}") from None
