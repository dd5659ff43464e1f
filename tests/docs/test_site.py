"""The documentation site builds, and every link in it leads somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs: make docs")
    pytest.importorskip("mkdocstrings", reason="needs mkdocs: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    api = (tmp_path / "api.html").read_text()
    for name in ("train", "jacobian", "evolve", "from_clients", "NTKFL"):
        assert f'.{name}"' in api, name
    assert "ntkfl watch" in (tmp_path / "commands.html").read_text()
    assert (tmp_path / "results/baselines/curves.png").exists()


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in menu, page.name
