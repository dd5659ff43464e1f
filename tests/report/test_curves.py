"""Labels of logarithmic axes keep apart, whatever the axis spans."""

from __future__ import annotations

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ntkfl.report.curves import label_ticks, tick_label


@pytest.mark.parametrize("low", [1e-5, 0.7, 3000.0])
@pytest.mark.parametrize("decades", [0.1, 0.5, 1.3, 2.9, 3.1, 4.1, 4.3, 6.0, 9.0])
def test_labels_keep_apart(low: float, decades: float) -> None:
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axis = figure.subplots(1, 3)[1]
    axis.set_xscale("log")
    axis.plot([low, low * 10**decades], [0, 1])
    label_ticks(axis)
    canvas.draw()
    left, right = axis.get_xlim()
    shown = [label for label in axis.get_xticklabels() if left <= label.get_position()[0] <= right and label.get_text()]
    boxes = [label.get_window_extent() for label in shown]
    assert len(boxes) >= (2 if decades >= 0.5 else 0)
    for one, next_one in itertools.pairwise(boxes):
        assert next_one.x0 - one.x1 > 4  # dots: a gap one can see


def test_labels_are_plain_numbers_where_those_are_short() -> None:
    numbers = [0.0001, 0.001, 0.5, 20, 100_000, 1_000_000, 2e7]
    assert [tick_label(value, None) for value in numbers] == [
        "$10^{-4}$", "0.001", "0.5", "20", "$10^{5}$", "$10^{6}$", "$2·10^{7}$",
    ]  # fmt: skip
