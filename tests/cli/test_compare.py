"""What a log of a comparison gets to read while its runs go on."""

from __future__ import annotations

import io

from rich.console import Console

from ntkfl.cli.compare import tables
from ntkfl.compare.results import Reached, Row
from ntkfl.compare.spec import Comparison


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_table_that_fits_is_not_cut_at_the_right() -> None:
    """Two targets with bytes both ways, in 80 columns: headers are wrapped, cells are whole."""
    entries = [{"label": "NTK-FL from sums", "method": {"name": "fedavg"}}]
    comparison = Comparison(name="x", seeds=(0, 1), targets=(0.8, 0.9), methods=entries)
    reached = [Reached(0.8, [2, 2], [0.32] * 2, [0.32] * 2), Reached(0.9, [3, 3], [1.2] * 2, [0.5] * 2)]
    curves = [[0.5], [0.5]]
    row = Row(
        "NTK-FL from sums", {"name": "fedavg"}, [0, 1], 8, curves, curves, [], [], curves, reached, [], ["", ""], [], []
    )
    text = io.StringIO()
    console = Console(file=text, width=80)
    _, (_, table), _ = tables(comparison, [row])
    console.print(table)
    assert "0.32 + 0.32 = 0.64" in text.getvalue()
    assert "1.2 + 0.5 = 1.7" in text.getvalue()
    words = text.getvalue().split()
    assert words.count("down") == 2
    assert words.count("90%") == 2
