"""`ntkfl deploy status` from the folders of roles that never ran, that ended, and whose certificates end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.crypto import certificates
from ntkfl.deployment.demo_setup import DemoSetup, demo_run, init
from ntkfl.services import probe
from ntkfl.services.probe import RoleStatus, add_end, add_lapsed
from ntkfl.services.status import ENDED, FILE, STOPPED, StatusFile
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


def test_from_inside_a_folder_it_is_called_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "history.jsonl").touch()
    for inside, title in ((".", "key server, "), ("aggregator", "aggregator, "), ("run", "run, ")):
        monkeypatch.chdir(folder / inside)
        code, said = status(".")
        assert (code, said.startswith(f"{title}{folder.resolve() / inside}")) == (0, True), said
    monkeypatch.chdir(folder / "clients" / "client-0")
    assert status(".")[1].startswith(f"client-0, {folder.resolve()}")


def test_while_it_starts_it_says_who_is_up_and_what_is_waited_for(folder: Path) -> None:
    aggregator = StatusFile(folder / "aggregator", "aggregator", state="waits for the shuffler")
    client = StatusFile(folder / "clients" / "client-0", "client", state="waits for the key server")
    code, said = status(folder)
    assert code == 0, said
    assert f"runs, pid {os.getpid()}: waits for the shuffler" in said
    assert f"runs, pid {os.getpid()}: waits for the key server" in said
    assert "Not started yet: key server, shuffler, client-1, evaluator-0." in said
    aggregator.update(key=(3, 0), state="training")  # once it has asked somebody, a shuffler that is gone is a problem
    code, said = status(folder / "aggregator")
    assert (code, "cannot be reached" in said.rpartition("problem")[2]) == (1, True)
    client.update(problem="no token")
    del client  # as when its process has died
    code, said = status(folder / "clients" / "client-0")
    assert code == 1
    assert re.search(r"\n1 problem:\n.*does not run; its last sign was .*: no token\n$", said)  # one fault, once


def test_numbers_beyond_a_clock_or_a_calendar_are_no_crash(folder: Path) -> None:
    client = folder / "clients" / "client-0"
    StatusFile(client, "client")  # of a role that has ended: nobody holds it
    written = json.loads((client / FILE).read_text())
    for when in (2**63, -(10**400)):
        (client / FILE).write_text(json.dumps(written | {"time": when}))
        assert "does not run; its last sign was some time ago" in status(client)[1]
    run = folder / "run"
    run.mkdir()
    (run / "history.jsonl").write_text('{"round": 1, "test_accuracy": 0.5}\n')
    (run / "timings.jsonl").write_text(f'{{"round": 1, "seconds": {10**400}}}\n')
    assert "a record that cannot be read" in status(run)[1]
    nameless = {"attempt": 0, "rejected": {"extreme": 5}, "answered": 1, "test_accuracy": 0.5}  # of no round
    (run / "history.jsonl").write_text(json.dumps(nameless) + "\n")
    (run / "timings.jsonl").write_text('{"seconds": 1.0}\n')
    code, said = status(run)
    assert (code, "a record that cannot be read" in said) == (0, True), said


def test_a_folder_that_is_half_made_is_no_crash(folder: Path) -> None:
    (folder / "key-server" / "state.sqlite").unlink()
    (folder / "shuffler" / "federation.toml").write_text("half")
    code, said = status(folder)
    assert code == 1
    assert "client-0, " in said  # the others are still told of
    os.rename(folder, folder.with_name(".demo.new"))
    outcome = CliRunner().invoke(app, ["deploy", "status", str(folder)])
    assert "is being made" in str(outcome.exception)


def test_those_that_have_lapsed_are_a_problem(folder: Path) -> None:
    part = RoleStatus("shuffler")
    add_lapsed(part, {"client": [], "evaluator": ["evaluator-0"]})
    assert part.problems == [
        "shuffler: evaluators that do not answer and have not called since: 1 (evaluator-0); start them again"
    ]


def test_roles_that_have_left_in_order_are_no_problem(folder: Path) -> None:
    for role in ("key-server", "shuffler"):
        StatusFile(folder / role, role).close(STOPPED, "SIGTERM")
    StatusFile(folder / "aggregator", "aggregator").close(ENDED)
    StatusFile(folder / "clients" / "client-0", "client", answered=5).close(ENDED)
    code, said = status(folder)
    assert code == 0, said
    assert len(re.findall(r"was stopped 0 s ago, at 20\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ, by SIGTERM", said)) == 2
    assert "answered protocol round 5 last" in said
    code, said = status(folder, "--json")
    assert json.loads(said)["problems"] == []
    assert len(json.loads(said)["parts"]) == 6


def test_a_client_that_died_is_no_problem_once_the_run_has_ended(folder: Path) -> None:
    client = StatusFile(folder / "clients" / "client-1", "client", state="waits to be asked", problem="too late")
    del client  # as when its process was killed
    StatusFile(folder / "aggregator", "aggregator", state="training").close(STOPPED)
    code, said = status(folder)
    assert (code, "does not run" in said.partition("problem:")[2]) == (1, True)
    StatusFile(folder / "aggregator", "aggregator").close(ENDED)
    code, said = status(folder)
    assert code == 0, said
    assert "does not run; its last sign was " in said  # as a note
    assert "the run has ended since: it need not be started again" in said


def test_a_copied_identity_shows_at_the_shuffler(folder: Path) -> None:
    StatusFile(folder / "shuffler", "shuffler", refused={"late": 1}).close(STOPPED)
    code, said = status(folder / "shuffler")
    assert (code, "late: rows came after" in said) == (0, True)
    StatusFile(folder / "shuffler", "shuffler", refused={"late": 1, "replayed": 3}).close(STOPPED)
    code, said = status(folder / "shuffler")
    assert (code, "replayed: 3 answers" in said.partition("problem:")[2]) == (1, True)
    assert "one identity may run in two places" in said


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


def test_what_ends_soon_is_a_problem_before_it_has_ended() -> None:
    now = datetime.now(UTC)
    for days, problems in ((40, 0), (29, 1), (-1, 1)):
        part = RoleStatus("role")
        add_end(part, "certificate", now + timedelta(days=days))
        assert len(part.problems) == problems
    assert "ended on" in part.lines[0]


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


@pytest.mark.parametrize(("extreme", "code"), [(181, 1), (30, 0), (0, 0)])
def test_a_client_whose_rows_are_all_rejected_is_a_problem(folder: Path, extreme: int, code: int) -> None:
    """Of about 700 rows of four clients a client's worth is 175, and a tenth 70."""
    out = folder / "run"
    out.mkdir()
    record = {"round": 1, "attempt": 0, "test_accuracy": 0.5, "asked": 4, "answered": 4, "samples": 700 - extreme}
    record |= {"rejected": {"extreme": extreme}} if extreme else {}
    (out / "history.jsonl").write_text(json.dumps(record) + "\n")
    (out / "timings.jsonl").write_text(json.dumps({"round": 1, "seconds": 1.0}) + "\n")
    StatusFile(folder / "aggregator", "aggregator", out=str(out)).close(ENDED)
    for where in (folder / "aggregator", out):
        found, said = status(where)
        assert found == code, said
        told = said.partition("problem:")[2]
        assert ("181 of 700 rows were not used: 181 extreme" in told, "other units" in told) == (bool(code),) * 2
        assert "client-" not in told


def test_a_folder_of_nobody_is_one_line(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "nowhere"):
        outcome = CliRunner().invoke(app, ["deploy", "status", str(where)])
        assert outcome.exit_code != 0
        assert "folder" in str(outcome.exception)


def test_a_service_warns_at_its_start_of_a_certificate_that_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = Deployment(tmp_path)
    monkeypatch.setattr(certificates, "datetime", elsewhen(-345))  # of a year's 365 days, 20 are left
    certificates.renew(deployment.folder / "authority", [deployment.folder / "key-server"])
    with deployment.start_key_server() as process:
        code, said = status(deployment.folder / "key-server")
        assert (code, "in 19 days: ntkfl keys renew" in said) == (1, True)
        assert process.stop() == 0
    assert [line for line in process.err if "key-server: warning: " in line and "tls.pem ends on " in line]


@pytest.mark.parametrize("missing", ["httpx", "cryptography"])
def test_without_the_extra_it_says_how_to_get_it(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from ntkfl.cli import main; main()"
    command = [sys.executable, "-c", program, "deploy", "status", "https://127.0.0.1:1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "needs the extra 'services'" in result.stderr
