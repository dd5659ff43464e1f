"""README.md and docs/results.md say what the files in results/ say."""

from __future__ import annotations

import json
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


def test_a_changed_number_is_noticed() -> None:
    text = (ROOT / "README.md").read_text()
    assert TABLES.filled(text.replace("as searched | 49.2", "as searched | 51.0")) == TABLES.filled(text)
    assert "as searched | 49.2" in TABLES.filled(text)


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
    hold, fail, neither = (sum(f"| {word} |" in row for row in rows) for word in TABLES.VERDICTS.values())
    assert TABLES.tally().splitlines()[2] == f"| {len(rows)} | {hold} | {fail} | {neither} |"
    assert (
        f"Of {len(rows)} claims {hold} hold, {fail} do not, {neither} cannot be judged" in TABLES.TABLES["findings"]()
    )


def test_what_was_found_of_a_claim_is_a_few_words() -> None:
    for row in TABLES.paper().splitlines()[2:]:
        here = row.split(" | ")[2]
        assert 1 <= len(here.split()) <= 12, here


def test_every_table_stands_somewhere() -> None:
    used = {name for file in TABLES.FILES for _, name, _ in TABLES.BLOCK.findall((ROOT / file).read_text())}
    assert used == set(TABLES.TABLES)


def test_findings_are_five_with_numbers_and_links() -> None:
    lines = TABLES.TABLES["findings"]().splitlines()
    assert [line[:3] for line in lines] == [f"{i}. " for i in range(1, 6)]
    assert all("](" in line and any(c.isdigit() for c in line[3:]) for line in lines)


def row(label: str, curves: list[list[float]], own: list[list[float]], down: bool = True) -> dict[str, object]:
    def reached(curves: list[list[float]]) -> dict[str, object]:
        hits = [next((i + 1 for i, a in enumerate(curve) if a >= 0.85), None) for curve in curves]
        mib = [None if hit is None else 10.0 * hit for hit in hits]
        return {"target": 0.85, "rounds": hits, "uplink_mib": mib, **({"downlink_mib": mib} if down else {})}

    return {
        "label": label, "setting": {"name": "x", "lr": 0.1, "local_steps": 5}, "length": 3, "accuracy": curves,
        "last_accuracy": own, "reached": [reached(curves)], "reached_unaveraged": [reached(own)],
    }  # fmt: skip


def test_methods_on_equal_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Averaged from a row of its own or from the same runs; the fastest first; bytes both ways where recorded."""
    late, early, never = [0.1, 0.2, 0.9], [0.1, 0.9, 0.9], [0.1, 0.1, 0.1]
    rows = [
        row("never", [never, never], [never, never]),
        row("own", [late, late], [late, late]),
        row("pair", [late, late], [late, late]),
        row("pair, averaged", [early, early], [late, late], down=False),
        row("both", [early, late], [never, late]),
    ]
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "results.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(RESULT_TABLES, "RESULTS", tmp_path)
    body = [line.split(" | ") for line in RESULT_TABLES.equal_terms("made").replace("\u00a0", " ").splitlines()[2:]]
    assert [[cell.strip("| ") for cell in cells] for cells in body] == [
        ["pair", "η 0.1, steps 5", "3.0 (3 to 3)", "2.0 (2 to 2)", "20", "", "", "90.0 (3)"],
        ["both", "η 0.1, steps 5", "1 of 2 seeds", "2.5 (2 to 3)", "25", "25", "50", "90.0 (3)"],
        ["own", "η 0.1, steps 5", "3.0 (3 to 3)", "", "30", "30", "60", "90.0 (3)"],
        ["never", "η 0.1, steps 5", "not in 3", "", "", "", "", "10.0 (3)"],
    ]
