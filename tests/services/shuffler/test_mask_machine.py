"""Secure sums in whatever order they are asked for, with restarts between: a model agrees.

The model knows every seed. What comes out of the shuffler is the sum of the masks of exactly the clients whose vectors
it released, of at least the floor, once; and a seed is in its file only as long as its batch is open.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ntkfl.crypto.masking import pack_words, sum_masks
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.errors import Refused
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.shuffler.store import BatchStore
from tests.services.shuffler.batches import on_disk

NAMES, FLOOR, NUMBERS, SIZE = tuple("abcd"), 2, 3, 60
names = st.sampled_from(NAMES)
seldom = st.sampled_from([False, False, False, True])


class Sum:
    """A batch as it should be: seeds by client while it is open, then whose were released."""

    def __init__(self, announced: Announced) -> None:
        self.announced, self.state = announced, "open"
        self.seeds: dict[str, bytes] = {}
        self.rows: dict[str, bytes] = {}


class Machine(RuleBasedStateMachine):
    released = 0  # in all examples

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.shuffler = self.start()
        self.batches: list[Sum] = []
        self.made = 0  # seeds, all of them different

    def start(self) -> BatchStore:
        return BatchStore(self.folder / "state.sqlite", floor=FLOOR)

    def teardown(self) -> None:
        self.shuffler.close()
        shutil.rmtree(self.folder)

    @property
    def last(self) -> Sum:
        return self.batches[-1]

    def refused(self, what: str, *arguments: object) -> str | None:
        try:
            getattr(self.shuffler, what)(*arguments)
        except Refused as refused:
            return refused.reason
        return None

    @initialize(far=st.sampled_from([True, True, False]))
    def begin(self, far: bool) -> None:
        """Most histories begin with a sum that was released: rules drawn alone seldom get there."""
        if far:
            self.open(FLOOR)
            self.submit(list(NAMES))
            self.release()

    @precondition(lambda self: not self.batches or self.last.state != "open")
    @rule(least=st.integers(FLOOR, 3))
    def open(self, least: int) -> None:
        said = Announced.of(BatchKey(len(self.batches) + 1, 0), b"%d" % len(self.batches))
        self.shuffler.open(Batch(said.key, len(NAMES), 1, SIZE, least, NUMBERS), said.digest)
        self.batches.append(Sum(said))
        self.least = least

    @precondition(lambda self: self.batches)
    @rule(clients=st.lists(names, min_size=2, max_size=6))
    def submit(self, clients: list[str]) -> None:
        for client in clients:
            self.made += 1
            bytes_of = hashlib.shake_256(b"%d" % self.made).digest(32 + SIZE)
            self._submit(client, bytes_of[:32], bytes_of[32:])

    def _submit(self, client: str, seed: bytes, row: bytes) -> None:
        last = self.last
        expected = None
        if last.state != "open":
            expected = {"released": "late", "forgotten": "late"}.get(last.state, last.state)
        elif client in last.seeds:
            expected = "replayed"
        assert self.refused("submit", client, last.announced, [row], seed) == expected
        if expected is None:
            last.seeds[client], last.rows[client] = seed, row

    @precondition(lambda self: self.batches)
    @rule()
    def release(self) -> None:
        last = self.last
        ready = len(last.seeds) >= self.least
        expected = None if ready or last.state == "released" else "not-ready"
        expected = {"cancelled": "cancelled", "forgotten": "forgotten"}.get(last.state, expected)
        if expected is not None:
            assert self.refused("release", last.announced.key) == expected
            assert self.refused("masks", last.announced.key) in (expected, "forgotten")
            return
        assert sorted(self.shuffler.release(last.announced.key)) == sorted(last.rows.values())
        last.state = "released"
        Machine.released += 1
        masks = sum_masks(last.seeds.values(), last.announced, NUMBERS)
        assert self.shuffler.masks(last.announced.key) == pack_words(masks)

    @precondition(lambda self: self.batches)
    @rule(what=st.sampled_from(["forget", "cancel"]), really=seldom)
    def end(self, what: str, really: bool) -> None:
        last = self.last
        if what == "cancel" and not really:
            return
        refused = self.refused(what, last.announced.key)
        assert (refused == "not-ready") == (what == "forget" and last.state == "open")
        if refused is None:
            last.state = "cancelled" if what == "cancel" or last.state == "cancelled" else "forgotten"

    @rule()
    def restart(self) -> None:
        self.shuffler.close()
        self.shuffler = self.start()

    @invariant()
    def seeds_are_kept_as_long_as_they_are_needed(self) -> None:
        content = on_disk(self.folder / "state.sqlite")
        for batch in self.batches:
            for seed in batch.seeds.values():
                assert (seed in content) == (batch.state == "open")


def test_a_model_agrees() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=30, stateful_step_count=20, deadline=None))
    assert Machine.released  # it gets that far
