"""The table: verdicts by hand, and a small one made, kept and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ntkfl.audit import tradeoff
from ntkfl.audit.tradeoff_table import COLUMNS, TradeoffRow, markdown, verdict, write
from ntkfl.compare.spec import Comparison
from ntkfl.privacy.accounting import SIMULATED


def _row(label: str, name: str, value: float) -> TradeoffRow:
    leaks = {"picture": ((value, 0.4), (value, 0.4))}
    return TradeoffRow(label, {"name": name}, (0, 1), (0.8, 0.9), (10.0, 12.0), leaks, (), ())


def test_verdicts_are_against_the_first_of_the_same_kind() -> None:
    rows = [_row("open", "ntk-fl", 1.0), _row("averaged", "fedavg", 0.5), _row("cp", "cp-ntk-fl", 0.7)]
    rows += [_row("hidden", "ntk-fl", 0.41), _row("same", "ntk-fl", 0.98), _row("noisy", "fedavg", 0.49)]
    said = {row.label: verdict(row, rows, "picture") for row in rows}
    assert said == {
        "open": "", "averaged": "", "cp": "reduced", "hidden": "stopped", "same": "unchanged", "noisy": "reduced"
    }  # fmt: skip
    assert verdict(rows[2], rows, "label") == ""  # not attacked
    table = markdown(rows)
    assert "| cp | 85.0 ± 7.1 | 11 | none | 0.70 ± 0.00 (guess 0.40) reduced |" in table
    assert len(table.splitlines()) == 8


PRIVATE = {"name": "private-sums", "secure_sum": True, "epsilon": 1.0, "budget_rounds": 2, "noise_clients": 3}


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison(
        name="small",
        rounds=2,
        clients_per_round=3,
        data={"dataset": "digits", "clients": 6, "alpha": 0.5},
        model={"hidden": (16,)},
        methods=[
            {"label": "open", "method": {"name": "ntk-fl", "subsample_rate": 0.2, "steps": (50.0, 200.0)}},
            {"label": "averaged", "method": {"name": "fedavg", "local_steps": 2, "clip": 1.0, "noise": 1.0}},
            {"label": "sums", "method": {"name": "sum-ntk-fl"}},
            {"label": "private", "clients_per_round": 4, "method": PRIVATE},
        ],
    )


def test_a_small_table_is_made_once_and_written(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    rows = tradeoff.run(comparison, tmp_path / "cells", said.append)
    assert said == [f"{label}, seed 0" for label in ("open", "averaged", "sums", "private")]
    again: list[str] = []
    assert tradeoff.run(comparison, tmp_path / "cells", again.append) == rows
    assert again == []
    opened, averaged, summed, private = rows
    of_sums = {"member, by sums", "member, by alignment"}
    assert set(opened.leaks) == set(COLUMNS) - of_sums
    # Of a secure sum the aggregator is attacked by what it has, the total, and with the help of a minority.
    assert set(private.leaks) == {"picture", "picture, with a client", "class mix", "member, by loss"} | of_sums
    assert set(summed.leaks) >= set(private.leaks) - {"member, by loss"}
    for column in of_sums:
        hidden = private.finding(column)
        assert hidden is not None
        assert abs(hidden.mean) < 0.1
    assert private.epsilon == (("the aggregator, 2 rounds", pytest.approx(1.0, rel=1e-2)),)
    assert not opened.epsilon
    assert averaged.epsilon[-1][0] == "who sees all 2 models"
    write(tmp_path / "out", comparison, rows, "ntkfl audit --tradeoff small.toml")
    document = json.loads((tmp_path / "out/results.json").read_text())
    assert [row["label"] for row in document["rows"]] == ["open", "averaged", "sums", "private"]
    assert all(SIMULATED in document["rows"][n]["assumptions"] for n in (1, 3))
    table = (tmp_path / "out/table.md").read_text()
    assert "1 per record in all" in table
    assert "ε (simulated)" in table
    assert (tmp_path / "out/tradeoff.png").stat().st_size > 10_000
