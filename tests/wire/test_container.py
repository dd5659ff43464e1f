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


def test_strided_arrays_travel_whole() -> None:
    x = torch.arange(12.0).view(3, 4).T
    assert torch.equal(unpack(pack(0, 1, {"x": x}))[2]["x"], x)


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


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_even_with_a_fitting_checksum(noise: bytes) -> None:
    for payload in (noise, resealed(noise), resealed(b"NTKF\x01\x00" + noise)):
        try:
            unpack(payload)
        except MessageError:
            continue


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


def test_another_version_says_so() -> None:
    body = bytearray(example()[:-4])
    body[4] = 9
    with pytest.raises(MessageError, match="version 9"):
        unpack(resealed(bytes(body)))


def test_types_that_do_not_travel() -> None:
    with pytest.raises(MessageError, match="complex64"):
        pack(0, 0, {"x": torch.zeros(1, dtype=torch.complex64)})


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
