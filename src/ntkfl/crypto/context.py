"""Domain separation (`bind`), and bytes that must not be shown (`Secret`)."""

from __future__ import annotations

import struct
from typing import NoReturn


def bind(label: str, *parts: str | bytes | int) -> bytes:
    """Context bytes: the label and every part, each with its length (u32, little-endian) before it; integers as u64.

    No two different lists of parts, of equal types, give the same bytes.
    """
    out = []
    for part in (label, *parts):
        text = struct.pack("<Q", part) if isinstance(part, int) else part
        data = text.encode() if isinstance(text, str) else text
        out.append(struct.pack("<I", len(data)) + data)
    return b"".join(out)


class Secret:
    """Bytes that never show: not in a repr, a log, an error or a pickle. `reveal()` is the one way to them."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = bytes(value)

    def reveal(self) -> bytes:
        """The bytes, for the one computation that needs them."""
        return self._value

    def __repr__(self) -> str:
        return "<secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not to be pickled")
