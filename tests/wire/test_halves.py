"""Numbers of sixteen bits, an exponent for each array: whoever reads a message finds values, never scaled ones."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import MessageError, NotFinite
from ntkfl.wire import Message
from ntkfl.wire.halves import EXPONENTS, pack_halves, unpack_halves


def test_halves_keep_eleven_bits_whatever_the_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        str(e): (torch.rand(50, generator=generator, dtype=torch.float64) + 0.01) * 10.0**e for e in (-30, 0, 6, 30)
    }
    values |= {"zero": torch.zeros(3, dtype=torch.float64), "none": torch.zeros(0, dtype=torch.float64)}
    message = Message.decode(Message("update", 1, values, tuple(values)).encode())
    assert set(message.halves) == set(values)
    for name, value in values.items():
        assert torch.allclose(message.take(name, (None,), value), value, rtol=2**-11, atol=0)
        assert torch.allclose(message.arrays[name].double(), value, rtol=2**-11, atol=0)  # however it is read
    assert message.encode() == Message.decode(message.encode()).encode()


def test_arrays_beside_halves_are_as_they_were_sent() -> None:
    beside = {"count": torch.tensor(3), "own": torch.tensor([0.1, 1e9])}
    arrays = beside | {"a": torch.full((3,), 7e-9)} | {"last": torch.tensor([2.0])}
    taken = Message.decode(Message("update", 1, arrays, ("a",)).encode())
    assert torch.equal(taken.take("own"), beside["own"])
    assert int(taken.take("count", ())) == 3
    assert taken.take("last").tolist() == [2.0]
    assert torch.allclose(taken.take("a"), torch.full((3,), 7e-9), rtol=2**-11, atol=0)


def test_exponents_of_other_arrays_are_refused() -> None:
    good = dict(pack_halves({"a": torch.ones(3), "b": torch.ones(2)}, ("a", "b")))
    wrong = (good[EXPONENTS][:1], good[EXPONENTS].unsqueeze(0), good[EXPONENTS].float(), good[EXPONENTS].long())
    for exponents in wrong:
        with pytest.raises(MessageError, match="2 float16 arrays and exponents of"):
            unpack_halves(good | {EXPONENTS: exponents})
    with pytest.raises(MessageError, match="3 float16 arrays and exponents of"):
        unpack_halves(good | {"c": torch.ones(2).half()})
    for extreme in (-(2**15), 2**15 - 1):
        arrays, _ = unpack_halves(good | {EXPONENTS: torch.tensor([extreme, 0], dtype=torch.int16)})
        message = Message("update", 1, arrays)
        if extreme < 0:
            assert float(message.take("a").abs().max()) == 0  # below what the type holds
            continue
        with pytest.raises(NotFinite):
            message.take("a")
