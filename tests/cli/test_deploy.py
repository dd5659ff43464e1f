"""`ntkfl deploy status` from the folders of roles that never ran, that ended, and whose certificates end."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.crypto import certificates
from ntkfl.deployment.demo_setup import DemoSetup, demo_run, init
from ntkfl.services import probe
from ntkfl.services.status import STOPPED, StatusFile
from tests.deployment.federation import Deployment, free_port


def status(*words: str | Path) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["deploy", "status", *map(str, words)])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    return outcome.exit_code, outcome.output


def elsewhen(days: float) -> type[datetime]:
    """A clock that is so many days ahead."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(days=days)

    return Clock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    setup = DemoSetup(clients=2, key_server_port=free_port(), shuffler_port=free_port(), aggregator_port=free_port())
    init(tmp_path / "demo", demo_run(setup), setup)
    return tmp_path / "demo"


def test_a_federation_that_never_ran(folder: Path) -> None:
    code, said = status(folder)
    assert code == 0, said  # what was never started is waited for, and no error
    everybody = "key server, shuffler, aggregator, client-0, client-1, evaluator-0"
    assert f"Not started yet: {everybody}.\nNo problem was found." in said
    assert json.loads(status(folder, "--json")[1])["waits_for"] == everybody.split(", ")
    assert "expected: 3 (client-0, client-1, evaluator-0)" in said
    for role in ("key server", "shuffler", "aggregator", "client-0", "evaluator-0"):
        assert f"{role}, {folder}" in said
    assert said.count("has not run here") == 6
    assert said.count("certificate tls.pem ends on ") == 3
    code, said = status(folder / "clients" / "client-0")
    assert (code, said.splitlines()[-1]) == (0, "No problem was found.")
    assert "has not enrolled" in said


def test_a_running_service_by_its_folder_and_by_its_address(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    with deployment.start_key_server() as process:
        code, said = status(deployment.folder / "key-server")
        assert code == 0, said
        assert f"{process.urls['key-server']} answers and is ready (key-server)" in said
        assert f"runs, pid {process.pid}" in said
        code, said = status(process.urls["key-server"], "--ca", deployment.folder / "aggregator" / "ca.pem")
        assert (code, "its certificate ends on " in said, "was not checked" in said) == (0, True, False)
        code, said = status(process.urls["key-server"], "--ca", deployment.folder / "shuffler" / "aggregator-ca.pem")
        assert code == 1
        assert "CERTIFICATE_VERIFY_FAILED" in said  # another authority's word does not count
        assert "was not checked" in status(process.urls["key-server"])[1]
        assert process.stop() == 0
        code, said = status(deployment.folder / "key-server")
        assert (code, "was stopped" in said, "by SIGTERM" in said) == (0, True, True)
    with deployment.start_key_server():
        pass
    code, said = status(deployment.folder / "key-server")
    assert code == 1
    assert "does not run; its last sign was " in said  # killed


def test_a_certificate_that_ended_is_shown_and_renewed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StatusFile(folder / "shuffler", "shuffler").close(STOPPED)
    assert status(folder / "shuffler")[0] == 0

    monkeypatch.setattr(probe, "datetime", elsewhen(400))
    code, said = status(folder / "shuffler")
    assert (code, "certificate tls.pem ended on" in said) == (1, True)
    monkeypatch.setattr(certificates, "datetime", elsewhen(400))
    renewed = CliRunner().invoke(app, ["keys", "renew", str(folder / "authority"), str(folder / "shuffler")])
    assert renewed.exit_code == 0, renewed.output
    assert status(folder / "shuffler")[0] == 0
