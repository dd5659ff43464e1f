"""Numbers of sixteen bits with an exponent for each array."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import MessageError, NotFinite
from ntkfl.wire import Message
from ntkfl.wire.halves import EXPONENTS, pack_halves


def test_halves_keep_eleven_bits_whatever_the_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        str(e): (torch.rand(50, generator=generator, dtype=torch.float64) + 0.01) * 10.0**e
        for e in (-300, -30, 0, 6, 300)
    }
    values |= {"zero": torch.zeros(3, dtype=torch.float64), "none": torch.zeros(0, dtype=torch.float64)}
    message = Message.decode(Message("update", 1, pack_halves(values)).encode())
    for name, value in values.items():
        assert torch.allclose(message.take(name, (None,), torch.zeros(0).double()), value, rtol=2**-11, atol=0)
    assert torch.allclose(message.take("6"), values["6"].float(), rtol=2**-11, atol=0)  # not scaled, whoever takes it
    with pytest.raises(NotFinite):
        message.take("300", None, torch.zeros(0))  # 1e300 is no float32


def test_arrays_beside_halves_are_as_they_were_sent() -> None:
    beside = {"count": torch.tensor(3), "own": torch.tensor([0.1, 1e9])}
    message = Message("update", 1, beside | pack_halves({"a": torch.full((3,), 7e-9)}) | {"last": torch.tensor([2.0])})
    taken = Message.decode(message.encode())
    assert torch.equal(taken.take("own"), beside["own"])
    assert int(taken.take("count", ())) == 3
    assert taken.take("last").tolist() == [2.0]
    assert torch.allclose(taken.take("a"), torch.full((3,), 7e-9), rtol=2**-11, atol=0)


def test_exponents_of_other_arrays_are_refused() -> None:
    good = pack_halves({"a": torch.ones(3), "b": torch.ones(2)})
    wrong = (good[EXPONENTS][:1], good[EXPONENTS].unsqueeze(0), good[EXPONENTS].float(), good[EXPONENTS].long())
    for exponents in wrong:
        with pytest.raises(MessageError, match="2 float16 arrays and other exponents"):
            Message("update", 1, good | {EXPONENTS: exponents}).take("a")
    with pytest.raises(MessageError, match="3 float16 arrays and other exponents"):
        Message("update", 1, good | {"c": torch.ones(2).half()}).take("a")
    for extreme in (-(2**15), 2**15 - 1):
        exponents = torch.tensor([extreme, 0], dtype=torch.int16)
        message = Message("update", 1, good | {EXPONENTS: exponents})
        if extreme < 0:
            assert float(message.take("a").abs().max()) == 0  # below what any type holds
            continue
        with pytest.raises(NotFinite):
            message.take("a", None, torch.zeros(0).double())
