"""Curves as results keep them."""

from __future__ import annotations

from ntkfl_experiments.paper.learning import kept

from ntkfl.compare.results import Row


def test_results_keep_every_seed_and_the_search() -> None:
    curve = [0.5, 0.9]
    sent = [[1.0, 2.0]]
    row = Row(
        "x", {"lr": 0.1}, [0], 2, [curve], [curve], sent, sent, sent, [], [], ["diverged"], ["cpu"], [[None, None]],
    )  # fmt: skip
    (one,) = kept([row], {"x": {"searched": {"lr": [0.1]}, "still_at_edge": ["lr"]}})
    assert one["accuracy"] == [curve]
    assert (one["searched"], one["at_edge"], one["failed"], one["steps"]) == ({"lr": [0.1]}, ["lr"], ["diverged"], None)
