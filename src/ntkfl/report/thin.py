"""Fewer rounds of long runs, so that a page of many stays small, with nothing that its tables say changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

AMOUNTS = ("uplink_bytes", "downlink_bytes", "seconds")  # summed over the rounds left out; all else is of its round


def thin(view: dict[str, Any], most: int) -> dict[str, Any]:
    """The view with about `most` of its rounds: the first, the last, every new best, and others evenly by ratio.

    New bests are all kept, so that the best accuracy and the first round to reach any target stay exact.
    """
    count = len(view["rounds"])
    if count <= most:
        return view
    keep = sorted({0, count - 1, *_bests(view["series"].get("test_accuracy", [])), *_by_ratio(count, most)})
    series = {
        name: _sums(values, keep) if name in AMOUNTS else [values[i] for i in keep]
        for name, values in view["series"].items()
    }
    return view | {"rounds": [view["rounds"][i] for i in keep], "series": series, "of": count}


def _bests(values: Sequence[float | None]) -> list[int]:
    best, found = float("-inf"), []
    for i, value in enumerate(values):
        if value is not None and value > best:
            best = value
            found.append(i)
    return found


def _by_ratio(count: int, most: int) -> list[int]:
    """Early rounds one by one, later ones ever further apart."""
    return [round(count ** (i / (most - 1))) - 1 for i in range(most)]


def _sums(values: Sequence[float | None], keep: Sequence[int]) -> list[float]:
    starts = [0, *(i + 1 for i in keep[:-1])]
    return [sum(v or 0 for v in values[a : b + 1]) for a, b in zip(starts, keep, strict=True)]
