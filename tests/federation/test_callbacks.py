"""Callbacks: what is called, in which order, and how an error in one is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ntkfl.federation.callbacks import Callback, CallbackList

RECORD = {"round": 1, "test_accuracy": 0.5, "test_loss": 1.0, "clients": [0, 1], "uplink": {"update": 8}}


class Noted(Callback):
    """Writes down its calls."""

    def __init__(self, name: str, calls: list[Any], transcript_rounds: tuple[int, ...] = ()) -> None:
        self.name, self.calls, self.transcript_rounds = name, calls, transcript_rounds

    def on_start(self, note: str) -> None:
        self.calls.append((self.name, "start", note))

    def on_round(self, record: dict[str, Any], timing: dict[str, Any]) -> None:
        self.calls.append((self.name, "round", record["round"]))

    def on_transcript(self, transcript: Any) -> None:
        self.calls.append((self.name, "transcript", transcript.round))

    def on_end(self) -> None:
        self.calls.append((self.name, "end"))


def test_callbacks_are_called_in_order_and_get_only_the_transcripts_they_ask_for() -> None:
    calls: list[Any] = []
    both = CallbackList([Noted("a", calls, (2,)), Noted("b", calls, (2, 3))])
    assert both.transcript_rounds == {2, 3}
    both.on_start("1 MiB")
    both.on_transcript(SimpleNamespace(round=3))
    both.on_transcript(SimpleNamespace(round=2))
    both.on_round(RECORD, {"round": 1})
    both.on_end()
    assert calls == [
        ("a", "start", "1 MiB"), ("b", "start", "1 MiB"), ("b", "transcript", 3), ("a", "transcript", 2),
        ("b", "transcript", 2), ("a", "round", 1), ("b", "round", 1), ("a", "end"), ("b", "end"),
    ]  # fmt: skip
