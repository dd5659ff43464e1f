"""Files that are whole or as they were before: whatever kills a process, fills a disk, or writes at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ntkfl.errors import ConfigError

PART = ".part"  # the end of a name under which a file is being written


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write `path`'s new content to: beside its place, flushed to disk and moved there when the block ends.

    Whoever reads `path` finds all of it, or the old one. Where the block, or the disk, fails, what was written is gone.
    """
    # Two that write the same file at once must not write into one another's.
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{PART}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Give `path` this content, all of it or none."""
    with replacing(path) as file:
        file.write(content)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from its first moment on; never over one that is there."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)  # half a key would be in the way of a whole one
            raise
    except FileExistsError:
        raise ConfigError(f"{path} is there already; a key is never overwritten") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def check_private(path: Path) -> None:
    """`ConfigError` where others than its owner can read, or change, a file that holds a secret."""
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"{path} holds a secret and others can read it: chmod 600 {path}")
