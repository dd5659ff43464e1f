"""docs/start.md, typed in an empty folder: files as its blocks say, commands in their order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ntkfl.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "start.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w/]+\.(?:py|toml))\n")


def write(text: str, project: Path) -> bool:
    """Puts a block that begins with a file's name into that file."""
    named = FILE.match(text)
    if named is None:
        return False
    assert named[1] == "make_visits.py" or (project / named[1]).exists(), f"the project has no {named[1]} to replace"
    (project / named[1]).write_text(text)
    return True


def test_its_python_runs_on_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the commands, in this process."""
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["new", "hospitals"]).exit_code == 0
    project = tmp_path / "hospitals"
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    try:
        ran = [text for language, text in BLOCKS if not write(text, project) and language == "python"]
        exec(compile((project / "make_visits.py").read_text(), "make_visits.py", "exec"), {})
        names: dict[str, object] = {}
        for text in ran:
            exec(compile(text, "start.md", "exec"), names)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "hospitals"]:
            del sys.modules[name]
    assert len(ran) == 1
    assert names["run"].history[-1]["test_accuracy"] > 0.9  # type: ignore[attr-defined]


@pytest.mark.long
def test_every_command_does_what_the_page_says(tmp_path: Path) -> None:
    for extra in ("cryptography", "torchmetrics", "scipy"):
        pytest.importorskip(extra, reason="needs the extras services and audit")
    folder = tmp_path
    for language, text in BLOCKS:
        if write(text, folder) or language != "console":
            continue
        for line in text.splitlines():
            words = line.split()
            if words[0] == "cd":
                folder = folder / words[1]
                continue
            command = [sys.executable, *(["-m", *words] if words[0] == "ntkfl" else words[1:])]
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=200, env={**os.environ, "COLUMNS": "200"}
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            if "audit" in words:
                assert "aggregator that sees totals alone" in " ".join(done.stdout.split())
    accuracies = {
        name: [json.loads(line)["test_accuracy"] for line in (folder / "runs" / name / "history.jsonl").open()]
        for name in ("first", "visits", "secure")
    }
    assert accuracies["first"][-1] > 0.95
    assert accuracies["visits"][-1] > 0.93
    assert abs(accuracies["secure"][-1] - accuracies["visits"][-1]) < 0.03
    for made in ("report.html", "runs/compare/report.html", "runs/visits/audit/findings.json"):
        assert (folder / made).stat().st_size > 1000
