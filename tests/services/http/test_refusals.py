"""Every reason that a service refuses with has its status, which the protocol fixes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ntkfl.services
from ntkfl.services.http.refusals import STATUS_OF
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
