"""The example service as a process, and somebody who speaks to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.services.example_service import caller, make, start
from tests.services.processes import Process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    with start(folder) as process:
        yield process


@pytest.fixture
def client(process: Process, folder: Path) -> Iterator[httpx.Client]:
    with caller(process.urls["front"], folder) as client:
        yield client
