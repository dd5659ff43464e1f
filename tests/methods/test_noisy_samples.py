"""Noise on samples: all that is sent comes from the noisy copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ntkfl.methods.cp_ntk_fl import CPNTKFL
from ntkfl.methods.ntk_fl import NTKFL
from ntkfl.privacy.randomness import Randomness
from ntkfl.wire import Message
from tests.methods.rounds import small_clients, small_task


@pytest.mark.parametrize("shuffle", [False, True])
def test_all_a_client_sends_is_made_from_one_noisy_copy(shuffle: bool) -> None:
    """Post-processing: uploads and losses are those of a client that holds the copy and adds no noise."""
    task, client = small_task(dtype=torch.float32), *small_clients(12, dtype=torch.float32)
    noisy, plain = NTKFL(clip=1.5, noise=0.7, shuffle=shuffle), NTKFL(shuffle=shuffle)
    copy = noisy.private(task, client)
    assert not torch.equal(copy.x, client.x)
    w = torch.stack([task.like, 0.5 * task.like])
    for question in (Message("weights", 1, {"weights": w[0]}), Message("candidates", 1, {"weights": w})):
        sent, expected = noisy.answer(task, question, [client])[0], plain.answer(task, question, [copy])[0]
        assert sent.encode() == expected.encode()
    other_round = noisy.private(task, replace(client, randomness=Randomness.simulated(4)))
    assert not torch.equal(other_round.x, copy.x)


def test_top_k_positions_are_chosen_after_the_noise() -> None:
    task, client = small_task(dtype=torch.float32), *small_clients(12, dtype=torch.float32)
    question = Message("weights", 1, {"weights": task.like})
    noisy = NTKFL(clip=1.0, noise=2.0, sparsity=0.8)
    sent = noisy.answer(task, question, [client])[0]
    clean = NTKFL(sparsity=0.8).answer(task, question, [client])[0]
    assert not torch.equal(sent.arrays["topk.positions"], clean.arrays["topk.positions"])


def test_noise_brings_label_noise_with_it() -> None:
    assert NTKFL(clip=1.0, noise=1.0).label_flip == 0.2
    assert CPNTKFL(clip=1.0, noise=1.0, label_flip=0.5).label_flip == 0.5
    assert NTKFL(clip=1.0).label_flip == NTKFL().label_flip == 0
