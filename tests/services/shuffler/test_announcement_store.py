"""What passes through the shuffler: announcements, presence, reports."""

from __future__ import annotations

from pathlib import Path

from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.services.shuffler.store import Shuffler
from tests.services.shuffler.batches import KEY, batch, refusal


def test_an_announcement_and_its_batch_are_one(tmp_path: Path) -> None:
    shuffler = Shuffler(tmp_path / "state.sqlite", floor=3)
    with refusal("below-floor"):
        shuffler.publish(b"too few", KEY, batch(min_clients=2))
    assert (shuffler.announcement(0), shuffler.latest()) == (None, (0, None))
    assert shuffler.publish(b"enough", KEY, batch(min_clients=3)) == 1
    assert shuffler.publish(b"enough", KEY, batch(min_clients=3)) == 1
    assert shuffler.latest() == (1, KEY)
    shuffler.close()
    again = Shuffler(tmp_path / "state.sqlite", floor=3)
    assert (again.announcement(0), again.latest()) == ((1, b"enough"), (1, KEY))
    again.close()


def test_reports_are_evaluators_and_bounded() -> None:
    shuffler = Shuffler()

    def asked(number: int) -> Announced:
        """The question of a round, which is announced."""
        key, signed = BatchKey(number, 255), f"evaluate {number}".encode()
        shuffler.publish(signed, key)
        return Announced.of(key, signed)

    first = asked(1)
    shuffler.present("ada", "client")
    for name in ("eva", "evi"):
        shuffler.present(name, "evaluator")
    for name in ("ada", "stranger"):
        with refusal("not-evaluator"):
            shuffler.report(name, first, b"counts")
    for size in (0, (1 << 16) + 1):
        with refusal("too-large"):
            shuffler.report("eva", first, bytes(size))
    with refusal("unknown-batch"):
        shuffler.report("eva", Announced.of(BatchKey(2, 255), b"evaluate 2"), b"counts")
    with refusal("other-announcement"):
        shuffler.report("eva", Announced.of(first.key, b"other weights"), b"counts")
    shuffler.report("eva", first, b"second")
    shuffler.report("evi", first, b"first")
    with refusal("replayed"):
        shuffler.report("eva", first, b"third")
    assert shuffler.reports(first.key) == [b"first", b"second"]
    shuffler.forget(first.key)
    assert shuffler.reports(first.key) == []
    rounds = [asked(number) for number in range(2, 22)]
    for announced in rounds:
        shuffler.report("eva", announced, b"again")
    assert sum(len(shuffler.reports(announced.key)) for announced in rounds) == 8
    assert shuffler.reports(rounds[-1].key) == [b"again"]
    shuffler.set_revoked(frozenset({"eva"}))
    with refusal("revoked"):
        shuffler.report("eva", rounds[-1], b"counts")
    assert shuffler.reports(rounds[-1].key) == []
