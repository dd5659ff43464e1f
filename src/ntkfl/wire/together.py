"""Messages of a whole cohort encoded into one piece of memory, and decoded where they lie.

For replies that were computed together on a GPU: its own copies put each array to its place in the encoding, in memory
that it also reads fastest, so that on their way through bytes no array is copied by the CPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from ntkfl.threads import in_threads
from ntkfl.wire.container import CHECKSUM, check_arrays
from ntkfl.wire.message import Message

LARGE = 2**24  # bytes of all messages, below which threads cost more than they save
_ALIGNED = 64  # bytes, of which the largest array of a message begins at a multiple


def encode_together(messages: Sequence[Message]) -> list[memoryview]:
    """What `Message.encode` makes of each, as parts of one piece of memory: pinned, where arrays are on a GPU."""
    headers = [message.header() for message in messages]
    places, end = [], 0
    for message, header in zip(messages, headers, strict=True):
        sizes = [array.nbytes for array in message.arrays.values()]
        check_arrays(len(sizes), len(header) + sum(sizes) + CHECKSUM)
        largest = sizes.index(max(sizes)) if sizes else 0
        end += -(end + len(header) + sum(sizes[:largest])) % _ALIGNED
        places.append((end, end := end + len(header) + sum(sizes)))
        end += CHECKSUM
    devices = {array.device for message in messages for array in message.arrays.values() if array.is_cuda}
    room = torch.empty(end, dtype=torch.uint8, pin_memory=bool(devices))
    memory = memoryview(room.numpy())  # type: ignore[arg-type]
    for message, header, (at, _) in zip(messages, headers, places, strict=True):
        memory[at : at + len(header)] = header
        at += len(header)
        for array in message.arrays.values():  # little-endian, as is every machine with a GPU
            # Of one number, any stride counts as contiguous; but `view` wants it to be 1.
            numbers = array.detach().contiguous().as_strided((array.numel(),), (1,))
            room[at : at + array.nbytes].copy_(numbers.view(torch.uint8), non_blocking=True)
            at += array.nbytes
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    crcs = _checksums([memory[first:last] for first, last in places])
    for (_, last), crc in zip(places, crcs, strict=True):
        memory[last : last + CHECKSUM] = crc.to_bytes(CHECKSUM, "little")
    return [memory[first : last + CHECKSUM] for first, last in places]


def decode_together(payloads: Sequence[memoryview]) -> list[Message]:
    """What `Message.decode` makes of each, but large arrays stay in the payloads' memory."""
    crcs = _checksums([payload[:-CHECKSUM] for payload in payloads])
    return [Message.decode(payload, crc, copy=False) for payload, crc in zip(payloads, crcs, strict=True)]


def _checksums(parts: Sequence[memoryview]) -> list[int]:
    large = sum(map(len, parts)) >= LARGE
    return in_threads(zlib.crc32, parts) if large else [zlib.crc32(part) for part in parts]
