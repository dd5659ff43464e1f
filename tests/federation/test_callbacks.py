"""Callbacks: what is called, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

import ntkfl
from ntkfl.errors import ConfigError


class Noted(ntkfl.Callback):
    """Writes down its calls."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name, self.calls = name, calls

    def on_begin(self, rounds: int) -> None:
        self.calls.append((self.name, "begin", rounds))

    def on_round(self, record: dict[str, Any], timing: dict[str, Any]) -> None:
        self.calls.append((self.name, record["round"], timing["round"]))

    def on_end(self) -> None:
        self.calls.append((self.name, "end"))


def test_callbacks_are_called_in_the_order_given() -> None:
    fed, calls = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=3), seed=0), list[Any]()
    model, method = ntkfl.models.mlp(64, 4, 10), ntkfl.methods.FedAvg(local_steps=1)
    ntkfl.train(model, fed, method, rounds=2, callbacks=[Noted("a", calls), Noted("b", calls)])
    expected = [("begin", 2), (1, 1), (2, 2), ("end",)]
    assert calls == [(name, *call) for call in expected for name in "ab"]
    with pytest.raises(ConfigError, match="must be an instance of a subclass"):
        ntkfl.train(model, fed, method, callbacks=[print])  # type: ignore[list-item]
