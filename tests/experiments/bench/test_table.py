"""Figures as people read them."""

from __future__ import annotations

import io

import pytest
from ntkfl_experiments.bench import BenchRow
from ntkfl_experiments.bench.machine import Machine
from ntkfl_experiments.bench.table import document, duration, fraction_of_peak, table, times
from rich.console import Console

MACHINE = Machine("A processor", 2, 2, "cpu", load=0.1, gflops=100.0, bandwidth=10.0)
ROWS = [
    BenchRow("ours", 0.5, 1.0, flop=25e9),
    BenchRow(
        "theirs, which has a long name and a long note beside",
        150.0,
        300.0,
        100.0,
        None,
        1.5e-6,
        "scaled from N=500 " * 5,
    ),
    BenchRow("another of ours", 1.0, 1.0),
]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(1.234, "1.23 s"), (0.0456, "45.6 ms"), (7.89e-4, "789 µs"), (252.0, "4.2 min"), (99.96, "100 s")],
)
def test_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_times() -> None:
    assert [times(r) for r in (0.123, 4.56, 45.67, 1234.5)] == ["0.12×", "4.56×", "45.7×", "1,234×"]


def test_fraction_of_peak() -> None:
    assert fraction_of_peak(ROWS[0], MACHINE) == 0.5
    assert fraction_of_peak(ROWS[1], MACHINE) is None


def test_fits_eighty_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(table("kernel: a title", ROWS, MACHINE))
    lines = out.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "…" not in out.getvalue()
    text = " ".join(out.getvalue().split())
    for piece in ("500 ms ours 50%", "2.5 min 300×", "goal 100×", "1.5e-06"):
        assert piece in text


def test_the_share_of_the_peak_has_a_column_where_a_row_has_one() -> None:
    def shown(rows: list[BenchRow]) -> str:
        out = io.StringIO()
        Console(file=out, width=80).print(table("a title", rows, MACHINE))
        return out.getvalue()

    assert "of peak" in shown(ROWS)
    without = shown(ROWS[1:])
    assert "of peak" not in without
    for piece in ("time to ours", "2.5 min 300× goal 100×"):
        assert piece in " ".join(without.split())


def test_document() -> None:
    content = document(["ntkfl", "bench", "a b"], True, MACHINE, {"kernel": ROWS})
    assert content["command"] == "ntkfl bench 'a b'"
    assert content["machine"]["gflops"] == 100.0
    assert [row["suite"] for row in content["rows"]] == ["kernel"] * 3
    assert content["rows"][1]["ratio"] == 300.0


def test_a_busy_machine_says_so() -> None:
    assert not any("busy" in line for line in MACHINE.lines)
    busy = Machine("A processor", 2, 2, "cpu", load=3.0, gflops=100.0, bandwidth=10.0)
    assert any("busy" in line for line in busy.lines)
    assert busy.at_least(200.0).gflops == 200.0
    assert busy.at_least(50.0).gflops == 100.0
