"""What the shuffler's file holds: all that was acknowledged, and nothing of who sent what."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from ntkfl.crypto.row_frames import BatchKey
from ntkfl.errors import ConfigError
from ntkfl.services.shuffler.store import BatchStore
from tests.services.shuffler.batches import DIGEST, KEY, batch, on_disk, refusal, said, submit_all, taken


@pytest.mark.parametrize("another_is_open", [False, True])
def test_nothing_in_the_file_says_who_sent_what_after_release(tmp_path: Path, another_is_open: bool) -> None:
    """With several hundred clients pages split and merge; that is where deleted records leave copies behind."""
    rng = Random(3)
    path = tmp_path / "state.sqlite"
    shuffler = BatchStore(path)
    cohorts = {
        key: tuple(f"client-{key.round}-{i}-{'x' * rng.randrange(40)}" for i in range(150))
        for key in (KEY, BatchKey(2, 0))
    }
    order: list[bytes] = []
    for key, cohort in cohorts.items() if another_is_open else [(KEY, cohorts[KEY])]:
        shuffler.open(batch(key, len(cohort), max_rows=9, row_bytes=300), DIGEST)
        for name in rng.sample(cohort, len(cohort)):
            rows = [rng.randbytes(300) for _ in range(9)]
            shuffler.submit(name, said(key), rows)
            order += rows if key == KEY else []
    assert cohorts[KEY][0].encode() in on_disk(path)  # the search would find it
    released = shuffler.release(KEY)

    content = on_disk(path)
    assert not any(name.encode() in content for name in cohorts[KEY])
    copies = Counter({row: content.count(row[:200]) for row in released})
    assert set(copies.values()) == {1}
    by_place = sorted(released, key=lambda row: content.index(row[:200]))
    assert rank_correlation(order, released) < 0.1
    assert rank_correlation(order, by_place) < 0.2

    shuffler.forget(KEY)
    content = on_disk(path)
    assert not any(row[:40] in content for row in released)


def rank_correlation(first: list[bytes], second: list[bytes]) -> float:
    rank = {row: i for i, row in enumerate(first)}
    pairs = [(rank[row], i) for i, row in enumerate(second)]
    n, a, b = len(pairs), *(sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    covariance = sum((x - a) * (y - b) for x, y in pairs) / n
    return float(
        abs(covariance) * n / (sum((x - a) ** 2 for x, _ in pairs) * sum((y - b) ** 2 for _, y in pairs)) ** 0.5
    )


def test_the_file_is_its_owners_alone_and_of_one_process_and_run(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    path.touch(0o644)
    shuffler = BatchStore(path, run="federation/run-1")
    shuffler.open(batch(), DIGEST)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    with pytest.raises(ConfigError, match="another process"):
        BatchStore(path, run="federation/run-1")
    shuffler.close()
    with pytest.raises(ConfigError, match="another run"):
        BatchStore(path, run="federation/run-2")
    BatchStore(path, run="federation/run-1").close()
    (tmp_path / "other").write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match="cannot use"):
        BatchStore(tmp_path / "other")
    with pytest.raises(ConfigError, match="cannot use"):
        BatchStore(tmp_path / "nowhere" / "state.sqlite")


CHILD = """
import sys
from pathlib import Path
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.services.shuffler.store import BatchStore
shuffler = BatchStore(Path(sys.argv[1]))
print("begun", flush=True)
for client in range(int(sys.argv[2]), 200):
    rows = [f"{client:04d}-{i:03d}".encode().ljust(2000, b".") for i in range(5)]
    shuffler.submit(f"client-{client}", Announced(BatchKey(1, 0), bytes(range(32))), rows)
    print(client, flush=True)
