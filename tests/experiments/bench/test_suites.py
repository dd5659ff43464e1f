"""Every suite at its smallest: it runs, and what it compares is the same thing. Speed is never asserted."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from ntkfl_experiments.bench import SUITES, BenchRow, Setting
from ntkfl_experiments.bench.accuracy import accuracy
from ntkfl_experiments.bench.chart import chart
from ntkfl_experiments.bench.clients import clients
from ntkfl_experiments.bench.kernel import kernel
from ntkfl_experiments.bench.networks import networks
from ntkfl_experiments.bench.products import products
from ntkfl_experiments.bench.profile import PARTS, REST, Clocks, profile
from ntkfl_experiments.bench.round import round as round_suite
from ntkfl_experiments.bench.scaling import scaling, slope
from ntkfl_experiments.bench.secure_sum import secure_sum
from ntkfl_experiments.bench.start import start
from ntkfl_experiments.bench.wire import wire


def _check(rows: list[BenchRow]) -> None:
    assert rows
    assert rows[0].ratio == 1.0
    assert len({row.what for row in rows}) == len(rows)
    for row in rows:
        assert math.isfinite(row.seconds)
        assert row.seconds > 0
        assert row.ratio is None or row.ratio > 0
        assert row.goal is None  # tiny sizes promise nothing


def test_titles() -> None:
    assert all(suite.__doc__ for suite in SUITES.values())


def test_wire() -> None:
    rows = wire(Setting(quick=True))
    assert [row.what for row in rows] == ["encode", "decode", "seal", "shuffle in memory", "open"]
    assert all(row.seconds > 0 for row in rows)


def test_secure_sum() -> None:
    rows = secure_sum(Setting(quick=True))
    assert len({row.what for row in rows}) == len(rows) == 6
    for row in rows:
        assert row.seconds > 0
        assert row.details["masked_bytes"] < 1.5 * row.details["plain_bytes"]


def test_networks() -> None:
    ours, dense, *clients = networks(Setting(quick=True))
    assert [row.what for row in clients if row.ratio == 1] == ["MLP: Jacobian of a client", "CNN: Jacobian of a client"]
    assert all(row.details["gradients"] > 0 for row in clients if row.ratio == 1)
    assert dense.difference is not None
    assert dense.difference < 1e-5
    assert dense.details["memory_ratio"] > 5
    assert ours.ratio == 1


def test_kernel() -> None:
    rows = kernel(Setting(quick=True))
    _check(rows)
    differences = [row.difference for row in rows if row.difference is not None]
    assert len(differences) == 2
    assert max(differences) < 1e-5


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


def test_profile() -> None:
    """The parts are those of a round, and add up to it."""
    whole, *parts = profile(Setting(quick=True))
    _check([whole, *parts])
    assert sum(part.seconds for part in parts) == pytest.approx(whole.seconds)
    assert sum(part.details["share"] for part in parts) == pytest.approx(1)
    calls = {part.what: part.details["calls"] for part in parts}
    assert calls.keys() <= {REST, *(name for _, _, name in PARTS)}
    assert calls["messages: replies encoded and decoded"] == 2
    assert calls["defences: rows computed again"] == 20  # on a CPU, one client's after the other's
    evolution = next(part for part in parts if part.what == "server: evolution")
    assert evolution.details["products"] > 10
    assert evolution.details["of_peak"] > 0


def test_a_part_inside_another_counts_once() -> None:
    class Owner:
        def outer(self) -> None:
            time.sleep(0.02)
            self.inner()
            self.inner()

        def inner(self) -> None:
            time.sleep(0.05)

    plain, clocks = Owner.inner, Clocks(torch.device("cpu"))
    with clocks.on(((Owner, "outer", "outer"), (Owner, "inner", "inner"))):
        Owner().outer()
    assert clocks.calls == {"outer": 1, "inner": 2}
    assert clocks.seconds["inner"] >= 0.1
    assert clocks.seconds["outer"] < clocks.seconds["inner"]
    assert Owner.inner is plain


def test_products() -> None:
    ours, general, exact = products(Setting(quick=True))
    _check([ours, general, exact])
    for row in (ours, general):
        assert row.difference is not None
        assert row.difference < 1e-5


def test_clients() -> None:
    rows = clients(Setting(quick=True))
    _check(rows)
    compared = [row for row in rows if row.difference is not None]
    assert len(compared) == 1
    for row in compared:
        assert row.difference is not None
        assert row.difference < 1e-5
        assert row.details["float64_difference"] == pytest.approx(0, abs=1e-10)


@pytest.mark.long
def test_scaling() -> None:
    rows = scaling(Setting(quick=True))
    assert [row.what for row in rows] == ["N = 60", "N = 240", "N = 240, out of core"]
    assert all(row.seconds > 0 and row.details["products"] > 10 and row.details["peak"] > 1e7 for row in rows)
    assert "slopes" in rows[1].note


def test_the_slope_of_a_power_law_is_its_exponent() -> None:
    assert slope([1, 10, 300], [5 * x**1.3 for x in (1, 10, 300)]) == pytest.approx(1.3)


def test_accuracy() -> None:
    rows = accuracy(Setting(quick=True))
    _check(rows)
    assert rows[0].what == "NTK-FL, defaults"
    assert "rounds to 50%" in rows[0].note


def test_start() -> None:
    rows = start(Setting(quick=True))
    assert [row.what for row in rows] == ["ntkfl train, first round", "ntkfl --help", "import torch"]
    assert all(row.seconds > 0 and row.details["cpu"] > 0 for row in rows)
