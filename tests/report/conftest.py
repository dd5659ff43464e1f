"""Small real runs, and a real browser to look at them with."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ntkfl.compare.run import write_plan
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell
from ntkfl.federation.config import RunConfig
from ntkfl.federation.simulation import execute

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
HOSTILE = "</script><img src=x onerror=alert(1)>"
DATA = {"dataset": "digits", "clients": 20}
NTK = {"name": "ntk-fl", "steps": [50, 400]}
AVERAGING = {"name": "fedavg", "local_steps": 2, "lr": 0.1}


Open = Callable[..., Any]  # an address, a width and a colour scheme → Playwright's page
Shoot = Callable[[Any, str], None]


class Interrupted(Exception):
    pass


def copied(run: Path, folder: Path) -> Path:
    """A folder with what a report reads of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.toml", "history.jsonl", "timings.jsonl"):
        (folder / file).write_bytes((run / file).read_bytes())
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two methods over two seeds, a finished run, and one that was interrupted after two of six."""
    root = tmp_path_factory.mktemp("runs")
    entries = [{"label": "NTK-FL", "rounds": 3, "method": NTK}, {"label": HOSTILE, "rounds": 5, "method": AVERAGING}]
    common = {"clients_per_round": 3, "data": DATA, "model": {"hidden": [8]}}
    comparison = Comparison(name="small", seeds=(0, 1), targets=(0.4,), methods=entries, **common)
    cells, pairs = root / "small" / "cells", [(e, seed) for e in comparison.methods for seed in comparison.seeds]
    every = [Cell(entry.label, comparison.run(entry, seed, {}), cells) for entry, seed in pairs]
    write_plan(root / "small", comparison, every)
    for cell in every:
        execute(cell.config, out=cell.folder.path)
    execute(RunConfig(rounds=4, method=AVERAGING, **common), out=root / "whole")

    def interrupt(record: dict[str, object], _: object) -> None:
        if record["round"] == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        execute(RunConfig(rounds=6, method=AVERAGING, seed=1, **common), out=root / "cut", callbacks=[interrupt])
    audit = root / "whole" / "audit"
    audit.mkdir()
    attack = {"attack": "analytic inversion", "role": "aggregator", "recovers": "the input x", "measure": "SSIM"}
    attack |= {"mean": 0.913, "spread": 0.02, "guess": 0.01, "says": "Inputs can be recognised."}
    found = {"round": 1, "clients": 3, "verdicts": {"aggregator": "learns labels and inputs"}, "findings": [attack]}
    (audit / "findings.json").write_text(json.dumps(found))
    return root


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    SHOTS.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as driver:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium refuses root one
        started = driver.chromium.launch(executable_path=chromium, args=[*sandbox, "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def shoot() -> Shoot:
    """Keeps a screenshot of the whole page in build/screenshots, for people to look at."""
    return lambda page, name: page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens an address in a fresh window; at the end nothing may have been said on the console, or asked elsewhere."""
    contexts: list[Any] = []
    said: list[str] = []
    asked: list[str] = []

    def opened(url: str, width: int = 1400, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not re.match(r"file:|data:|http://127\.0\.0\.1:", url)] == []
