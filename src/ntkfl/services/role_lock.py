"""One process per role: two of the same folder would answer each other's questions."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ntkfl.errors import ConfigError


@contextmanager
def role_lock(folder: Path) -> Iterator[None]:
    """The folder is this process's while the block runs; `ConfigError` where it is another's."""
    try:
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot use the role's folder {folder}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"{folder} is in use: another process runs this role; stop it first") from None
    try:
        yield
    finally:
        os.close(handle)
