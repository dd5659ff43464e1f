"""Labels of logarithmic axes keep apart, whatever the axis spans; a legend is whole, however many runs it names."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ntkfl.compare.results import Row
from ntkfl.report.curves import label_ticks, plot_curves, tick_label


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


@pytest.mark.parametrize(("runs", "letters"), [(1, 3), (5, 12), (25, 30), (25, 60), (3, 150)])
def test_a_legend_lies_inside_the_picture(
    runs: int, letters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = [[0.5, 0.6]]
    rows = [
        Row(f"{i:02d}, {'a run of ours ' * 11}"[:letters], {}, [0], 2, one, one, one, one, one, [], [], [""], [], [])
        for i in range(runs)
    ]
    drawn: list[Figure] = []
    save = Figure.savefig

    def kept(figure: Figure, *of: object, **options: object) -> None:
        drawn.append(figure)
        save(figure, *of, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    plot_curves(rows, "many", [], tmp_path / "curves.png")
    (figure,) = drawn
    legend = figure.legends[0].get_window_extent()
    assert len(figure.legends[0].get_texts()) == runs
    assert figure.bbox.x0 <= legend.x0 < legend.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= legend.y0 < legend.y1 <= min(axis.get_tightbbox().y0 for axis in figure.axes)
    assert min(axis.get_window_extent().height for axis in figure.axes) > 0.4 * figure.bbox.height
