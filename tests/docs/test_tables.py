"""README.md and docs/ say what the files in results/ say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.hooks import load

ROOT = Path(__file__).parents[2]
TABLES = load("tables")


@pytest.mark.parametrize("name", TABLES.FILES)
def test_a_table_is_as_its_results_say(name: str) -> None:
    text = (ROOT / name).read_text()
    assert TABLES.filled(text) == text, "stale: make tables"


def test_every_table_stands_somewhere() -> None:
    used = {name for file in TABLES.FILES for _, name, _ in TABLES.BLOCK.findall((ROOT / file).read_text())}
    assert used == set(TABLES.TABLES)
