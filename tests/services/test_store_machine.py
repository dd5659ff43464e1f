"""Whatever is asked of a shuffler, in whatever order and with restarts between: a model of its promises agrees."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.errors import Refused
from ntkfl.services.announcement import Batch
from ntkfl.services.store import BatchStore, Released

NAMES = ("client-a", "client-b", "client-c", "client-d")
FLOOR = 2
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # no disk to wait for at every step
keys = st.none() | st.builds(BatchKey, st.integers(0, 3), st.integers(0, 2))  # none: the newest batch's
row = st.integers(0, 40).map(lambda number: b"row-%04d" % number)  # few, so that some come twice
seldom = st.sampled_from([False, False, False, True])
least = st.sampled_from([2, 2, 3, 1])
odd_rows = st.lists(row | st.just(b"odd"), max_size=4)


class Model:
    """The newest batch as it should be."""

    def __init__(self, batch: Batch, asked: set[str] | None) -> None:
        self.batch, self.asked, self.state = batch, asked, "open"  # None: whoever comes first
        self.rows: dict[str, list[bytes]] = {}
        self.released: list[bytes] = []

    @property
    def ready(self) -> bool:
        if self.asked is not None and set(self.rows) != self.asked:  # with exactly those of the first, or not at all
            return False
        return len(self.rows) >= self.batch.min_clients


def announced(batch: Batch) -> Announced:
    """The same for the same batch."""
    return Announced.of(batch.key, repr(batch).encode())


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.shuffler = self.start()
        self.model = Model(Batch(BatchKey(0, 0), 2, 2, 8, 2), None)
        self.answered: dict[int, set[str]] = {}  # by round, once its first exchange is released
        self.revoked: set[str] = set()

    def start(self) -> BatchStore:
        return BatchStore(self.folder / "state.sqlite", floor=FLOOR)

    def teardown(self) -> None:
        self.shuffler.close()
        shutil.rmtree(self.folder)

    def ask(self, what: str, *arguments: object) -> tuple[object, str | None]:
        """(the answer, None) or (None, the reason for refusal)."""
        try:
            return getattr(self.shuffler, what)(*arguments), None
        except Refused as refused:
            return None, refused.reason

    def stale(self, key: BatchKey) -> str | None:
        """Why nothing can be done with a batch of this key."""
        newest = self.model.batch.key
        return "unknown-batch" if key > newest else "late" if key < newest else None

    @initialize(size=st.integers(2, 4))
    def begin(self, size: int) -> None:
        self._open(BatchKey(1, 0), size, 2, False)

    @rule(ahead=st.sampled_from([1, 1, 0, -1]), clients=st.integers(2, 4), least=least, revoked=seldom, early=seldom)
    def open(self, ahead: int, clients: int, least: int, revoked: bool, early: bool) -> None:
        """A round, mostly when the one before is over."""
        if not early:
            self.play()
        self._open(BatchKey(self.model.batch.key.round + ahead, 0), clients, least, revoked)

    @rule(ahead=st.integers(0, 2), revoked=seldom, early=seldom)
    def go_on(self, ahead: int, revoked: bool, early: bool) -> None:
        """A later exchange of the round, or the same once more."""
        if not early:
            self.play()
        round, exchange = self.model.batch.key
        self._open(BatchKey(round, exchange + ahead), self.model.batch.clients, self.model.batch.min_clients, revoked)

    def play(self) -> None:
        """All that are asked send, and the batch is released."""
        for i, client in enumerate(sorted(self.model.asked or NAMES)):
            self.submit(None, client, [b"row-%03dA" % i, b"row-%03da" % i])
        self.release()

    def _open(self, key: BatchKey, clients: int, least: int, revoked: bool) -> None:
        """With one client more revoked, now and then: it is out from the next batch that opens."""
        batch, out = Batch(key, clients, 2, 8, least), {*self.revoked, *NAMES[:revoked]}
        _, reason = self.ask("open", batch, announced(batch).digest, None, out)
        newest = self.model.batch
        if least > clients:
            assert reason == "terms"
        elif least < FLOOR:
            assert reason == "below-floor"
        elif key == newest.key and newest.key.round:
            assert reason == (None if newest == batch else "other-announcement")
        elif key < newest.key:
            assert reason == "backwards"
        elif key.exchange and key.round not in self.answered:
            assert reason == "not-begun"
        else:
            assert reason is None
            self.model = Model(batch, self.answered[key.round] if key.exchange else None)
        if reason is None:
            self.revoked = out

    @rule(client=st.sampled_from(NAMES), rows=st.lists(row, unique=True, min_size=2, max_size=2))
    def submit_well(self, client: str, rows: list[bytes]) -> None:
        self.submit(None, client, rows)

    @rule(key=keys, client=st.sampled_from([*NAMES, "stranger"]), rows=odd_rows)
    def submit(self, key: BatchKey | None, client: str, rows: list[bytes]) -> None:
        key = key or self.model.batch.key
        model = self.model
        taken, reason = self.ask("submit", client, Announced(key, announced(model.batch).digest), rows)
        there = {row for sent in model.rows.values() for row in sent}
        if stale := self.stale(key):
            assert reason == stale
        elif client in self.revoked:
            assert reason == "revoked"
        elif model.state != "open":
            assert reason == "late"
        elif client in model.rows:
            assert (taken, reason) == (False, None)
        elif client not in model.asked if model.asked is not None else len(model.rows) == model.batch.clients:
            assert reason == "not-asked"
        elif len(rows) != 2:
            assert reason == "row-count"
        elif any(len(row) != 8 for row in rows):
            assert reason == "row-size"
        elif len(set(rows)) < len(rows) or there & set(rows):
            assert reason == "copied"
        else:
            assert (taken, reason) == (True, None)
            model.rows[client] = rows

    @rule(client=st.sampled_from(NAMES), rows=odd_rows)
    def answer_another(self, client: str, rows: list[bytes]) -> None:
        """Whoever heard another announcement under the same key."""
        other = Announced(self.model.batch.key, bytes(32))
        expected = "revoked" if client in self.revoked else "other-announcement"
        assert self.ask("submit", client, other, rows) == (None, expected)

    @rule(key=keys)
    def release_another(self, key: BatchKey | None) -> None:
        if key and (stale := self.stale(key)):
            assert self.ask("release", key) == self.ask("discard", key) == (None, stale)

    @rule()
    def release(self) -> None:
        model = self.model
        answer, reason = self.ask("release", model.batch.key)
        if model.state == "open" and model.ready:
            assert isinstance(answer, Released)
            assert len(model.rows) >= model.batch.min_clients >= FLOOR
            assert Counter(answer.rows) == Counter(row for sent in model.rows.values() for row in sent)
            model.state, model.released = "released", answer.rows
            if model.batch.key.exchange == 0:
                self.answered[model.batch.key.round] = set(model.rows)
        elif model.state == "released":
            assert isinstance(answer, Released)
            assert answer.rows == model.released
        else:
            assert reason == ("not-ready" if model.state == "open" else "late")

    @rule(really=seldom)
    def discard(self, really: bool) -> None:
        if really:
            assert self.ask("discard", self.model.batch.key) == (None, None)
            self.model.state = "over"

    @invariant()
    def the_file_keeps_no_more_than_it_must(self) -> None:
        """Names of senders until the release, rows until the batch is over."""
        content = b"".join(file.read_bytes() for file in self.folder.iterdir())
        senders = self.model.rows if self.model.state == "open" else ()
        assert {name for name in NAMES if name.encode() in content} <= {*self.revoked, *senders}
        assert b"row-" not in content or (self.model.rows and self.model.state != "over")

    @rule()
    def restart(self) -> None:
        self.shuffler.close()
        self.shuffler = self.start()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
