"""MNIST's idx format, read strictly: a file is whole and as announced, or it is an error."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ntkfl.data.arrays import Bytes
from ntkfl.errors import DataError

_UNSIGNED_BYTE = 0x08
_GZIP_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 20


@dataclass(frozen=True)
class IdxFile:
    """A published file: its name without .gz, its shape, and the sha256 of its content, however it was compressed."""

    name: str
    shape: tuple[int, ...]
    sha256: str

    def find(self, folder: Path) -> Path | None:
        """The file in `folder`, compressed or not."""
        candidates = (folder / f"{self.name}.gz", folder / self.name)
        return next((path for path in candidates if path.is_file()), None)

    def read(self, folder: Path) -> Bytes:
        """The array, checked against shape and sha256."""
        path = self.find(folder)
        if path is None:
            raise DataError(f"{folder / self.name}[.gz] is missing")
        raw = read_content(path, limit=4 + 4 * len(self.shape) + math.prod(self.shape))
        array = parse(raw, str(path))
        found = hashlib.sha256(raw).hexdigest()
        if array.shape != self.shape or found != self.sha256:
            raise DataError(
                f"{path}: not the published content (sha256 {found[:12]}… instead of {self.sha256[:12]}…): "
                "delete it and fetch it again"
            )
        return array


def read_content(path: Path, limit: int) -> bytes:
    """The file's bytes, decompressed where it is gzip; more than `limit` of them is an error, and they are not read."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            stream = gzip.GzipFile(fileobj=file) if compressed else file
            # In pieces: asked for all at once, room for the limit would be made first. One byte beyond the limit: a
            # longer file shows, and gzip compares its CRC only on meeting the end.
            parts, left = [], limit + 1
            while left and (part := stream.read(min(left, _PIECE))):
                parts.append(part)
                left -= len(part)
        raw = b"".join(parts)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read, {error}: delete it and fetch it again") from None
    if len(raw) > limit:
        raise DataError(f"{path}: longer than the {limit} bytes expected: delete it and fetch it again")
    return raw


def parse(raw: bytes, where: str) -> Bytes:
    """The unsigned-byte array in `raw`; `where` names it in errors. No byte may be missing or left over."""
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != _UNSIGNED_BYTE or not 1 <= raw[3] <= 4:
        raise DataError(f"{where}: not an idx file of unsigned bytes (starts with {raw[:4].hex(' ') or 'nothing'})")
    start = 4 + 4 * raw[3]
    if len(raw) < start:
        raise DataError(f"{where}: the idx header is cut short")
    shape = tuple(int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4))
    # Before anything is made of it: a forged header must not decide how much memory is asked for.
    if len(raw) - start != math.prod(shape):
        raise DataError(f"{where}: announces {list(shape)} = {math.prod(shape)} bytes but holds {len(raw) - start}")
    try:
        return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
    except ValueError:  # no bytes, in a shape too large to be one
        raise DataError(f"{where}: an array cannot have the shape {list(shape)}") from None
