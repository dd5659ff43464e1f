"""Uploads of NTK-FL: codecs, their bytes, and clients differentiated together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ntkfl.errors import ConfigError
from ntkfl.methods import CPNTKFL, NTKFL, ClientRound, Task
from ntkfl.methods.step_selection import scores
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


@pytest.mark.parametrize("method", [NTKFL(), NTKFL(sparsity=0.5), NTKFL(shuffle=True)])
def test_clients_together_send_what_each_sends_alone(method: NTKFL) -> None:
    """What an accelerator does with a round's clients, on the CPU."""
    task = Task(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(), 3, "ce")
    some, w = clients(2, 5, 3), task.like
    candidates = torch.stack([w, w + 0.1, w - 0.2])
    for together, alone in (
        (method.upload_together(task, 1, w, some), [method.upload_together(task, 1, w, [c])[0] for c in some]),
        (
            scores(task, 1, candidates, some, method.shuffle),
            [scores(task, 1, candidates, [c], method.shuffle)[0] for c in some],
        ),
    ):
        for ours, theirs in zip(together, alone, strict=True):
            assert list(ours.arrays) == list(theirs.arrays)
            for name, array in ours.arrays.items():
                torch.testing.assert_close(array, theirs.arrays[name], rtol=1e-12, atol=1e-14)


def test_an_upload_is_decoded_once_for_validation_and_for_the_round() -> None:
    method, task, clients = NTKFL(sparsity=0.5), small_task(), small_clients(6)
    (reply,) = method.answer(task, Message("weights", 1, {"weights": task.like}), clients)
    received = Message.decode(reply.encode())
    method.check(task, received)
    assert isinstance(received.arrays, dict)
    received.arrays.clear()  # nothing is read of it any more
    assert len(method.read_rows(task, received).J) == 6
