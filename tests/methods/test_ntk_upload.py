"""Uploads of NTK-FL: codecs, their bytes, and clients differentiated together."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import ConfigError
from ntkfl.methods import CPNTKFL, NTKFL, ClientRound
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from tests.methods.rounds import small_clients, small_task


def test_codec_and_sparsity_go_together() -> None:
    assert CPNTKFL(codec="factored").sparsity == 0
    assert CPNTKFL(codec="dense").sparsity == 0
    assert CPNTKFL(codec="topk").sparsity > 0
    with pytest.raises(ConfigError, match="go together"):
        CPNTKFL(codec="factored", sparsity=0.9)
    with pytest.raises(ConfigError, match="go together"):
        NTKFL(codec="topk")
    with pytest.raises(ConfigError, match="projected_dim must be below the 64"):
        CPNTKFL().model_input_shape((1, 8, 8))


def clients(*sizes: int) -> list[ClientRound]:
    torch.manual_seed(0)
    return [
        ClientRound(i, torch.randn(n, 6, dtype=torch.float64), torch.randint(3, (n,)), Randomness.simulated(i))
        for i, n in enumerate(sizes)
    ]


def test_an_upload_is_decoded_once_for_validation_and_for_the_round() -> None:
    method, task, clients = NTKFL(sparsity=0.5), small_task(), small_clients(6)
    (reply,) = method.answer(task, Message("weights", 1, {"weights": task.like}), clients)
    received = Message.decode(reply.encode())
    method.check(task, received)
    assert isinstance(received.arrays, dict)
    received.arrays.clear()  # nothing is read of it any more
    assert len(method.read_rows(task, received).J) == 6
