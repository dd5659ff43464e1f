"""Clients that do not answer: which of them a round still draws, and what is said of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from ntkfl.progress import span


def drawn_from(present: Sequence[str], lapsed: Collection[str], dropped: Collection[str], wanted: int) -> list[str]:
    """Of those present (sorted), the ones that a cohort of `wanted` is drawn from: no lapsed and no dropped ones while
    there are enough others. Where there are not, they fill up what is missing: dropped ones first, which are there.
    """
    names = [name for name in present if name not in lapsed and name not in dropped]
    others = sorted((name for name in present if name not in names), key=lambda name: (name in lapsed, name))
    return sorted(names + others[: max(0, wanted - len(names))])


class Absences:
    """Says, once each, which clients have lapsed and which have come back."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._away: dict[str, tuple[float, int]] = {}  # when that was seen, and the last round before

    def note(self, lapsed: Collection[str], round: int) -> None:
        """`round` is the last one that was played."""
        for name in sorted(self._away.keys() - set(lapsed)):
            since, last = self._away.pop(name)
            self._say(f"{name} is back after {span(self._clock() - since)}; it was missing since round {last}")
        for name in sorted(set(lapsed) - self._away.keys()):
            self._away[name] = self._clock(), round
            self._say(f"{name} does not answer and has not called since: it is not waited for until it calls")
