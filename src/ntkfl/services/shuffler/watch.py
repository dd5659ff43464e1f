"""How far the shuffler is, for its operator: once a second into its metrics, and a line per round. It names nobody."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from ntkfl.crypto.row_frames import BatchKey
from ntkfl.errors import Refused
from ntkfl.services.log import log
from ntkfl.services.metrics import METRICS
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.shuffler.store import Shuffler

_LOOK_S = 1.0


@dataclass
class ShufflerWatch:
    """Looks at the shuffler's state, for metrics and readiness."""

    shuffler: Shuffler
    _asked: dict[BatchKey, int] = field(default_factory=dict)  # of the newest batch
    _round_answered: int = 0  # clients that later exchanges of the round wait for
    _ended: BatchKey | None = None
    _problem: Refused | None = None
    _lapsed: int = 0

    def ready(self) -> None:
        """`Refused` while the state cannot be used, as it was found at the last look."""
        if self._problem is not None:
            raise self._problem

    def opened(self, batch: Batch) -> None:
        self._asked = {batch.key: self._round_answered if batch.key.exchange else len(batch.cohort)}

    def released(self, key: BatchKey) -> None:
        if key == self._ended:  # the aggregator asks again for what it did not get whole
            return
        answered, self._ended = self.shuffler.status(key).clients, key
        if key.exchange == 0:
            self._round_answered = answered
        METRICS.count("ntkfl_batches_total", state="released")
        level = logging.INFO if key.exchange == 0 else logging.DEBUG
        log(f"round {key.round}: released the rows of {answered}{self._of(key)} clients", level=level)

    def cancelled(self, key: BatchKey, answered: int) -> None:
        METRICS.count("ntkfl_batches_total", state="cancelled")
        log(f"round {key.round}: cancelled, {answered}{self._of(key)} clients had answered", level=logging.WARNING)

    def _of(self, key: BatchKey) -> str:
        return f" of {self._asked[key]}" if key in self._asked else ""

    def look(self) -> None:
        try:
            present = {role: self.shuffler.clients(role) for role in ("client", "evaluator")}
            lapsed = {role: self.shuffler.lapsed(role) for role in present}
            _, key = self.shuffler.latest()
            if key is not None and key in self._asked:
                found = self.shuffler.status(key)
                METRICS.set("ntkfl_batch_asked", self._asked[key])
                METRICS.set("ntkfl_batch_answered", found.clients)
            self._problem = None
        except Refused as problem:
            self._problem = problem
            return
        self._note_lapsed(sum(map(len, lapsed.values())))
        for role, names in present.items():
            METRICS.set("ntkfl_present", len(names), role=role)
            METRICS.set("ntkfl_lapsed", len(lapsed[role]), role=role)
        if key is not None:
            METRICS.set("ntkfl_batch_round", key.round)
            METRICS.set("ntkfl_batch_exchange", key.exchange)

    def _note_lapsed(self, count: int) -> None:
        """A line, without names, where somebody is not waited for any more, or is again."""
        if count != self._lapsed:
            change, self._lapsed = count - self._lapsed, count
            if change > 0:
                log(f"{change} that did not answer and have not called since are not waited for", level=logging.WARNING)
            else:
                log(f"{-change} that were not waited for have called again")

    async def keep_looking(self) -> None:
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(_LOOK_S)
