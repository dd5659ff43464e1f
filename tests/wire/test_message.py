"""Messages: exact both ways, halves to eleven bits, and nothing but an error for anything else."""

from __future__ import annotations

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ntkfl.errors import MessageError, NotFinite
from ntkfl.wire.message import EXPONENTS, KINDS, Message, pack_labels

DTYPES = [torch.float32, torch.float64, torch.float16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
EXAMPLE = Message(
    "update", 7, {"weights": torch.arange(6.0).view(2, 3), "labels": torch.tensor([1, 2]).byte()}
).encode()


def sealed(count: int, body: bytes, kind: int = 1) -> bytes:
    """A message of `count` arrays with a checksum that fits, as a hostile sender would make."""
    whole = b"NTKF" + struct.pack("<BBIH", 1, kind, 1, count) + body
    return whole + struct.pack("<I", zlib.crc32(whole))


def head(name: str, code: int, *shape: int) -> bytes:
    return struct.pack(f"<B{len(name)}sBB{len(shape)}I", len(name), name.encode(), code, len(shape), *shape)


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(st.lists(st.text("abcxyz.0123", min_size=1, max_size=9), unique=True, max_size=4))
    out = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 100
        out[name] = values.to(draw(st.sampled_from(DTYPES)))
    return out


@given(arrays(), st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_decode_is_the_inverse_of_encode(given: dict[str, Tensor], kind: str, round: int) -> None:
    back = Message.decode(Message(kind, round, given).encode())
    assert (back.kind, back.round, list(back.arrays)) == (kind, round, list(given))
    for name, tensor in given.items():
        assert back.arrays[name].dtype == tensor.dtype
        assert torch.equal(back.arrays[name], tensor)


def test_the_bytes_are_those_documented() -> None:
    payload = Message("candidates", 258, {"ab": torch.tensor([1.0])}).encode()
    expected = b"NTKF" + bytes([1, 1]) + b"\x02\x01\x00\x00" + b"\x01\x00"
    expected += bytes([2]) + b"ab" + bytes([0, 1]) + b"\x01\x00\x00\x00" + struct.pack("<f", 1.0)
    assert payload == expected + struct.pack("<I", zlib.crc32(expected))


@given(st.integers(0, len(EXAMPLE) - 1), st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_a_flipped_bit_is_noticed(byte: int, bit: int) -> None:
    payload = bytearray(EXAMPLE)
    payload[byte] ^= 1 << bit
    with pytest.raises(MessageError):
        Message.decode(bytes(payload))


def test_every_truncation_is_noticed() -> None:
    for length in range(len(EXAMPLE)):
        with pytest.raises(MessageError):
            Message.decode(EXAMPLE[:length])


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (sealed(0, b"", kind=len(KINDS)), "unknown"),
        (sealed(1, head("x", 1, *[2**32 - 1] * 4)), "does not fit"),  # nothing is allocated
        (sealed(1, head("x", 3, 1) + bytes(2)), "too many"),
        (sealed(2, head("x", 3) * 2 + bytes(2)), "stands twice"),
        # No number is in them, so their size fits, and yet no library can make them.
        (sealed(1, head("a", 0, 0, *[2**32 - 1] * 2)), "cannot have the shape"),
        (sealed(1, head("a", 0, 0, *[2**32 - 1] * 3)), "cannot have the shape"),
        (sealed(1, head("a", 0, *[0] * 9)), "9 dimensions"),
        (sealed(1, head("a", 0, *[1] * 65) + bytes(4)), "65 dimensions"),
    ],
)
def test_forged_messages_are_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        Message.decode(payload)


def hollow(count: int, padding: int = 0) -> bytes:
    """A message of so many empty arrays, as `encode` will not make it, and of one that fills it up."""
    heads = b"".join(head(f"{i:04x}", 3, 0) for i in range(count - 1))
    return sealed(count, heads + head("rest", 3, padding) + bytes(padding))


@pytest.mark.parametrize(("count", "padding"), [(65, 0), (65535, 0), (1234, 1 << 20)])
def test_more_arrays_than_its_size_explains_are_refused_before_one_is_made(
    count: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr("ntkfl.wire.message.np.ndarray", lambda *_: made.append(1))
    with pytest.raises(MessageError, match=f"{count} arrays .* more than a message may have"):
        Message.decode(hollow(count, padding))
    assert not made


def test_a_deep_network_has_the_arrays_it_needs() -> None:
    """64 of any size, and one more for every 4 KiB: what `encode` makes, `decode` takes."""
    assert len(Message.decode(hollow(64)).arrays) == 64
    layers = {f"{i}.g": torch.zeros(1, 2048) for i in range(200)}
    assert len(Message.decode(Message("rows", 1, layers).encode()).arrays) == 200
    with pytest.raises(MessageError, match="codec 'dense'"):
        Message("rows", 1, {f"{i}.g": torch.zeros(1, 4) for i in range(65)}).encode()


def test_halves_keep_eleven_bits_whatever_the_scale() -> None:
    """Whoever reads a message finds values, never scaled ones; arrays beside halves are as they were sent."""
    generator = torch.Generator().manual_seed(0)
    values = {
        str(e): (torch.rand(50, generator=generator, dtype=torch.float64) + 0.01) * 10.0**e for e in (-30, 0, 6, 30)
    }
    values |= {"zero": torch.zeros(3, dtype=torch.float64), "none": torch.zeros(0, dtype=torch.float64)}
    beside = {"count": torch.tensor(3), "own": torch.tensor([0.1, 1e9])}
    message = Message.decode(
        Message("update", 1, beside | values | {"last": torch.tensor([2.0])}, tuple(values)).encode()
    )
    assert set(message.halves) == set(values)
    for name, value in values.items():
        assert torch.allclose(message.take(name, (None,), value), value, rtol=2**-11, atol=0)
        assert torch.allclose(message.arrays[name].double(), value, rtol=2**-11, atol=0)  # however it is read
    assert torch.equal(message.take("own"), beside["own"])
    assert int(message.take("count", ())) == 3
    assert message.take("last").tolist() == [2.0]
    assert message.encode() == Message.decode(message.encode()).encode()


def with_exponents(exponents: Tensor, **more: Tensor) -> Message:
    """As a forger sends it: two halves, and whatever stands for their exponents."""
    raw = {"a": torch.ones(3).half(), "b": torch.ones(2).half(), **more, EXPONENTS: exponents}
    return Message.decode(Message("update", 1, raw).encode())


def test_exponents_of_other_arrays_are_refused() -> None:
    good = torch.tensor([14, 14], dtype=torch.int16)
    assert with_exponents(good).take("a").tolist() == [1.0] * 3
    for exponents in (good[:1], good.unsqueeze(0), good.float(), good.long()):
        with pytest.raises(MessageError, match="2 float16 arrays and exponents of"):
            with_exponents(exponents)
    with pytest.raises(MessageError, match="3 float16 arrays and exponents of"):
        with_exponents(good, c=torch.ones(2).half())
    least, most = (torch.tensor([n, 0], dtype=torch.int16) for n in (-(2**15), 2**15 - 1))
    assert float(with_exponents(least).take("a").abs().max()) == 0  # below what the type holds
    with pytest.raises(NotFinite):
        with_exponents(most).take("a")


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
