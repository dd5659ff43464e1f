"""Runs whose model ends worse than the best constant prediction, and what may help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ntkfl.federation.run_folder import Record
from ntkfl.methods import Method
from ntkfl.progress import percent

_ROUNDS, _WORSE = 5, 1.05  # after so many rounds, so many times a constant's loss is a failure
_EXPLODED = 10.0  # and before
_STEP = ("lr", "server_lr", "local_steps", "local_epochs", "time", "mu", "delta", "damping", "penalty", "epsilon")


def failure(history: Sequence[Record], constant: Mapping[str, Any] | None) -> str:
    """Why a finished run's model is worth nothing: it is worse than a constant, after some rounds or by far."""
    if not constant or not history:
        return ""
    last = history[-1]
    if last["test_loss"] is None:  # of a model that has forgotten a client since
        return ""
    if constant.get("accuracy") is not None and last["test_accuracy"] > constant["accuracy"]:
        return ""
    worse = last["test_loss"] > constant["loss"] * (_WORSE if len(history) >= _ROUNDS else _EXPLODED) > 0
    return f"the model is worse than a constant prediction: {_than(last, constant)}" if worse else ""


def advice(method: Method) -> str:
    """Options of this method that say how far a round moves the weights."""
    options = method.model_dump()
    unused = {"lr"} if options.get("scheme") == "flow" else set()
    unused |= {"epsilon", "delta"} if {"epsilon", "delta"} <= options.keys() else set()  # of privacy
    values = {name: options[name] for name in _STEP if name in options and name not in unused}
    named = [f"{name} (now {value:g})" for name, value in values.items() if isinstance(value, int | float)]
    which = f": {', '.join(named)}" if named else ""
    return f"try shorter steps{which}; inputs should be near mean 0 and deviation 1"


def _than(record: Record, constant: Mapping[str, Any]) -> str:
    text = f"test loss {record['test_loss']:.4g} (a constant has {constant['loss']:.4g})"
    if constant.get("accuracy") is None:
        return text
    return f"{text}, accuracy {percent(record['test_accuracy'])} ({percent(constant['accuracy'])})"
