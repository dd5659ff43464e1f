"""The documentation site builds, every link in it leads somewhere, and it can be read and searched from the disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    assert (site / "results/rivals/curves.png").exists()
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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium refuses root one
        started = driver.chromium.launch(executable_path=path, args=[*sandbox, "--disable-gpu"])
        yield started
        started.close()


@pytest.mark.browser
@pytest.mark.parametrize(("page", "typed"), [("index", "ntkfl.jacobian"), ("examples/index", "from_clients")])
def test_search_works_from_the_disk(site: Path, chromium: Any, page: str, typed: str) -> None:
    window = chromium.new_page()
    window.set_default_timeout(60_000)
    said: list[str] = []
    window.on("pageerror", lambda error: said.append(str(error)))
    window.goto(f"file://{site}/{page}.html")
    window.click(".md-search__input")
    window.keyboard.type(typed)
    window.wait_for_selector(".md-search-result__item a")
    links = [link.get_attribute("href") for link in window.locator(".md-search-result__item a").all()]
    assert any(re.search(rf"/api\.html.*#ntkfl\.(data\.)?{typed.removeprefix('ntkfl.')}", link) for link in links), (
        links
    )
    assert said == []
    window.close()
