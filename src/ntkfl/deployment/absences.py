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
    """Says, once each, which clients have lapsed and which have come back; where no names are told, how many."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._away: dict[str, tuple[float, int]] = {}  # when that was seen, and the last round before
        self._count, self._since = 0, (0.0, 0)  # of those without a name

    def note(self, lapsed: Collection[str], away: int, round: int) -> None:
        """`away` is how many have lapsed, and `round` the last one that was played."""
        self._note_count(max(0, away - len(lapsed)), round)
        for name in sorted(self._away.keys() - set(lapsed)):
            since, last = self._away.pop(name)
            self._say(f"{name} is back after {span(self._clock() - since)}; it was missing since round {last}")
        for name in sorted(set(lapsed) - self._away.keys()):
            self._away[name] = self._clock(), round
            self._say(f"{name} does not answer and has not called since: it is not waited for until it calls")

    def _note_count(self, count: int, round: int) -> None:
        change, self._count = count - self._count, count
        if change > 0:
            self._since = self._clock(), round
            self._say(f"clients that do not answer and have not called since: {count}; not waited for until they call")
        elif change < 0:
            since, last = self._since
            away = span(self._clock() - since)
            self._say(f"clients that are back after {away}: {-change}; they were missing since round {last}")
