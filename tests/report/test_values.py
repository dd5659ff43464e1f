"""What clients were worth, on the page: as `ntkfl value` wrote it, whatever else the file may hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import execute
from ntkfl.report.page import write_report
from ntkfl.report.runs import require
from ntkfl.report.values import client_values


@pytest.fixture(scope="module")
def valued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 14 clients, whose values are sampled, with error bars."""
    folder = tmp_path_factory.mktemp("valued") / "ridge"
    config = RunConfig(
        rounds=1,
        clients_per_round=14,
        data={"dataset": "digits", "partition": "iid", "clients": 14},
        model={"name": "mlp", "hidden": [8]},
        method={"name": "sum-ridge", "keep_shares": True},
    )
    execute(config, out=folder)
    said = CliRunner().invoke(app, ["value", str(folder), "--permutations", "5"])
    assert said.exit_code == 0, said.output
    return folder


def document(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_the_page_holds_what_was_written(valued: Path, tmp_path: Path) -> None:
    written = {v["client"]: v for v in json.loads((valued / "values.json").read_text())}
    page = document(write_report([valued], tmp_path / "report.html"))
    (details,) = page["details"].values()
    shown = details["values"]["clients"]
    assert {c["client"]: c for c in shown} == written
    assert [c["value"] for c in shown] == sorted((v["value"] for v in written.values()), reverse=True)
    assert all(c["error"] > 0 for c in shown)
    assert details["values"]["left_out"] == 0


def test_bars_with_error_bars(valued: Path, tmp_path: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(write_report([valued], tmp_path / "report.html").as_uri())
    assert page.locator("#worth").is_visible()
    assert page.locator("#values .worth").count() == 14
    assert page.locator("#values .spread").count() == 14
    page.get_by_role("button", name="Hide all").click()
    assert not page.locator("#worth").is_visible()


@pytest.mark.parametrize(
    "content",
    ["", "{", "3", "{}", "[]", '["x"]', '[{"client": 1}]', '[{"client": "<b>", "samples": 1, "value": 1, "error": 0}]',
     '[{"client": 1, "samples": 1, "value": true, "error": 0}]',
     '[{"client": 1, "samples": 1, "value": 1e999, "error": 0}]'],
)  # fmt: skip
def test_a_file_that_is_something_else_shows_nothing(valued: Path, tmp_path: Path, content: str) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(RunFolder(valued).config())
    (folder.path / "values.json").write_text(content)
    (run,), _ = require([folder.path])
    assert client_values(run) is None


def test_many_clients_are_the_largest_and_the_smallest(valued: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(RunFolder(valued).config())
    values = [{"client": i, "samples": 1, "value": i / 250, "error": 0.1} for i in range(250)]
    (folder.path / "values.json").write_text(json.dumps(values))
    (run,), _ = require([folder.path])
    found = client_values(run)
    assert found is not None
    assert found["left_out"] == 150
    assert [c["client"] for c in found["clients"]] == [*range(249, 199, -1), *range(49, -1, -1)]
