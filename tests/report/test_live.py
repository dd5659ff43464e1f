"""The live page: a real server on loopback, folders that change under it, and a browser that is never reloaded."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ntkfl.federation.run_folder import RunFolder
from ntkfl.report.live import LiveServer
from ntkfl.report.runs import find
from tests.cli.command import Command
from tests.report.conftest import Open, copied


@pytest.fixture
def going(runs: Path, tmp_path: Path) -> RunFolder:
    """A folder with a run of which two rounds of six are done."""
    return RunFolder(copied(runs / "cut", tmp_path / "going"))


@pytest.fixture
def server(runs: Path, going: RunFolder) -> Iterator[LiveServer]:
    server = LiveServer([runs, going.path.parent], 0, every=0.05)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    thread.join(10)
    server.server_close()


def ask(server: LiveServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    with closing(connection):
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_a_round_appears_and_a_stop_is_said(server: LiveServer, going: RunFolder, open_page: Open, shoot: Any) -> None:
    name = f"{going.path.parent.name}/going"
    with going.locked():
        page = open_page(server.url)
        row = page.locator(f'tr[data-group="{name}"]')
        row.locator(".running").wait_for()
        curve = page.locator(f'[data-curve="{name}"] polyline')
        assert len(curve.get_attribute("points").split()) == 2
        assert "running: 2 of 6 rounds" in row.inner_text()
        page.evaluate("window.kept = true")  # a reload would lose this
        page.locator(f"#legend button:has-text('{name}')").focus()
        going.append("history.jsonl", going.records()[-1] | {"round": 3, "test_accuracy": 0.77})
        going.append("timings.jsonl", going.records("timings.jsonl")[-1] | {"round": 3})
        page.wait_for_function("n => [...runs.values()].find(r => r.name === n).series.seconds.length === 3", arg=name)
        assert len(curve.get_attribute("points").split()) == 3
        assert "77.0" in row.inner_text()
        assert page.evaluate("document.activeElement.textContent") == name  # redrawn around the focus
        shoot(page, "live")
    row.locator(".stopped").wait_for()
    assert "stopped after 3 of 6 rounds" in row.inner_text()
    assert page.evaluate("window.kept")
    assert page.inner_text("#live") == "live"
    assert page.locator("#audit tr").count() > 0


def test_it_answers_to_its_own_name_and_gives_nothing_else_away(server: LiveServer, runs: Path) -> None:
    assert ask(server, "/")[0] == 200
    assert ask(server, "/", host=f"localhost:{server.server_address[1]}")[0] == 200
    assert ask(server, "/", host="evil.example")[0] == 403
    assert ask(server, "/", host="")[0] == 403
    run = next(run for run in find(server.paths) if run.name.endswith("whole"))
    assert ask(server, f"/files/{run.id}/config.toml")[1] == (runs / "whole" / "config.toml").read_bytes()
    for path in (
        "/../../etc/passwd", f"/files/{run.id}/../cut/config.toml", f"/files/{run.id}/..%2fcut%2fconfig.toml",
        f"/files/{run.id}/%2fetc%2fpasswd", f"/files/{run.id}/checkpoint/state.safetensors", f"/files/{run.id}/.lock",
        "/files/none/config.toml", f"/files/{run.id}", "//etc/passwd", "/files/%00/config.toml",
    ):  # fmt: skip
        assert ask(server, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE"):
        assert ask(server, "/", method)[0] == 501


def test_the_command_serves_loopback_and_leaves_on_ctrl_c(tmp_path: Path) -> None:
    command = Command("report", "--live", tmp_path, "--port", "0")
    command.until("^http://127.0.0.1:")
    assert command.interrupt() == 0
    assert len(command.text.splitlines()) == 1
