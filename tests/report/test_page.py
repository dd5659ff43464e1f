"""The page in a real browser: what is drawn, what its controls do, and that it needs nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ntkfl.report.page import write_report
from tests.report.conftest import HOSTILE

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


def test_curves_have_a_point_a_round(report: str, open_page: Open) -> None:
    page = open_page(report)
    for figure in ("by-round", "by-bytes", "by-seconds"):
        assert sorted(points(page, figure).values()) == [2, 3, 4, 5]
    assert page.inner_text("#steps") == "steps t chosen: 400 at every point"  # of NTK-FL alone, and always the same
    assert list(points(page, "products").values()) == [3]
    assert list(points(page, "error").values()) == [3]
    assert page.locator("#by-round .band").count() == 2  # two of the four have seeds to spread over
    page.check("#seeds")
    assert sorted(points(page, "by-round").values()) == [2, 3, 3, 4, 5, 5]


def test_toggles(report: str, open_page: Open) -> None:
    page = open_page(report)
    box = page.get_by_label("show whole", exact=True)
    box.uncheck()
    assert sorted(points(page, "by-round").values()) == [2, 3, 5]
    page.get_by_role("button", name="Hide all").click()
    assert points(page, "by-round") == {}
    page.get_by_role("button", name="Show all").click()
    assert len(points(page, "by-round")) == 4

    before = page.get_attribute("#by-round .curve", "points")
    page.set_checked("#log-x", not page.is_checked("#log-x"))
    assert page.get_attribute("#by-round .curve", "points") != before
    page.select_option("#metric", "test_loss")
    assert page.inner_text("#by-round figcaption") == "test loss by rounds"
    fewer = page.inner_text("#run-table tbody tr:last-child td:nth-of-type(4)")
    page.fill("#target", "1")
    page.press("#target", "Enter")
    assert page.inner_text("#run-table tbody tr:last-child td:nth-of-type(4)") == "1"  # any run has 1 % at once
    assert fewer != "1"
    largest = page.text_content("#kinds svg")
    page.select_option("#per", "round")
    assert page.text_content("#kinds svg") != largest
    assert page.locator("#clients .bubble").count() > 20
    page.check("#everyone")


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


def test_settings_mark_what_differs(report: str, open_page: Open) -> None:
    page = open_page(report)
    rows = page.eval_on_selector_all("#setting-table tbody th", "all => all.map(e => e.textContent)")
    assert "≠ method.name" in rows
    assert "data.dataset" not in rows
    page.uncheck("#differences")
    rows = page.eval_on_selector_all("#setting-table tbody th", "all => all.map(e => e.textContent)")
    assert "data.dataset" in rows
    assert page.locator("#setting-table td.differs").count() > 4


def test_conditions_files_spectrum_and_audit(report: str, open_page: Open, runs: Path) -> None:
    page = open_page(report)
    assert page.inner_text("tr[data-group=cut] .stopped") == "stopped after 2 of 6 rounds"
    assert "5 finished, 1 stopped" in page.inner_text("#summary")
    link = page.get_by_label("history.jsonl of whole")
    assert link.evaluate("a => a.href") == (runs / "whole" / "history.jsonl").as_uri()
    assert len(points(page, "spectrum")) == 8  # four curves, before the first round and after the last
    page.click("#audit summary")
    said = page.inner_text("#audit")
    assert "learns labels and inputs" in said
    assert "SSIM 0.913 ± 0.02" in said
    assert page.evaluate("nested({a: [{b: 1, c: [2, 3]}], d: 'text'}).textContent") == "abc1[2,3]dtext"  # of any form
    page.locator("#by-round summary").click()
    rows = page.locator("#by-round details tbody tr")
    rows.nth(2 + 3 + 4 + 5 - 1).wait_for(state="attached")  # they are made when it opens
    assert rows.count() == 2 + 3 + 4 + 5


def test_what_was_rejected(open_page: Open, runs: Path, tmp_path: Path, shoot: Shoot) -> None:
    alone = write_report([runs / "whole"], tmp_path / "alone.html").as_uri()
    assert open_page(alone).is_hidden("#rejections")  # nothing was
    for name in ("whole", "attacked"):
        shutil.copytree(runs / "whole", tmp_path / name)
    history = tmp_path / "attacked" / "history.jsonl"
    records = [json.loads(line) for line in history.read_text().splitlines()]
    records[1] |= {"rejected": {"not finite": 30}, "rejected_clients": 1, "byzantine": [7]}
    records[3] |= {"rejected": {"not finite": 12, HOSTILE: 1}, "failed": {"client-1": "no answer"}}
    history.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = open_page(write_report([tmp_path], tmp_path / "report.html").as_uri(), width=360, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    rows = page.eval_on_selector_all(
        "#rejected-table tbody tr", "all => all.map(r => [...r.cells].map(c => c.textContent))"
    )
    assert rows == [
        ["attacked", "rejected: not finite", "42", "2", "2"],
        ["attacked", f"rejected: {HOSTILE}", "1", "1", "4"],
        ["attacked", "clients with something rejected", "1", "1", "2"],
        ["attacked", "Byzantine clients", "1", "1", "2"],
        ["attacked", "clients that failed: no answer", "1", "1", "4"],
    ]
    assert list(points(page, "rejected-rows").values()) == [4, 4]
    assert list(points(page, "rejected-clients").values()) == [4, 4, 4]
    page.focus("#rejected-rows svg")
    page.keyboard.press("End")
    assert page.inner_text("#tip").splitlines() == ["attacked", "rejected: not finite", "round 4", "rows 12"]
    page.keyboard.press("Escape")
    shoot(page, "report-rejected-phone-dark")
    page.get_by_label("show attacked", exact=True).uncheck()
    assert page.is_hidden("#rejections")


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


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_stand_out_on_both_grounds() -> None:
    """WCAG's contrast: 4.5 for text, 3 for curves."""
    css = (files("ntkfl.report") / "assets" / "page.css").read_text()
    blocks = [
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in re.findall(r"\{([^{}]*--ground:[^{}]*)\}", css)
    ]
    assert len(blocks) == 3
    assert blocks[1] == blocks[2]  # dark by the system, dark by choice
    for colours in blocks:
        for name, colour in colours.items():
            for ground in ("ground", "raised"):
                light, dark = sorted((luminance(colour), luminance(colours[ground])), reverse=True)
                least = 4.5 if name in ("text", "quiet", "link", "good", "bad", "busy") else 3.0
                if name not in ("ground", "raised", "line", "mark"):
                    assert (light + 0.05) / (dark + 0.05) >= least, (name, colour, ground)


