"""Ctrl-C: one line that says how to go on, and exit code 130."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer


@contextmanager
def stoppable(hint: Callable[[], str] = lambda: "stopped") -> Iterator[None]:
    """Where the block is interrupted, `hint` gives the one line that is printed: what is kept, and how to go on.

    Nothing is lost: whatever this package writes is whole or not there.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(hint(), err=True)
        raise typer.Exit(130) from None
