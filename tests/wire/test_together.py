"""Messages encoded into one piece of memory: byte for byte what each encodes to by itself, and read without copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkfl.errors import MessageError
from ntkfl.wire import Message
from ntkfl.wire.together import LARGE, decode_together, encode_together

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def messages(device: str, columns: int = 50) -> list[Message]:
    """Of 1 to 9 rows, so that arrays behind the labels, a byte each, begin anywhere."""
    torch.manual_seed(0)

    def arrays(rows: int) -> dict[str, Tensor]:
        return {
            "outputs": torch.randn(rows, 3),
            "labels": torch.arange(rows, dtype=torch.uint8),
            "jacobian": torch.tensor([3, 7]),
            "0.a": torch.randn(2 * rows, columns)[::2],
            "0.g": torch.randn(rows, 3, 5, dtype=torch.float64),
            "none": torch.zeros(0, 4),
            "column": torch.randn(rows, 5, dtype=torch.float64)[:, 2],
            "samples": torch.tensor(rows, dtype=torch.int32),
        }

    made = [Message("upload", 3, {n: a.to(device) for n, a in arrays(rows).items()}) for rows in range(1, 10)]
    return [*made, Message("losses", 3, {})]


@pytest.mark.parametrize("device", DEVICES)
def test_the_bytes_are_each_messages_own(device: str) -> None:
    given = messages(device)
    payloads = encode_together(given)
    assert [bytes(payload) for payload in payloads] == [message.encode() for message in given]
    for message, came in zip(given, decode_together(payloads), strict=True):
        assert (came.kind, came.round, list(came.arrays)) == (message.kind, message.round, list(message.arrays))
        for name, array in came.arrays.items():
            assert array.dtype == message.arrays[name].dtype
            assert torch.equal(array, message.arrays[name].cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_a_message_comes_to_this_machines_memory(device: str) -> None:
    for message in messages(device):
        here = message.here()
        assert (here is message) == (device == "cpu" or not message.arrays)
        assert here.encode() == message.encode()
        assert not any(array.is_cuda for array in here.arrays.values())


@pytest.mark.parametrize("device", DEVICES)
def test_large_messages_keep_their_largest_array_where_it_is(device: str) -> None:
    """In threads, and on a GPU's machine in pinned memory from end to end."""
    given = messages(device, columns=LARGE // 4 // 45 + 1)
    payloads = encode_together(given)
    assert sum(map(len, payloads)) >= LARGE
    came = decode_together(payloads)
    assert bytes(payloads[8]) == given[8].encode()
    for reply in came[:-1]:
        first = reply.arrays["0.a"].data_ptr()
        assert first % 64 == 0
        assert reply.arrays["0.a"].is_pinned() == (device == "cuda")
    at = bytes(payloads[8]).index(given[8].arrays["0.a"].cpu().numpy().tobytes())
    payloads[8][at : at + 4] = b"\0\0\0\0"
    assert came[8].arrays["0.a"].flatten()[0] == 0  # the same memory


def test_damaged_and_impossible_messages_are_refused() -> None:
    payloads = encode_together(messages("cpu"))
    payloads[4][100] ^= 1
    with pytest.raises(MessageError, match="checksum"):
        decode_together(payloads)
    with pytest.raises(MessageError, match="do not carry"):
        encode_together([Message("upload", 1, {"x": torch.zeros(2, dtype=torch.complex64)})])
    with pytest.raises(MessageError, match="more than a message may have"):
        encode_together([Message("upload", 1, {str(i): torch.zeros(1) for i in range(70)})])
