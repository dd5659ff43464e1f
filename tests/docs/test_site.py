"""The documentation site builds, every link in it leads somewhere, and it can be read and searched from the disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ntkfl.methods import METHODS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs mkdocs: make docs")
    pytest.importorskip("mkdocstrings", reason="needs mkdocs: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


def test_pages_made_by_the_build_are_there(site: Path) -> None:
    assert "ntkfl report --live" in (site / "commands.html").read_text()
    assert (site / "results/backbone/rounds.png").exists()
    sections = re.findall(r'<h2 id="([\w-]+)"', (site / "options.html").read_text())
    assert sections == ["shared-by-all-methods", *METHODS]
    assert '<h3 id="dirichlet">' in (site / "settings.html").read_text()


def test_the_search_index_can_be_loaded_from_the_disk(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = ")
    found = {entry["location"] for entry in json.loads(index.removeprefix("var __index = "))["docs"]}
    assert {"api.html#ntkfl.train", "options.html#fedavg", "settings.html#dirichlet", "start.html"} <= found


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', page.read_text())
        loaded += re.findall(r'<link[^>]* rel="(?:stylesheet|preconnect|icon)"[^>]*>', page.read_text())
        assert not [address for address in loaded if "//" in address], page


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in menu, page.name
