"""Clients of this process: what they answer goes through bytes."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import MessageError
from ntkfl.federation.local import through_bytes
from ntkfl.wire import Message


def test_answers_pass_through_bytes_in_their_order_and_are_let_go() -> None:
    kept = [Message("upload", 1, {"outputs": torch.full((10,), float(i))}) for i in range(8)]
    answers = list(kept)
    sent = through_bytes(answers)
    assert not answers
    assert [size for _, size in sent] == [len(message.encode()) for message in kept]
    for (reply, _), message in zip(sent, kept, strict=True):
        assert torch.equal(reply.arrays["outputs"], message.arrays["outputs"])
    bad = Message("upload", 1, {"outputs": torch.zeros(10, dtype=torch.complex64)})
    with pytest.raises(MessageError, match="do not carry"):
        through_bytes([kept[0], bad, *kept])
