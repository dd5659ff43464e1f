"""What travels in Flower's messages, and what of a network both ends must agree on.

    question   ArrayRecord "ntkfl" {message}, ConfigRecord "ntkfl.notes" {terms, run, exchange, network}; the user's own
               train_config as ConfigRecord "config"
    reply      ArrayRecord "ntkfl" {message}

A message is the bytes of `wire` whole, in one array. Nothing is pickled. Flower cuts large arrays into pieces, so a
message may be of any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import nn

from ntkfl.errors import MessageError
from ntkfl.methods import Method
from ntkfl.methods.base import kinds_of
from ntkfl.methods.task import statistics
from ntkfl.models.backbone import digest_of
from ntkfl.privacy.settings import Privacy
from ntkfl.tangent.parameters import trainable

MESSAGE, NOTES = "ntkfl", "ntkfl.notes"
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
    """The bytes of `wire` in a message; `MessageError` if it holds none."""
    array = message.content.array_records.get(MESSAGE, ArrayRecord()).get("message")
    if array is None or array.stype != _STYPE:
        raise MessageError("not an ntkfl message: do both ends use ntkfl.flower?")
    return array.data


def note(message: Message, name: str, kind: type[_Value]) -> _Value:
    """A plain value beside the bytes; `MessageError` where it is missing or of another type."""
    value = message.content.config_records.get(NOTES, ConfigRecord()).get(name)
    if type(value) is not kind:
        raise MessageError(f"not an ntkfl message: no {kind.__name__} {name!r} in it; is ntkfl the same at both ends?")
    return value


def needs_shuffler(privacy: Privacy) -> bool:
    """Whether replies go past the server, or inputs are projected by what the key server alone tells clients."""
    return privacy.sealed or privacy.projected_dim is not None


def digest(model: nn.Module, method: Method) -> str:
    """SHA-256 of what both ends must have alike: names and shapes of what trains, and all of what does not.

    What does not train never travels. Running statistics of batch normalisation belong to it, unless the method
    averages them; a count of batches does not, as nothing depends on it.
    """
    moving = {id(p) for p in trainable(model).values()}
    if "update" in kinds_of(method):
        moving |= {id(buffer) for buffer in statistics(model).values()}
    state = model.state_dict(keep_vars=True).items()
    still = ((n, t) for n, t in state if id(t) not in moving and not n.endswith("num_batches_tracked"))
    return digest_of(still, "".join(f"{name} {list(p.shape)};" for name, p in trainable(model).items()))
