"""Every suite at its smallest: it runs, and what it compares is the same thing. Speed is never asserted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from ntkfl_experiments.bench import BenchRow, Setting
from ntkfl_experiments.bench.accuracy import accuracy
from ntkfl_experiments.bench.chart import chart
from ntkfl_experiments.bench.round import round as round_suite
from ntkfl_experiments.bench.scaling import scaling


def _check(rows: list[BenchRow]) -> None:
    assert rows
    assert rows[0].ratio == 1.0
    assert len({row.what for row in rows}) == len(rows)
    for row in rows:
        assert math.isfinite(row.seconds)
        assert row.seconds > 0
        assert row.ratio is None or row.ratio > 0
        assert row.goal is None  # tiny sizes promise nothing


def test_round(tmp_path: Path) -> None:
    rows = round_suite(Setting(quick=True))
    _check(rows)
    explicit = next(row for row in rows if "explicit steps" in row.what)
    assert explicit.details.keys() == {"difference at t = 500", "difference at t = 600"}
    assert max(explicit.details.values()) < 0.01
    dense = [row for row in rows if row.what.startswith("all dense")]
    assert [row.difference is not None and row.difference < 1e-4 for row in dense] == [True, True]
    assert all("scaled from N=20" in row.note for row in dense)
    memory = next(row.details for row in rows if "peak_bytes" in row.details)
    assert 0 < memory["added_bytes"] < memory["peak_bytes"] < 2e9
    chart(tmp_path / "chart.png", {"round": rows})
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_scaling() -> None:
    rows = scaling(Setting(quick=True))
    assert [row.what for row in rows] == ["N = 60", "N = 240"]
    assert all(row.seconds > 0 and row.details["products"] > 10 and row.details["peak"] > 1e7 for row in rows)
    assert "slopes" in rows[1].note


def test_accuracy() -> None:
    rows = accuracy(Setting(quick=True))
    _check(rows)
    assert rows[0].what == "NTK-FL, defaults"
    assert "rounds to 50%" in rows[0].note
