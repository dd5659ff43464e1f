"""A deployed client: what it keeps, what it draws, and what it does with data that cannot be used."""

from __future__ import annotations

from pathlib import Path

import torch

from ntkfl.deployment.contract import Terms
from ntkfl.flower.client import FlowerClient
from ntkfl.flower.client_memory import ClientMemory
from ntkfl.wire import Message
from tests.flower.federations import NTK, digits, settings

RUN = "0123456789abcdef"


def weights(run_member: FlowerClient, round: int = 1, **more: torch.Tensor) -> bytes:
    return Message("weights", round, {"weights": run_member.client.task.like, **more}).encode()


def rows(reply: bytes) -> int:
    return len(Message.decode(reply).arrays["labels"])


def test_samples_are_drawn_once_a_round_and_from_the_system(tmp_path: Path) -> None:
    """Two questions of a round are about the same samples; the next round's are others."""
    run = settings(NTK | {"subsample_rate": 0.2})
    own = FlowerClient(Terms(**run.model_dump(include=set(Terms.model_fields))), tmp_path, lambda: digits().client(0))
    first, again = own.answer(weights(own), RUN), own.answer(weights(own), RUN)
    assert first == again
    assert rows(first) == round(0.2 * digits().sizes[0])
    assert own.answer(weights(own, round=2), RUN) != own.answer(weights(own, round=3), RUN)


def test_memory_is_kept_as_it_was_after_each_of_the_last_two_rounds(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path / "m")
    assert memory.before(1) == {}
    memory.keep(1, {})
    assert not (tmp_path / "m").exists()  # a client that keeps nothing leaves nothing
    for round in (1, 4, 6):
        memory.keep(round, {"control": torch.tensor([float(round)])})
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["4.safetensors", "6.safetensors"]
    assert float(memory.before(7)["control"]) == 6
    assert float(memory.before(6)["control"]) == 4  # round 6 again
    assert memory.before(4) == {}
