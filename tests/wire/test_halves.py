"""Numbers of sixteen bits with an exponent for each array."""

from __future__ import annotations

import pytest
import torch

from ntkfl.errors import NotFinite
from ntkfl.wire import Message
from ntkfl.wire.halves import pack_halves, pack_halves_together, unpack_halves, unpack_halves_together

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_several_messages_at_once_are_the_same_bytes(dtype: torch.dtype, device: str) -> None:
    """Of very different sizes: an array's exponent is each message's own."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([1.0, 1e-30, 3e9, 0.0], dtype=dtype)
    arrays = {
        "a": torch.randn(4, 50, generator=generator, dtype=dtype) * scales.view(-1, 1),
        "b": torch.randn(4, 2, 3, generator=generator, dtype=dtype) * scales.flip(0).view(-1, 1, 1),
        "none": torch.zeros(4, 0, dtype=dtype),
    }
    together = pack_halves_together({name: array.to(device) for name, array in arrays.items()})
    alone = [pack_halves({name: array[i] for name, array in arrays.items()}) for i in range(4)]
    assert [Message("update", 1, one).encode() for one in together] == [Message("update", 1, m).encode() for m in alone]
    like = torch.zeros(0, dtype=dtype, device=device)
    stacked = {name: torch.stack([one[name] for one in together]).to(device) for name in together[0]}
    back = unpack_halves_together(Message("update", 1, stacked), list(arrays), like)
    for i, one in enumerate(alone):
        for name, array in unpack_halves(Message("update", 1, one), list(arrays), like.cpu()).items():
            assert torch.equal(back[name][i].cpu(), array)


def test_an_exponent_that_overflows_is_found_in_any_of_several() -> None:
    (one,) = pack_halves_together({"a": torch.full((1, 3), 1e300, dtype=torch.float64)})
    stacked = Message("update", 1, {name: torch.stack([array, array]) for name, array in one.items()})
    with pytest.raises(NotFinite):
        unpack_halves_together(stacked, ["a"], torch.zeros(0))
