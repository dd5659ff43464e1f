"""Runs that diverge, learn nothing, or end worse than the best constant prediction: what is said, and what may help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ntkfl.federation.run_folder import Record
from ntkfl.methods import Method
from ntkfl.progress import percent

_ROUNDS, _WORSE = 5, 1.05  # after so many rounds, so many times a constant's loss is a failure
_EXPLODED = 10.0  # and before
_NEAR = 0.02  # of accuracy: as good as a constant's
_STEP = ("lr", "server_lr", "local_steps", "local_epochs", "time", "mu", "delta", "damping", "penalty")


def warning(history: Sequence[Record], constant: Mapping[str, Any] | None, method: Method) -> str:
    """What to say of the last round: when the loss explodes, and when every fifth round in a row is no better than a
    constant. `constant` is the accuracy (none for real targets) and loss of the best one.
    """
    if not constant or history[-1]["test_loss"] is None:
        return ""
    exploded, stuck = (_streak(history, constant, least) for least in (_EXPLODED, 0.99))
    if exploded % _ROUNDS == 1:
        return f"{_than(history[-1], constant)}: training diverges; {advice(method)}"
    if stuck and not exploded and stuck % _ROUNDS == 0:
        how = f"for {stuck} rounds no better than a constant"
        return f"{_than(history[-1], constant)}, {how}; {advice(method, 'shorter or longer')}"
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
    worse = last["test_loss"] > constant["loss"] * (_WORSE if len(history) >= _ROUNDS else _EXPLODED) > 0
    return f"the model is worse than a constant prediction: {_than(last, constant)}" if worse else ""


def advice(method: Method, steps: str = "shorter") -> str:
    """Options of this method that say how far a round moves the weights."""
    options = method.model_dump()
    unused = {"lr"} if options.get("scheme") == "flow" else set()
    values = {name: options[name] for name in _STEP if name in options and name not in unused}
    named = [f"{name} (now {value:g})" for name, value in values.items() if isinstance(value, int | float)]
    which = f": {', '.join(named)}" if named else ""
    return f"try {steps} steps{which}; inputs should be near mean 0 and deviation 1"


def _streak(history: Sequence[Record], constant: Mapping[str, Any], least: float) -> int:
    """Rounds at the end whose loss is at least so many times a constant's, and whose accuracy is no better."""
    for count, record in enumerate(reversed(history)):
        loss, accuracy = record["test_loss"], constant.get("accuracy")
        better = accuracy is not None and (record["test_accuracy"] or 0.0) > accuracy + _NEAR
        if better or loss is None or loss < least * constant["loss"] or constant["loss"] <= 0:
            return count
    return len(history)


def _than(record: Record, constant: Mapping[str, Any]) -> str:
    text = f"test loss {record['test_loss']:.4g} (a constant has {constant['loss']:.4g})"
    if constant.get("accuracy") is None:
        return text
    return f"{text}, accuracy {percent(record['test_accuracy'])} ({percent(constant['accuracy'])})"
