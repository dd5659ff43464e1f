"""The container: exact both ways, and nothing but an error for anything else."""

from __future__ import annotations

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.wire.container import pack, unpack

DTYPES = [torch.float32, torch.float64, torch.float16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def example() -> bytes:
    return pack(3, 7, {"weights": torch.arange(6.0).view(2, 3), "labels": torch.tensor([1, 2], dtype=torch.uint8)})


def resealed(body: bytes) -> bytes:
    """`body` with a checksum that fits, as a hostile sender would make."""
    return body + struct.pack("<I", zlib.crc32(body))


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(st.lists(st.text("abcxyz.0123", min_size=1, max_size=9), unique=True, max_size=4))
    out = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 100
        out[name] = values.to(draw(st.sampled_from(DTYPES)))
    return out


@given(arrays(), st.integers(0, 255), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_unpack_is_the_inverse_of_pack(given: dict[str, Tensor], kind: int, round: int) -> None:
    k, r, back = unpack(pack(kind, round, given))
    assert (k, r, list(back)) == (kind, round, list(given))
    for name, tensor in given.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_the_bytes_are_those_documented() -> None:
    payload = pack(1, 258, {"ab": torch.tensor([1.0], dtype=torch.float32)})
    expected = b"NTKF" + bytes([1, 1]) + b"\x02\x01\x00\x00" + b"\x01\x00"
    expected += bytes([2]) + b"ab" + bytes([0, 1]) + b"\x01\x00\x00\x00" + struct.pack("<f", 1.0)
    assert payload == resealed(expected)


@given(st.integers(0, 200), st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_a_flipped_bit_is_noticed(byte: int, bit: int) -> None:
    payload = bytearray(example())
    payload[byte % len(payload)] ^= 1 << bit
    with pytest.raises(MessageError):
        unpack(bytes(payload))


def test_every_truncation_is_noticed() -> None:
    payload = example()
    for length in range(len(payload)):
        with pytest.raises(MessageError):
            unpack(payload[:length])


def test_forged_sizes_allocate_nothing() -> None:
    head = b"NTKF" + struct.pack("<BBIH", 1, 0, 1, 1) + b"\x01x" + struct.pack("<BB4I", 1, 4, *[2**32 - 1] * 4)
    with pytest.raises(MessageError, match="does not fit"):
        unpack(resealed(head))


def test_trailing_bytes_and_doubled_names() -> None:
    body = example()[:-4]
    with pytest.raises(MessageError, match="too many"):
        unpack(resealed(body + b"x"))
    entry = b"\x01x" + struct.pack("<BB", 3, 0)
    twice = b"NTKF" + struct.pack("<BBIH", 1, 0, 1, 2) + entry + entry + b"ab"
    with pytest.raises(MessageError, match="stands twice"):
        unpack(resealed(twice))


@pytest.mark.parametrize(
    "shape", [(0, 2**32 - 1, 2**32 - 1), (0,) * 9, (1,) * 65, (0, 2**32 - 1, 2**32 - 1, 2**32 - 1)]
)
def test_shapes_no_array_can_have_are_refused(shape: tuple[int, ...]) -> None:
    """They hold no number, so their size fits, and yet no library can make them."""
    head = struct.pack("<4sBBIH", b"NTKF", 1, 0, 1, 1) + struct.pack(
        f"<B1sBB{len(shape)}I", 1, b"a", 0, len(shape), *shape
    )
    body = head + (b"" if 0 in shape else bytes(4))
    with pytest.raises(MessageError):
        unpack(body + struct.pack("<I", zlib.crc32(body)))


def hollow(count: int, padding: int = 0) -> bytes:
    """A message of so many empty arrays, as `pack` will not make it, and of one that fills it up."""
    names = [f"{i:04x}" for i in range(count - 1)]
    heads = b"".join(struct.pack("<B4sBBI", 4, name.encode(), 3, 1, 0) for name in names)
    heads += struct.pack("<B4sBBI", 4, b"rest", 3, 1, padding)
    return resealed(b"NTKF" + struct.pack("<BBIH", 1, 1, 1, count) + heads + bytes(padding))


@pytest.mark.parametrize(("count", "padding"), [(65, 0), (1234, 0), (65535, 0), (1234, 1 << 20)])
def test_more_arrays_than_its_size_explains_are_refused_before_one_is_made(
    count: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = torch.from_numpy
    monkeypatch.setattr("torch.from_numpy", lambda values: made.append(1) or real(values))
    with pytest.raises(MessageError, match=f"{count} arrays .* more than a message may have"):
        unpack(hollow(count, padding))
    assert not made


def test_a_deep_network_has_the_arrays_it_needs() -> None:
    """64 of any size, and one more for every 4 KiB: what `pack` makes, `unpack` takes."""
    assert len(unpack(hollow(64))[2]) == 64
    layers = {f"{i}.g": torch.zeros(1, 2048) for i in range(200)}
    assert len(unpack(pack(1, 1, layers))[2]) == 200
    with pytest.raises(MessageError, match="codec 'dense'"):
        pack(1, 1, {f"{i}.g": torch.zeros(1, 4) for i in range(65)})
