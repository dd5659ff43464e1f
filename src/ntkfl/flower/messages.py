"""What travels in Flower's messages, and what of a network both ends must agree on.

    question   ArrayRecord "ntkfl" {message}, ConfigRecord "ntkfl.notes" {terms, run, exchange, network}; the user's own
               train_config as ConfigRecord "config"
    reply      ArrayRecord "ntkfl" {message}

A message is the bytes of `wire` whole, in one array. Nothing is pickled. Flower cuts large arrays into pieces, so a
message may be of any size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor, nn

from ntkfl.errors import MessageError, ModelError
from ntkfl.methods import Method
from ntkfl.methods.base import kinds_of
from ntkfl.methods.task import statistics
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
    return privacy.shuffle or privacy.secure_sum or privacy.projected_dim is not None


def digest(model: nn.Module, method: Method) -> str:
    """SHA-256 of what both ends must have alike: names and shapes of what trains, and all of what does not.

    What does not train never travels. Running statistics of batch normalisation belong to it, unless the method
    averages them; a count of batches does not, as nothing depends on it.
    """
    moving = {id(p) for p in trainable(model).values()}
    if "update" in kinds_of(method):
        moving |= {id(buffer) for buffer in statistics(model).values()}
    found = hashlib.sha256("".join(f"{name} {list(p.shape)};" for name, p in trainable(model).items()).encode())
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in moving and not name.endswith("num_batches_tracked"):
            found.update(f"{name} {value.dtype} {list(value.shape)};".encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


@torch.no_grad()
def outputs_of(model: nn.Module, x: Tensor) -> int:
    """The number of outputs for samples x [n, …]; `ModelError` where the model does not take them."""
    was = model.training
    try:
        f = model.eval()(x)
    except Exception as error:  # whatever a user's model raises
        reason = str(error).split("\n")[0]
        raise ModelError(f"the model fails on inputs of shape {list(x.shape[1:])}: {reason}") from error
    finally:
        model.train(was)
    if not isinstance(f, Tensor) or f.ndim != 2 or len(f) != len(x):
        raise ModelError(f"the model must give one row of outputs a sample, not {list(getattr(f, 'shape', []))}")
    return f.shape[1]