"""


def test_a_process_killed_in_a_round_has_lost_nothing_and_takes_nothing_twice(tmp_path: Path) -> None:
    path, names = tmp_path / "state.sqlite", tuple(f"client-{i}" for i in range(200))
    opened = BatchStore(path)
    opened.open(batch(clients=len(names), max_rows=5, row_bytes=2000), DIGEST)
    opened.close()
    acknowledged: set[int] = set()
    rng = Random(0)
    for _ in range(3):  # kill it at some moment or other, each time further on
        begin = max(acknowledged, default=-1) + 2  # not the one that may or may not have been taken
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(begin)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        time.sleep(rng.uniform(0.02, 0.2))
        os.kill(child.pid, signal.SIGKILL)
        acknowledged |= {int(line) for line in child.stdout.read().split("\n")[:-1]}
        child.wait()

    assert acknowledged
    shuffler = BatchStore(path)
    there = shuffler.status(KEY).clients
    assert len(acknowledged) <= there <= len(acknowledged) + 3
    accepted = set()
    for i, name in enumerate(names):
        if taken(shuffler, name, KEY, [f"{i:04d}-{j:03d}".encode().ljust(2000, b".") for j in range(5)]):
            accepted.add(i)
    assert len(accepted) == len(names) - there
    assert not accepted & acknowledged
    released = shuffler.release(KEY)
    wanted = [f"{i:04d}-{j:03d}".encode().ljust(2000, b".") for i in range(200) for j in range(5)]
    assert Counter(released) == Counter(wanted)
    shuffler.close()

    again = BatchStore(path)
    assert again.release(KEY) == released
    assert b"client-" not in on_disk(path)
    again.close()


def test_who_answered_is_remembered_over_a_restart_and_named_nowhere(tmp_path: Path) -> None:
    """Later exchanges need the clients of the first; the file has hashes of their names, until the next round."""
    path, later = tmp_path / "state.sqlite", BatchKey(1, 1)
    shuffler = BatchStore(path)
    names = ("adelheid", "bartholomew", "cunegonde")
    shuffler.open(batch(clients=3, max_rows=1), DIGEST)
    for name in names[:2]:
        shuffler.submit(name, said(), [f"first-{name[0]}".encode().ljust(8)])
    shuffler.release(KEY)
    shuffler.close()
    assert not any(name.encode() in on_disk(path) for name in names)
    shuffler = BatchStore(path)
    shuffler.open(batch(later, 3, max_rows=1), DIGEST)
    with refusal("not-asked"):
        shuffler.submit("cunegonde", said(later), [b"second-c"])
    for name in names[:2]:
        shuffler.submit(name, said(later), [f"second-{name[0]}".encode()])
    assert len(shuffler.release(later)) == 2
    shuffler.open(batch(BatchKey(2, 0)), DIGEST)
    shuffler.cancel(BatchKey(2, 0))
    shuffler.close()
    with sqlite3.connect(path) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master")]
    db.close()
    assert not [name for name in tables if name.startswith(("answered_", "senders_", "pending_"))]


def test_a_log_of_releases_that_is_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    """A line that was not flushed stands for a release that was not made; any other damage stops the service."""
    path, log = tmp_path / "state.sqlite", tmp_path / "state.released"
    shuffler = BatchStore(path)
    for number in (1, 2):
        key = BatchKey(number, 0)
        shuffler.open(batch(key), DIGEST)
        submit_all(shuffler, key)
        shuffler.release(key)
        shuffler.forget(key)
    shuffler.close()
    whole = log.read_bytes()
    assert len(whole) == 2 * 76
    for torn in range(1, 76):
        log.write_bytes(whole + whole[:torn])
        BatchStore(path).close()
        assert log.read_bytes() == whole
    for wrong, why in [
        (whole[:-1], "disagree"),
        (whole[:76], "disagree"),
        (b"", "disagree"),
        (whole + whole[:76].replace(b"0", b"1", 1), "disagree"),
        (b"x" + whole[1:], "damaged at byte 0"),
    ]:
        log.write_bytes(wrong)
        with pytest.raises(ConfigError, match=why):
            BatchStore(path)
        log.write_bytes(whole)
    BatchStore(path).close()
