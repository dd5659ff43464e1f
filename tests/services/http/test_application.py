"""The common base of the services, spoken to over TLS: one shape of errors, without details or input."""

from __future__ import annotations

import json
import re

import httpx

from tests.services.example_service import error
from tests.services.processes import Process


def test_what_is_unexpected_tells_no_details(client: httpx.Client, process: Process) -> None:
    response = client.get("/broken")
    assert error(response) == (500, "internal")
    assert "hidden-detail" not in response.text
    assert "hidden-detail" not in process.output()
    record = next(line for line in map(json.loads, process.err) if line["event"] == "internal-error")
    assert (record["level"], record["error"], record["service"]) == ("error", "ValueError", "front")
    assert re.fullmatch(r"program.py:\d+", record["where"])
