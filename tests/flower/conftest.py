"""What Flower said."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Lines of Flower's log, which hands none on to the root."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flwr").addHandler(handler)
    yield lines
    logging.getLogger("flwr").removeHandler(handler)
