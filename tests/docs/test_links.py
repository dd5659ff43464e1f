"""Every link of the Markdown pages leads to a file that is there, and to a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ntkfl_experiments.paper import ITEMS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
GENERATED = {"options.md", "settings.md", "commands.md"}  # by the site alone


def anchors(page: Path) -> set[str]:
    """What the site and repositories call the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h) for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        place, _, heading = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if target.name in GENERATED:
            continue
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


def test_names_in_the_map_of_the_paper_exist() -> None:
    """docs/paper.md names things in files, tests, and one command for each item."""
    text = (ROOT / "docs" / "paper.md").read_text()
    for place in set(re.findall(r"`([\w/]+\.py:\w+)`", text)):
        path, name = place.split(":")
        package = ROOT / "src" / "ntkfl"
        if path.startswith("experiments/"):
            path, package = path.removeprefix("experiments/"), ROOT / "experiments" / "src" / "ntkfl_experiments"
        source = (package / path).read_text()
        assert re.search(rf"^(def|class) {name}\b|^{name}\b.*=", source, re.MULTILINE), f"{path} has no {name}"
    assert all((ROOT / path).is_file() for path in re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert set(re.findall(r"`ntkfl reproduce (\w+)`", text)) == set(ITEMS)
