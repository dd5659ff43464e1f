"""What passes through the shuffler: announcements, presence, reports."""

from __future__ import annotations

from pathlib import Path

from ntkfl.privacy.rows import BatchKey
from ntkfl.privacy.shuffling import Shuffler

from .crowd import KEY, batch, refusal


def test_announcements_come_in_order_and_the_last_four_are_kept() -> None:
    shuffler = Shuffler()
    assert (shuffler.announcement(0), shuffler.newest) == (None, 0)
    for number in range(1, 7):
        assert shuffler.publish(f"say {number}".encode()) == number
    assert shuffler.publish(b"say 6") == 6  # its answer was lost, say
    heard, after = [], 0
    while (found := shuffler.announcement(after)) is not None:
        after, signed = found
        heard.append((after, signed))
    assert heard == [(number, f"say {number}".encode()) for number in (3, 4, 5, 6)]


def test_an_announcement_and_its_batch_are_one(tmp_path: Path) -> None:
    shuffler = Shuffler(tmp_path / "state.sqlite", floor=3)
    with refusal(403, "below-floor"):
        shuffler.publish(b"too few", batch(min_clients=2))
    assert (shuffler.announcement(0), shuffler.latest()) == (None, (0, None))
    assert shuffler.publish(b"enough", batch(min_clients=3)) == 1
    assert shuffler.publish(b"enough", batch(min_clients=3)) == 1
    assert shuffler.latest() == (1, KEY)
    shuffler.close()
    again = Shuffler(tmp_path / "state.sqlite", floor=3)
    assert (again.announcement(0), again.latest()) == ((1, b"enough"), (1, KEY))
    again.close()


def test_reports_are_evaluators_and_bounded() -> None:
    shuffler = Shuffler()
    shuffler.present("ada", "client")
    for name in ("eva", "evi"):
        shuffler.present(name, "evaluator")
    for name in ("ada", "stranger"):
        with refusal(403, "not-evaluator"):
            shuffler.report(name, KEY, b"counts")
    for size in (0, (1 << 16) + 1):
        with refusal(413, "too-large"):
            shuffler.report("eva", KEY, bytes(size))
    shuffler.report("eva", KEY, b"second")
    shuffler.report("evi", KEY, b"first")
    with refusal(409, "replayed"):
        shuffler.report("eva", KEY, b"third")
    assert shuffler.reports(KEY) == [b"first", b"second"]
    shuffler.forget(KEY)
    assert shuffler.reports(KEY) == []
    for number in range(20):
        shuffler.report("eva", BatchKey(2, number, 0), b"again")
    assert sum(len(shuffler.reports(BatchKey(2, number, 0))) for number in range(20)) == 8
    assert shuffler.reports(BatchKey(2, 19, 0)) == [b"again"]
    shuffler.drop("eva")
    with refusal(403, "revoked"):
        shuffler.report("eva", BatchKey(3, 0, 0), b"counts")
    assert shuffler.reports(BatchKey(2, 19, 0)) == []
