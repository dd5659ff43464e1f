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
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.shuffler.store import BatchStore

NAMES = tuple("abcde")
FLOOR = 2
numbers = st.integers(0, 3)
row = st.integers(0, 40).map(lambda number: b"%04d" % number)  # few, so that some come twice
seldom = st.sampled_from([False, False, False, True])
odd_rows = st.lists(row | st.just(b"odd"), max_size=4)


class Model:
    """A batch as it should be."""

    def __init__(self, batch: Batch, asked: set[str] | None) -> None:
        self.batch, self.asked, self.state = batch, asked, "open"  # None: whoever comes first
        self.rows: dict[str, list[bytes]] = {}
        self.released: list[bytes] = []
        self.answered: set[str] | None = None  # once it is released

    @property
    def announced(self) -> Announced:
        return announced(self.batch)


def announced(batch: Batch) -> Announced:
    """The same for the same batch."""
    return Announced.of(batch.key, repr(batch).encode())


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.shuffler = self.start()
        self.models: dict[BatchKey, Model] = {}
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

    def pick(self, which: int) -> tuple[BatchKey, Model]:
        return list(self.models.items())[which % len(self.models)]

    @rule(round=st.integers(0, 3), clients=st.integers(1, 5), least=st.integers(1, 3), revoked=seldom)
    def open(self, round: int, clients: int, least: int, revoked: bool) -> None:
        self._open(BatchKey(round, 0), clients, least, revoked)

    @rule(which=numbers, exchange=st.integers(1, 2), revoked=seldom)
    def go_on(self, which: int, exchange: int, revoked: bool) -> None:
        """A later exchange of a round that was opened."""
        key, model = self.pick(which)
        self._open(BatchKey(key.round, exchange), model.batch.clients, 2, revoked)

    def _open(self, key: BatchKey, clients: int, least: int, revoked: bool) -> None:
        """With one client more revoked, now and then: it is out from the next batch that opens."""
        batch, out = Batch(key, clients, 2, 4, least), {*self.revoked, *NAMES[:revoked]}
        _, reason = self.ask("open", batch, announced(batch).digest, None, out)
        first = self.models.get(BatchKey(key.round, 0))
        if least > clients:
            assert reason == "terms"
        elif least < FLOOR:
            assert reason == "below-floor"
        elif key in self.models:
            same = self.models[key].batch == batch
            assert reason == ("other-announcement" if not same else None)
        elif any(other > key for other in self.models):
            assert reason == "backwards"
        elif key.exchange and (first is None or first.answered is None):
            assert reason == "not-begun"
        else:
            assert reason is None
            self.models[key] = Model(batch, first.answered if first is not None else None)
        if reason is None:
            self.revoked = out

    @initialize(size=st.integers(2, 5))
    def begin(self, size: int) -> None:
        self.open(1, size, 2, False)

    @rule(which=numbers, client=st.sampled_from(NAMES), rows=st.lists(row, unique=True, min_size=2, max_size=2))
    def submit_well(self, which: int, client: str, rows: list[bytes]) -> None:
        self.submit(which, client, rows)

    @rule(which=numbers, first=row)
    def submit_the_rest(self, which: int, first: bytes) -> None:
        for i, client in enumerate(sorted(self.pick(which)[1].asked or NAMES)):
            self.submit(which, client, [first if i == 2 else b"%03d%c" % (i, 65 + which), b"%03d%c" % (i, 97 + which)])

    @rule(which=numbers, client=st.sampled_from([*NAMES, "stranger"]), rows=odd_rows)
    def submit(self, which: int, client: str, rows: list[bytes]) -> None:
        _, model = self.pick(which)
        _, reason = self.ask("submit", client, model.announced, rows)
        there = {row for sent in model.rows.values() for row in sent}
        if client in self.revoked:
            assert reason == "revoked"
        elif model.state != "open":
            assert reason == {"released": "late", "forgotten": "late"}.get(model.state, model.state)
        elif client in model.rows:
            assert reason == "replayed"
        elif client not in model.asked if model.asked is not None else len(model.rows) == model.batch.clients:
            assert reason == "not-asked"
        elif len(rows) != 2:
            assert reason == "row-count"
        elif any(len(row) != 4 for row in rows):
            assert reason == "row-size"
        elif len(set(rows)) < len(rows) or there & set(rows):
            assert reason == "copied"
        else:
            assert reason is None
            model.rows[client] = rows

    @rule(which=numbers, client=st.sampled_from(NAMES), rows=odd_rows)
    def answer_another(self, which: int, client: str, rows: list[bytes]) -> None:
        """Whoever heard another announcement under the same key."""
        other = Announced(self.pick(which)[0], bytes(32))
        expected = "revoked" if client in self.revoked else "other-announcement"
        assert self.ask("submit", client, other, rows) == (None, expected)

    @rule(which=numbers)
    def release(self, which: int) -> None:
        key, model = self.pick(which)
        answer, reason = self.ask("release", key)
        if model.state == "open" and self.is_ready(model):
            assert isinstance(answer, list)
            assert len(model.rows) >= model.batch.min_clients >= FLOOR
            assert Counter(answer) == Counter(row for sent in model.rows.values() for row in sent)
            model.state, model.released = "released", answer
            if not any(other.round > key.round for other in self.models):
                model.answered = set(model.rows)
        elif model.state == "released":
            assert answer == model.released
        else:
            assert reason == {"open": "not-ready"}.get(model.state, model.state)

    @rule(which=numbers)
    def forget(self, which: int) -> None:
        key, model = self.pick(which)
        _, reason = self.ask("forget", key)
        assert reason == ("not-ready" if model.state == "open" else None)
        if model.state == "released":
            model.state = "forgotten"

    @rule(which=numbers, really=seldom)
    def cancel(self, which: int, really: bool) -> None:
        if not really:
            return
        key, model = self.pick(which)
        assert self.ask("cancel", key) == (None, None)
        model.state = "cancelled"

    @rule()
    def restart(self) -> None:
        self.shuffler.close()
        self.shuffler = self.start()

    @invariant()
    def status_agrees(self) -> None:
        for key, model in self.models.items():
            status = self.shuffler.status(key)
            if model.state == "open":
                assert status.state == ("ready" if self.is_ready(model) else "open")
                assert (status.clients, status.rows) == (len(model.rows), None)
            elif model.state == "cancelled":
                assert (status.state, status.clients, status.rows) == ("cancelled", 0, None)
            else:
                assert (status.state, status.rows) == ("released", len(model.released))

    def is_ready(self, model: Model) -> bool:
        if model.batch.key.exchange:  # with exactly those of the first exchange, or not at all
            return set(model.rows) == model.asked and len(model.rows) >= model.batch.min_clients
        return len(model.rows) >= model.batch.min_clients


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
