"""Every reason that a service refuses with has its status, which the protocol fixes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ntkfl.services
from ntkfl.errors import Refused
from ntkfl.services.http.refusals import STATUS_OF, refusal_response
from ntkfl.services.http.signing import Unauthenticated
from ntkfl.services.shuffler.batch import CLOSED

SERVICES = Path(ntkfl.services.__file__).parent
BY_CLIENTS = {"unreachable"}  # what a client tells itself


def raised(name: str) -> Iterator[str]:
    """The reasons of every `raise NAME(reason, …)` in the services."""
    for path in SERVICES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id=found), args=[ast.Constant(value=str(reason)), *_]) if found == name:
                    yield reason


def test_every_reason_that_is_raised_has_a_status_and_no_status_is_left_over() -> None:
    reasons = {*raised("Refused"), *(reason for reason, _ in CLOSED.values())} - BY_CLIENTS
    assert len(reasons) > 25
    assert reasons == set(STATUS_OF)


def documented() -> dict[int, set[str]]:
    """The table of docs/protocol.md: reasons by status."""
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| (`[^|]+) \|", text, flags=re.MULTILINE)
    return {int(status): set(re.findall("`([a-z-]+)`", reasons)) for status, reasons in rows}


def test_statuses_are_those_of_the_protocol() -> None:
    table = documented()
    assert table.pop(401) == set(raised("Unauthenticated"))
    assert table == {status: {r for r, s in STATUS_OF.items() if s == status} for status in STATUS_OF.values()}


def test_a_refusal_is_one_line_and_says_when_to_retry() -> None:
    for reason, status in STATUS_OF.items():
        response = refusal_response(Refused(reason, "two\nlines"))
        assert response.status_code == status
        assert json.loads(response.body) == {"error": reason, "message": "two lines"}
        assert ("retry-after" in response.headers) == (status in (429, 503))


def test_a_request_that_nobody_signed_is_a_401_whatever_its_reason() -> None:
    assert set(raised("Unauthenticated")) == {"unsigned", "ended", "unauthenticated"}
    for reason in raised("Unauthenticated"):
        assert refusal_response(Unauthenticated(reason, "line")).status_code == 401


def test_a_reason_without_a_status_is_a_mistake_of_the_service() -> None:
    with pytest.raises(KeyError):
        refusal_response(Refused("no-such-reason", "line"))
