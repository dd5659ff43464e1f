"""Numbers of sixteen bits with an exponent for each array."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import NotFinite
from ntkfl.wire import Message
from ntkfl.wire.halves import pack_halves, unpack_halves


def test_halves_keep_eleven_bits_whatever_the_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        str(e): (torch.rand(50, generator=generator, dtype=torch.float64) + 0.01) * 10.0**e
        for e in (-300, -30, 0, 6, 300)
    }
    values |= {"zero": torch.zeros(3, dtype=torch.float64), "none": torch.zeros(0, dtype=torch.float64)}
    message = Message.decode(Message("update", 1, pack_halves(values)).encode())
    back = unpack_halves(message, list(values), torch.zeros(0, dtype=torch.float64))
    for name, value in values.items():
        assert torch.allclose(back[name], value, rtol=2**-11, atol=0)
    with pytest.raises(NotFinite):
        unpack_halves(message, list(values), torch.zeros(0, dtype=torch.float32))  # 1e300 is no float32
