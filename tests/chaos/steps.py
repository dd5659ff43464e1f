"""Killed at every step: a process that ends itself with SIGKILL the n-th time it opens, moves or deletes a file."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")


def die_at(step: int, folder: Path) -> None:
    """From now on, the process dies on its `step`-th touch of something in `folder`, just before it happens."""
    inside, count = os.fspath(folder), 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event not in _EVENTS or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if os.fsdecode(arguments[0]).startswith(inside):
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
