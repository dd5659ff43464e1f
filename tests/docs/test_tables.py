"""README.md and docs/results.md say what the files in results/ say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.hooks import load

ROOT = Path(__file__).parents[2]


TABLES, RESULT_TABLES = load("tables"), load("result_tables")


@pytest.mark.parametrize("name", TABLES.FILES)
def test_a_table_is_as_its_results_say(name: str) -> None:
    text = (ROOT / name).read_text()
    assert TABLES.BLOCK.search(text), f"{name} has no generated table"
    assert TABLES.filled(text) == text, "stale: make tables"


def test_every_item_with_results_is_in_the_table() -> None:
    from ntkfl_experiments.paper import ITEMS

    assert set(TABLES.ORDER) == set(ITEMS)


def test_every_table_stands_somewhere() -> None:
    used = {name for file in TABLES.FILES for _, name, _ in TABLES.BLOCK.findall((ROOT / file).read_text())}
    assert used == set(TABLES.TABLES)


def row(label: str, curves: list[list[float]], own: list[list[float]], down: bool = True) -> dict[str, object]:
    def reached(curves: list[list[float]]) -> dict[str, object]:
        hits = [next((i + 1 for i, a in enumerate(curve) if a >= 0.85), None) for curve in curves]
        mib = [None if hit is None else 10.0 * hit for hit in hits]
        return {"target": 0.85, "rounds": hits, "uplink_mib": mib, **({"downlink_mib": mib} if down else {})}

    return {
        "label": label, "setting": {"name": "x", "lr": 0.1, "local_steps": 5}, "length": 3, "accuracy": curves,
        "last_accuracy": own, "reached": [reached(curves)], "reached_unaveraged": [reached(own)],
    }  # fmt: skip
