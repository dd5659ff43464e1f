"""The page in a real browser: what is drawn, what its controls do, and that it needs nothing from elsewhere."""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from ntkfl.report import COLOURS
from ntkfl.report.page import write_report
from tests.report.conftest import HOSTILE, Open, Shoot


@pytest.fixture(scope="module")
def report(runs: Path) -> str:
    path = write_report([runs], runs / "report.html")
    assert path.stat().st_size < 6_000_000
    return path.as_uri()


def accuracies(page: Any, name: str) -> list[float]:
    return list(page.evaluate("n => [...runs.values()].find(r => r.name === n).series.test_accuracy", name))


def points(page: Any, curve: str) -> int:
    """Of a curve, counted off the drawing itself."""
    return len(page.get_attribute(f'[data-curve="{curve}"] polyline', "points").split())


def test_pointer_and_keyboard_tell_the_same_values(report: str, open_page: Open) -> None:
    page = open_page(report)
    third, last = accuracies(page, "whole")[2:]
    place = page.evaluate(
        """() => { const box = document.querySelector('#plot').getBoundingClientRect();
        const curve = document.querySelector('[data-curve=whole] polyline').getAttribute('points');
        const [x, y] = curve.split(' ')[2].split(',');
        return [box.left + Number(x), box.top + Number(y)]; }"""
    )
    page.mouse.move(*place)
    told = page.inner_text("#tip")
    assert told.startswith("round 3")
    assert re.search(rf"whole\s+{100 * third:.1f} %", told)
    # Two seeds are one curve, which says its range; the run that ended before is not there.
    assert re.search(r"small: NTK-FL\s+[\d.]+ % \([\d.]+ to [\d.]+ %\)", told)
    assert "cut" not in told
    page.mouse.move(2, 2)
    assert page.is_hidden("#tip")

    page.focus("#plot")
    for key, text in (("Home", "round 1"), ("ArrowRight", "round 2"), ("End", "round 5"), ("ArrowLeft", "round 4")):
        page.keyboard.press(key)
        assert page.inner_text("#tip").startswith(text)
    assert f"{100 * last:.1f} %" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")


def test_controls_change_what_is_drawn(report: str, open_page: Open) -> None:
    page = open_page(report)
    assert points(page, "whole") == 4
    assert page.get_attribute("[data-curve=cut] polyline", "stroke") == COLOURS[0]
    page.click("#legend button:has-text('whole')")
    assert page.locator("[data-curve=whole]").count() == 0
    page.click("#none")
    assert page.is_visible("text=No curve to draw yet")
    page.click("#all")
    page.check("#seeds")
    assert points(page, "small: NTK-FL, seed 1") == 3
    page.fill("#targets", "1, 99")  # percent: reached in the first round, and never
    page.keyboard.press("Enter")
    row = page.locator("#results tr[data-group=whole]")
    assert row.locator("td").nth(3).inner_text() == "1"
    assert row.locator("td").nth(5).inner_text() == "–"
    page.click("#results button:has-text('accuracy')")
    order = [float(text.split(" ")[0]) for text in page.locator("#results tbody td:nth-child(3)").all_inner_texts()]
    assert order == sorted(order, reverse=True)
    page.focus("[role=tab][data-axis=rounds]")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("[data-axis=bytes]", "aria-selected") == "true"
    assert "MiB up and down" in page.inner_text("#plot")
    page.select_option("#metric", "test_loss")
    assert "test loss" in page.inner_text("#plot")


def test_the_chart_is_saved_as_svg_and_its_data_as_csv(report: str, open_page: Open, tmp_path: Path) -> None:
    page = open_page(report, scheme="dark")
    for kind in ("svg", "csv"):
        with page.expect_download() as saved:
            page.click(f"#{kind}")
        saved.value.save_as(tmp_path / f"saved.{kind}")
    root = ET.parse(tmp_path / "saved.svg").getroot()  # well-formed, with whatever name
    text = (tmp_path / "saved.svg").read_text()
    assert root[0].attrib["fill"] == "rgb(255, 255, 255)"
    assert "var(" not in text
    assert all(colour in text for colour in COLOURS[:4])
    rows = list(csv.DictReader((tmp_path / "saved.csv").read_text().splitlines()))
    found = [float(row["test accuracy"]) for row in rows if row["run"] == "whole"]
    assert found == accuracies(page, "whole")
    assert any(HOSTILE in row["run"] for row in rows)


def test_the_axis_shows_the_finish(report: str, open_page: Open) -> None:
    page = open_page(report)
    rising = "{ y: [0.1, 0.3, 0.6, 0.8, 0.86, 0.88, 0.9, 0.9] }"
    low, high = page.evaluate(f"finish([{rising}], [0.8, 0.95], 1)")
    assert 0.7 < low < 0.8  # the target that was reached, and more than half of all points; not the one that was not
    assert 0.9 < high < 0.95
    falling = rising.replace("] }", "].map((v) => -v) }")
    assert page.evaluate(f"finish([{falling}], [-0.8], -1)") == [-high, -low]
    assert page.evaluate("finish([{ y: [0.80, 0.82, 0.84, 0.86, 0.88, 0.90] }], [], 1)") is None  # nearly all of it


def test_names_are_text_and_never_markup(report: str, open_page: Open) -> None:
    page = open_page(report)
    assert page.locator("img[src=x]").count() == 0
    for place in ("#results", "#legend", "#privacy"):
        assert HOSTILE in page.inner_text(place)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_screens_and_every_control_has_a_name(report: str, open_page: Open, shoot: Shoot, scheme: str) -> None:
    for width in (1280, 360):
        page = open_page(report, width=width, scheme=scheme)
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        shoot(page, f"report-{width}-{scheme}")
    for control in page.locator("select, input, button, [role=tabpanel], [role=region]").all():
        if control.is_visible():
            named = "e => (e.labels?.[0]?.textContent || e.getAttribute('aria-label') || e.textContent || "
            named += "document.getElementById(e.getAttribute('aria-labelledby'))?.textContent || '').trim()"
            assert control.evaluate(named), control.evaluate("e => e.outerHTML.slice(0, 200)")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    grounds = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}
    assert page.evaluate(ground) == grounds[scheme]
    page.select_option("#theme", "light")
    assert page.evaluate(ground) == grounds["light"]


def test_the_page_holds_everything_it_needs(report: str) -> None:
    text = Path(report.removeprefix("file://")).read_text()
    assert not re.search(r"""(src|href)=["'](https?:)?//|@import|url\((?!#)""", text)
    assert "default-src 'none'" in text
