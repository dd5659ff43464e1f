"""The page in a real browser: what is drawn, what its controls do, and that it needs nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ntkfl.report.page import write_report

Open = Callable[..., Any]
Shoot = Callable[[Any, str], None]


@pytest.fixture(scope="module")
def report(runs: Path) -> str:
    path = write_report([runs], runs / "report.html")
    assert path.stat().st_size < 6_000_000
    return path.as_uri()


def points(page: Any, figure: str) -> dict[str, int]:
    """Points of each curve in a figure, counted off the drawing itself."""
    script = "all => Object.fromEntries(all.map(c => [c.dataset.series, c.getAttribute('points').split(' ').length]))"
    return dict(page.eval_on_selector_all(f"#{figure} .curve", script))


def test_hover_and_keyboard_tell_the_same_point(report: str, open_page: Open, runs: Path) -> None:
    page = open_page(report)
    identity = page.evaluate("[...runs.values()].find(r => r.name === 'whole').id")
    accuracy = page.evaluate("[...runs.values()].find(r => r.name === 'whole').series.test_accuracy")
    place = page.evaluate(
        """id => { const svg = document.querySelector('#by-round svg'), box = svg.getBoundingClientRect();
        const [x, y] = svg.querySelector(`[data-series="${id}"].curve`).getAttribute('points').split(' ')[2].split(',');
        return [box.left + Number(x), box.top + Number(y)]; }""",
        identity,
    )
    page.mouse.move(*place)
    told = page.inner_text("#tip")
    assert told.splitlines()[1:] == ["round 3", f"test accuracy {100 * accuracy[2]:.2f} %"]
    page.mouse.move(2, 2)
    assert page.is_hidden("#tip")

    page.focus("#by-round svg")
    page.keyboard.press("ArrowUp")  # the last curve
    page.keyboard.press("End")
    assert page.inner_text("#tip").splitlines() == ["whole", "round 4", f"test accuracy {100 * accuracy[3]:.2f} %"]
    page.keyboard.press("ArrowLeft")
    assert f"{100 * accuracy[2]:.2f} %" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    page.hover("#kinds .segment >> nth=0")
    assert "MiB" in page.inner_text("#tip")


def test_names_are_text_and_never_markup(report: str, open_page: Open) -> None:
    page = open_page(report)
    assert page.locator("img[src=x]").count() == 0
    assert "</script><img src=x onerror=alert(1)>" in page.inner_text("#run-table")


def test_everything_has_a_name_and_fits_a_phone(report: str, open_page: Open, shoot: Shoot) -> None:
    for scheme in ("light", "dark"):
        for name, width in (("wide", 1400), ("phone", 360)):
            page = open_page(report, width=width, scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            shoot(page, f"report-{name}-{scheme}")
    for control in page.locator("select, input, button, svg[role=img], [role=region]").all():
        if control.is_visible():
            named = "e => (e.labels?.[0]?.textContent || e.getAttribute('aria-label') || e.textContent || "
            named += "document.getElementById(e.getAttribute('aria-labelledby'))?.textContent || '').trim()"
            assert control.evaluate(named), control.evaluate("e => e.outerHTML.slice(0, 200)")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(ground) == "rgb(20, 24, 29)"
    page.select_option("#theme", "light")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"


def test_the_page_holds_everything_it_needs(report: str) -> None:
    text = Path(report.removeprefix("file://")).read_text()
    assert not re.search(r"""(src|href)=["'](https?:)?//|@import|url\(""", text)
    assert "default-src 'none'" in text
