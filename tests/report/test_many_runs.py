"""A page of 25 runs: ten are drawn, in ten colours; the table sorts, and every other run is a tick away."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ntkfl.report.page import write_report

Open = Callable[..., Any]
Shoot = Callable[[Any, str], None]
RUNS = 25


def accuracy(run: int) -> float:
    """At the end of each run: no two alike, and not in the order of their names."""
    return 0.5 + (7 * run % RUNS) / 100


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("many")
    for run in range(RUNS):
        folder = root / f"sum-ntk-fl, Dirichlet 0.1, setting {run:02d}"
        shutil.copytree(runs / "whole", folder, ignore=shutil.ignore_patterns("audit"))
        records = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        for number, record in enumerate(records):
            record["test_accuracy"] = accuracy(run) - 0.05 * (len(records) - 1 - number)
        (folder / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return write_report([root], root / "report.html").as_uri()


def names(page: Any, selector: str) -> list[str]:
    return list(page.eval_on_selector_all(selector, "all => all.map(e => e.dataset.group)"))


def by_accuracy() -> list[str]:
    return [f"sum-ntk-fl, Dirichlet 0.1, setting {run:02d}" for run in sorted(range(RUNS), key=accuracy, reverse=True)]


def strokes(page: Any) -> list[str]:
    script = "all => all.map(c => getComputedStyle(c).color + ' ' + c.getAttribute('stroke-dasharray'))"
    return list(page.eval_on_selector_all("#by-round .curve", script))


def test_the_ten_most_accurate_are_drawn_in_ten_colours(report: str, open_page: Open, shoot: Shoot) -> None:
    page = open_page(report)
    assert names(page, "#run-table tbody tr") == by_accuracy()
    assert names(page, "#legend li") == by_accuracy()[:10]
    assert page.locator("#run-table tbody input:checked").count() == 10
    assert len(set(strokes(page))) == len(strokes(page)) == 10
    assert all(stroke.endswith(" null") for stroke in strokes(page))  # no dashes: colours suffice
    assert page.inner_text("#drawn") == "10 of 25 runs are drawn: tick others in the table."
    assert page.evaluate("document.querySelector('#legend').getBoundingClientRect().bottom <= "
                         "document.querySelector('#by-round').getBoundingClientRect().top")  # fmt: skip
    labels = page.eval_on_selector_all("#kinds .title", "all => all.map(t => t.textContent)")
    assert len(set(labels)) == 10  # shortened names still differ
    shoot(page, "report-many")
    phone = open_page(report, width=360, scheme="dark")
    assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shoot(phone, "report-many-phone-dark")
