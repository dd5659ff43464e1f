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
# What makes a round move the weights less, for options that a method has; the other way round they move more.
_LESS = {
    "lr": "a smaller lr",
    "server_lr": "a smaller server_lr",
    "local_steps": "fewer local_steps",
    "local_epochs": "fewer local_epochs",
    "steps": "shorter steps",
    "time": "a shorter time",
    "mu": "a larger mu",
    "delta": "a larger delta",
    "damping": "a larger damping",
    "penalty": "a larger penalty",
    "epsilon": "a larger epsilon",
}
_OPPOSITE = {"smaller": "larger", "larger": "smaller", "fewer": "more", "shorter": "longer"}


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
        return f"{how}; {advice(method, more=ratio < 1.1)}"
    return ""


def failure(history: Sequence[Record], constant: Mapping[str, Any] | None) -> str:
    """Why a finished run's model is worth nothing: it is worse than a constant, after some rounds or by far."""
    if not constant or not history:
        return ""
    last = history[-1]
    if constant.get("accuracy") is not None and last["test_accuracy"] > constant["accuracy"]:
        return ""
    worse = _ratio(last, constant) > (1.05 if len(history) >= ROUNDS else EXPLODED)
    return f"the model is worse than a constant prediction: {_than(last, constant)}" if worse else ""


def advice(method: Method, *, more: bool = False) -> str:
    """Options of this method that make rounds move the weights less, or `more`."""
    options = method.model_dump()
    unused = {"lr"} if options.get("scheme") == "flow" else set()
    private = {"epsilon", "delta"} <= options.keys()
    unused |= {"delta"} if private else set()
    unused |= {"epsilon"} if private and (more or options["epsilon"] is None) else set()
    unused |= {"local_steps" if options.get("local_epochs") else "local_epochs"}
    found = []
    for name, text in _LESS.items():
        if name in options and name not in unused:
            word = next(word for word in _OPPOSITE if word in text.split())
            value = options[name]
            now = f" (now {value:g})" if isinstance(value, int | float) else ""
            found.append((text.replace(word, _OPPOSITE[word]) if more else text) + now)
    listed = ", ".join(found[:-1]) + (" or " if len(found) > 1 else "") + found[-1] if found else ""
    return f"try {listed or 'another method or network'}; inputs should be near mean 0 and deviation 1"


def _ratio(record: Record, constant: Mapping[str, Any]) -> float:
    """The test loss over a constant's."""
    loss = record["test_loss"]
    return 0.0 if loss is None or constant["loss"] <= 0 else float(loss / constant["loss"])


def _streak(history: Sequence[Record], constant: Mapping[str, Any], least: float) -> int:
    """Rounds at the end whose loss is at least so many times a constant's, and whose accuracy is no better."""
    for count, record in enumerate(reversed(history)):
        better = constant.get("accuracy") is not None and record["test_accuracy"] > constant["accuracy"] + _NEAR
        if better or _ratio(record, constant) < least:
            return count
    return len(history)


def _than(record: Record, constant: Mapping[str, Any]) -> str:
    text = f"test loss {record['test_loss']:.4g} (a constant has {constant['loss']:.4g})"
    if constant.get("accuracy") is None:
        return text
    return f"{text}, accuracy {percent(record['test_accuracy'])} ({percent(constant['accuracy'])})"
