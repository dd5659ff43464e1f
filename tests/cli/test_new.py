"""`ntkfl new` writes a project that runs at once, and overwrites nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ntkfl.cli import app
from tests.fork_server import run


def test_a_new_project_trains_and_passes_its_own_tests(tmp_path: Path) -> None:
    done = run("-m", "ntkfl", "new", "two-sites", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "two-sites"
    said = [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert said[0] == "cd two-sites"
    trained = run("-m", *said[1].split(), "--rounds", "2", directory=folder)
    assert trained.returncode == 0, trained.stderr
    history = [json.loads(line) for line in (folder / "runs" / "first" / "history.jsonl").read_text().splitlines()]
    assert len(history) == 2
    own = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_project.py"]
    tested = subprocess.run(own, cwd=folder, capture_output=True, text=True, timeout=120)
    assert "3 passed" in tested.stdout, tested.stdout + tested.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["class"], "cannot be a Python package"),
        (["a.b"], "cannot be a Python package"),
        (["two_sites", "--flower"], "cannot be a Flower app"),
        (["x" * 33, "--flower"], "cannot be a Flower app"),
    ],
)
def test_a_name_that_python_or_flower_cannot_use_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in str(CliRunner().invoke(app, ["new", *words]).exception)
    assert not list(tmp_path.iterdir())
