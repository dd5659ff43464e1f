"""A deployed client: what it keeps, what it draws, and what it does with data that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ntkfl.deployment.contract import Terms
from ntkfl.errors import TrustError
from ntkfl.federation.config import ModelConfig
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


ROWS = [0]


class Backbone(torch.nn.Module):
    """The same weights in every process, as pretrained ones are; counts the rows it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 6)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ROWS[0] += len(x)
        return torch.relu(self.layer(x.flatten(1)))


def test_features_of_a_frozen_backbone_are_computed_once_and_stay_here(tmp_path: Path) -> None:
    run = settings({"name": "sum-ridge"}).model_copy(
        update={"model": ModelConfig(backbone="tests.flower.test_client:Backbone")}
    )
    terms = Terms(**run.model_dump(include=set(Terms.model_fields)))
    with pytest.raises(TrustError, match=r"tests\.flower\.test_client:Backbone"):
        FlowerClient(terms, tmp_path, lambda: digits().client(0))
    ROWS[0] = 0
    for _ in range(2):  # its process was started again
        own = FlowerClient(terms, tmp_path, lambda: digits().client(0), allow_code=True)
        for round in (1, 2):
            reply = Message.decode(own.answer(weights(own, round), RUN))
    samples = digits().sizes[0]
    assert samples < ROWS[0] <= samples + 4  # the passes over zeros that count features, and the row that is compared
    assert {name: array.numel() for name, array in reply.arrays.items()} == {
        "samples": 1, "gram": 7 * 8 // 2, "cross": 7 * 10, "squares": 1, "fresh": 1,
    }  # fmt: skip
    assert len(list((tmp_path / "features").rglob("*.safetensors"))) == 1
