"""A second, append-only record of what was released, beside the database.

    one line per release:  batch number, 10 hexadecimal digits | space | SHA-256 of what was released | line feed

A line is on the disk before its release is. So a database that was restored from an older copy does not know of a
release that stands here, and a batch of it can be released again only with the very same rows: with one client more or
less, the difference of the two releases would be that client's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ntkfl.errors import ConfigError

_LINE = re.compile(rb"([0-9a-f]{10}) ([0-9a-f]{64})\n")
_LINE_BYTES = 76


class ReleaseLog:
    """Of one run; one process at a time, which holds the database's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.released: dict[int, bytes] = {}  # batch number → digest
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot use {path}: {error.strerror}") from None
        whole = len(content) - len(content) % _LINE_BYTES  # what follows was never flushed: its release was not made
        for start in range(0, whole, _LINE_BYTES):
            found = _LINE.fullmatch(content, start, start + _LINE_BYTES)
            if not found:
                raise ConfigError(f"{path} is damaged at byte {start}: what was released is not known; begin a new run")
            self.released[int(found[1], 16)] = bytes.fromhex(found[2].decode())
        os.ftruncate(self._file, whole)

    def append(self, number: int, digest: bytes) -> None:
        """On return the line is on the disk. `OSError` where it cannot be; then nothing of it is left."""
        size = os.fstat(self._file).st_size
        try:
            os.write(self._file, b"%010x %s\n" % (number, digest.hex().encode()))
            os.fsync(self._file)
            if os.fstat(self._file).st_size != size + _LINE_BYTES:
                raise OSError(28, "No space left on device")
        except OSError:
            os.ftruncate(self._file, size)
            raise
        self.released[number] = digest

    def close(self) -> None:
        os.close(self._file)
