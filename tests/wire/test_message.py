"""Messages: what they carry and what is refused."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import MessageError
from ntkfl.wire.message import Message, pack_labels


def test_take_checks_what_it_takes() -> None:
    message = Message("update", 2, {"weights": torch.zeros(3), "bad": torch.tensor([float("inf")])})
    assert message.take("weights", (3,)).shape == (3,)
    with pytest.raises(MessageError, match="lacks 'loss'; it has '"):
        message.take("loss")
    with pytest.raises(MessageError, match=r"has shape \[3\], not \[4\]"):
        message.take("weights", (4,))
    with pytest.raises(MessageError, match="not finite"):
        message.take("bad")
    with pytest.raises(MessageError, match="expected a 'sums' message"):
        message.of_kind("sums")


def test_labels_travel_in_the_narrowest_integers() -> None:
    assert pack_labels(torch.tensor([0, 9]), 10).dtype == torch.uint8
    assert pack_labels(torch.tensor([0, 300]), 301).dtype == torch.int32
    assert pack_labels(torch.randn(2, 3), 3).dtype == torch.float32
