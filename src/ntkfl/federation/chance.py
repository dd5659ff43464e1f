"""Runs that diverge or learn nothing, told by the best constant prediction: what is said of them, and what may help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ntkfl.federation.run_folder import Record
from ntkfl.methods import Method
from ntkfl.progress import percent

ROUNDS = 5  # without being better than a constant, after which it is said, and after which a run has failed
EXPLODED = 10.0  # times a constant's loss
_NEAR = 0.02  # of accuracy: as good as a constant's
_STEP = ("lr", "server_lr", "local_steps", "local_epochs", "time", "mu", "delta", "damping", "penalty", "epsilon")


def warning(history: Sequence[Record], constant: Mapping[str, Any] | None, method: Method) -> str:
    """What to say of the last of these rounds: when the loss explodes, and when every fifth round in a row is no better
    than a constant. `constant` is the accuracy (none for real targets) and loss of the best one.
    """
    if not constant or not history:
        return ""
    ratio = _ratio(history[-1], constant)
    exploded, stuck = (_streak(history, constant, least) for least in (EXPLODED, 0.99))
    if exploded % ROUNDS == 1:
        return f"{_than(history[-1], constant)}: training diverges; {advice(method)}"
    if stuck and not exploded and stuck % ROUNDS == 0:
        how = f"{_than(history[-1], constant)}, for {stuck} rounds no better than a constant"
        return f"{how}; {advice(method, longer=ratio < 1.1)}"
    return ""


def failure(history: Sequence[Record], constant: Mapping[str, Any] | None) -> str:
    """Why a finished run's model is worth nothing: it is worse than a constant, after some rounds or by far."""
    if not constant or not history:
        return ""
    last = history[-1]
    if last["test_loss"] is None:  # of a model that has forgotten a client since
        return ""
    if constant.get("accuracy") is not None and last["test_accuracy"] > constant["accuracy"]:
        return ""
    worse = _ratio(last, constant) > (1.05 if len(history) >= ROUNDS else EXPLODED)
    return f"the model is worse than a constant prediction: {_than(last, constant)}" if worse else ""


def advice(method: Method, *, longer: bool = False) -> str:
    """Options of this method that say how far a round moves the weights."""
    options = method.model_dump()
    unused = {"lr"} if options.get("scheme") == "flow" else set()
    unused |= {"epsilon", "delta"} if {"epsilon", "delta"} <= options.keys() else set()  # of privacy
    values = {name: options[name] for name in _STEP if name in options and name not in unused}
    named = [f"{name} (now {value:g})" for name, value in values.items() if isinstance(value, int | float)]
    which = f": {', '.join(named)}" if named else ""
    return f"try {'longer' if longer else 'shorter'} steps{which}; inputs should be near mean 0 and deviation 1"


def _ratio(record: Record, constant: Mapping[str, Any]) -> float:
    """The test loss over a constant's."""
    loss = record["test_loss"]
    return 0.0 if loss is None or constant["loss"] <= 0 else float(loss / constant["loss"])


def _streak(history: Sequence[Record], constant: Mapping[str, Any], least: float) -> int:
    """Rounds at the end whose loss is at least so many times a constant's, and whose accuracy is no better."""
    for count, record in enumerate(reversed(history)):
        accuracy = record["test_accuracy"]
        better = constant.get("accuracy") is not None and (accuracy is None or accuracy > constant["accuracy"] + _NEAR)
        if better or _ratio(record, constant) < least:
            return count
    return len(history)


def _than(record: Record, constant: Mapping[str, Any]) -> str:
    text = f"test loss {record['test_loss']:.4g} (a constant has {constant['loss']:.4g})"
    if constant.get("accuracy") is None:
        return text
    return f"{text}, accuracy {percent(record['test_accuracy'])} ({percent(constant['accuracy'])})"
