"""README.md and docs/results.md say what the files in results/ say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.hooks import load

ROOT = Path(__file__).parents[2]


TABLES = load("tables")


@pytest.mark.parametrize("name", TABLES.FILES)
def test_a_table_is_as_its_results_say(name: str) -> None:
    text = (ROOT / name).read_text()
    assert TABLES.BLOCK.search(text), f"{name} has no generated table"
    assert TABLES.filled(text) == text, "stale: make tables"


def test_a_changed_number_is_noticed() -> None:
    text = (ROOT / "README.md").read_text()
    assert TABLES.filled(text.replace("at its best | 5 | 50.0", "at its best | 5 | 51.0")) == TABLES.filled(text)
    assert "at its best | 5 | 50.0" in TABLES.filled(text)


def test_every_item_with_results_is_in_the_table() -> None:
    from ntkfl_experiments.paper import ITEMS

    assert set(TABLES.ORDER) == set(ITEMS)


def test_a_claim_of_several_settings_is_counted_once() -> None:
    assert TABLES.verdict_of([True, True]) is True
    assert TABLES.verdict_of([True, None]) is None
    assert TABLES.verdict_of([True, None, False]) is False
    claims = TABLES.claims()
    assert len(claims["NTK-FL outperforms every federated baseline"]) == 4
    rows = TABLES.paper().splitlines()[2:]
    assert len(rows) == len(claims)
    hold, fail, neither = (sum(row.endswith(f"| {word} |") for row in rows) for word in TABLES.VERDICTS.values())
    assert TABLES.tally().splitlines()[2] == f"| {len(rows)} | {hold} | {fail} | {neither} |"