def test_the_page_holds_everything_it_needs(report: str) -> None:
    text = Path(report.removeprefix("file://")).read_text()
    assert not re.search(r"""(src|href)=["'](https?:)?//|@import|url\(""", text)
    assert "default-src 'none'" in text


def test_bytes_are_told_both_ways_and_their_sum(report: str, open_page: Open, runs: Path) -> None:
    page = open_page(report)
    history = [json.loads(line) for line in (runs / "whole" / "history.jsonl").read_text().splitlines()]
    sent = [sum(record[way] for record in history) / 2**20 for way in ("uplink_bytes", "downlink_bytes")]
    row = page.locator("#run-table tr", has_text="whole")
    up, down, both = map(float, re.findall(r"[\d.]+", row.locator("td").nth(5).inner_text()))
    assert (up, down) == tuple(round(way, 2) for way in sent)
    assert both == pytest.approx(up + down)
    first = history[0]
    page.fill("#target", "1")
    page.press("#target", "Enter")
    until = [float(text) for text in re.findall(r"[\d.]+", row.locator("td").nth(4).inner_text())]
    assert until[:2] == [round(first[way] / 2**20, 3) for way in ("uplink_bytes", "downlink_bytes")]
    assert until[2] == pytest.approx(until[0] + until[1])
    assert "MiB up and down" in (page.text_content("#by-bytes svg") or "")


def test_a_chart_of_one_value_is_a_line_of_text(runs: Path, tmp_path: Path, open_page: Open) -> None:
    shutil.copytree(runs / "whole", tmp_path / "same")
    history = tmp_path / "same" / "history.jsonl"
    records = [json.loads(line) | {"steps": 400} for line in history.read_text().splitlines()]
    history.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = open_page(write_report([tmp_path / "same"], tmp_path / "page.html").as_uri())
    assert page.inner_text("#steps") == "steps t chosen: 400 at every point"
    assert page.is_hidden("#steps svg")
    assert page.is_visible("#by-round svg")
    page.evaluate("runs.values().next().value.series.steps[1] = 300; drawAll()")  # as a live page would
    assert page.is_visible("#steps svg")
    assert page.inner_text("#steps figcaption") == "steps t chosen"


def test_a_failed_run_says_where(runs: Path, tmp_path: Path, open_page: Open) -> None:
    """Of several seeds, the first one's reason; an error's lines stand on lines of their own."""
    shutil.copytree(runs / "small", tmp_path / "small")
    cells = json.loads((tmp_path / "small" / "plan.json").read_text())["cells"]
    for cell in (cell for cell in cells if cell["label"] == "NTK-FL"):
        folder = tmp_path / "small" / cell["folder"]
        (folder / "history.jsonl").write_text("".join((folder / "history.jsonl").read_text().splitlines(True)[:1]))
        folder.with_name(f"{folder.name}.error.txt").write_text(
            "KeyError: 'v' (mine.py, line 6)\n  mine.py, line 6: v\n"
        )
    page = open_page(write_report([tmp_path / "small"], tmp_path / "page.html").as_uri(), width=390)
    said = page.inner_text("tr[data-group=NTK-FL] .failed").splitlines()
    assert [line.strip() for line in said] == [
        "2 failed, 1 round",
        "KeyError: 'v' (mine.py, line 6)",
        "mine.py, line 6: v",
    ]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
