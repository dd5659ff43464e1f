"""The common base of the services, spoken to over TLS: one shape of errors, without details or input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.services.example_service import caller, error, make, start
from tests.services.processes import Process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("application"))


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    with start(folder) as process:
        yield process


@pytest.fixture
def client(process: Process, folder: Path) -> Iterator[httpx.Client]:
    with caller(process.urls["front"], folder) as client:
        yield client


def test_what_is_unexpected_tells_no_details(client: httpx.Client, process: Process) -> None:
    response = client.get("/broken")
    assert error(response) == (500, "internal")
    assert "hidden-detail" not in response.text
    assert "hidden-detail" not in process.output()
    record = next(line for line in map(json.loads, process.err) if line["event"] == "internal-error")
    assert (record["level"], record["error"], record["service"]) == ("error", "ValueError", "front")
    assert re.fullmatch(r"program.py:\d+", record["where"])
