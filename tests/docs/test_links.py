"""Every link of the Markdown pages leads to a file that is there, and to a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
