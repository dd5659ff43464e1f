"""The shuffler's promises: every row once, no small crowds, and a file that says nothing of who sent what."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ntkfl.crypto.masking import mask, sum_masks, unpack_words
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.errors import ConfigError
from ntkfl.services.announcement import Batch
from ntkfl.services.store import BatchStore
from tests.services.federation import refusal

KEY = BatchKey(1, 0)
DIGEST = bytes(range(32))  # of an announcement
NAMES = ("ada", "bob", "cyd", "dan")


def batch(key: BatchKey = KEY, clients: int = len(NAMES), **terms: int) -> Batch:
    return Batch(key, clients, **({"max_rows": 2, "row_bytes": 8, "min_clients": 2} | terms))


def said(key: BatchKey = KEY) -> Announced:
    """What rows for the batch answer."""
    return Announced(key, DIGEST)


def rows_of(client: str, count: int = 2, size: int = 8) -> list[bytes]:
    """Rows one can tell apart, whose sender one can see."""
    return [f"{client}{i}".encode().ljust(size, b".") for i in range(count)]


def on_disk(path: Path) -> bytes:
    """The state's file and all beside it."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.iterdir()))


@pytest.mark.parametrize("terms", [{"clients": 1}, {"max_rows": 0}, {"row_bytes": 0}, {"min_clients": 5}])
def test_terms_that_make_no_batch_are_refused(terms: dict[str, int]) -> None:
    with refusal("terms"):
        BatchStore().open(batch(KEY, **terms), DIGEST)


def test_every_order_is_as_likely_as_any_other() -> None:
    shuffler, seen, trials = BatchStore(random=Random(7)), Counter[tuple[bytes, ...]](), 2400
    for trial in range(trials):
        key = BatchKey(trial, 0)
        shuffler.open(batch(key, 2), DIGEST)
        shuffler.submit("ada", said(key), [b"aaaaaaa1", b"aaaaaaa2"])
        shuffler.submit("bob", said(key), [b"bbbbbbb1", b"bbbbbbb2"])
        seen[tuple(shuffler.release(key).rows)] += 1
    assert set(seen) == set(permutations([b"aaaaaaa1", b"aaaaaaa2", b"bbbbbbb1", b"bbbbbbb2"]))
    expected = trials / 24
    chi_square = sum((count - expected) ** 2 / expected for count in seen.values())
    assert 9.3 < chi_square < 49.7  # 23 degrees of freedom: 0.5 % outside on the low side, 0.1 % on the high side


def test_the_generator_is_the_operating_systems() -> None:
    """Two shufflers in one state, fed the same: seeded alike they agree, as made by default they do not."""

    def order(**options: Random) -> list[bytes]:
        shuffler = BatchStore(**options)  # type: ignore[arg-type]
        shuffler.open(batch(max_rows=40), DIGEST)
        for name in NAMES:
            shuffler.submit(name, said(KEY), rows_of(name, 40))
        return shuffler.release(KEY).rows

    assert order(random=Random(1)) == order(random=Random(1))
    assert order() != order()


def test_threads_may_all_submit_at_once(tmp_path: Path) -> None:
    names = tuple(f"client-{i}" for i in range(24))
    shuffler = BatchStore(tmp_path / "state.sqlite")
    shuffler.open(batch(clients=len(names), max_rows=5, row_bytes=16), DIGEST)
    start = threading.Barrier(8)

    def attempt(number: int) -> bool:
        """Each client's rows are sent by four threads; one of them gets through."""
        if number < 8:
            start.wait(10)
        name = names[number % len(names)]
        return shuffler.submit(name, said(), rows_of(name, 5, 16))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(4 * len(names)))) == len(names)
    assert Counter(shuffler.release(KEY).rows) == Counter(row for name in names for row in rows_of(name, 5, 16))


# -- The file


def test_nothing_in_the_file_says_who_sent_what_after_release(tmp_path: Path) -> None:
    """With several hundred clients pages split and merge; that is where deleted records leave copies behind."""
    rng, path = Random(3), tmp_path / "state.sqlite"
    shuffler = BatchStore(path)
    cohort = tuple(f"client-{i}-{'x' * rng.randrange(40)}" for i in range(300))
    order: list[bytes] = []
    shuffler.open(batch(KEY, len(cohort), max_rows=9, row_bytes=300), DIGEST)
    for name in rng.sample(cohort, len(cohort)):
        rows = [rng.randbytes(300) for _ in range(9)]
        shuffler.submit(name, said(), rows)
        order += rows
    assert cohort[0].encode() in on_disk(path)  # the search would find it
    released = shuffler.release(KEY).rows

    content = on_disk(path)
    assert not any(name.encode() in content for name in cohort)
    copies = Counter({row: content.count(row[:200]) for row in released})
    assert set(copies.values()) == {1}
    by_place = sorted(released, key=lambda row: content.index(row[:200]))
    assert rank_correlation(order, released) < 0.1
    assert rank_correlation(order, by_place) < 0.2

    shuffler.discard(KEY)
    content = on_disk(path)
    assert not any(row[:40] in content for row in released)
    assert "answered" in tables(shuffler)  # hashes of names, for the round's later exchanges
    shuffler.open(batch(BatchKey(2, 0)), DIGEST)
    shuffler.discard(BatchKey(2, 0))
    assert tables(shuffler) == ["facts"]


def tables(shuffler: BatchStore) -> list[str]:
    return [name for (name,) in shuffler._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def rank_correlation(first: list[bytes], second: list[bytes]) -> float:
    rank = {row: i for i, row in enumerate(first)}
    return abs(np.corrcoef(range(len(second)), [rank[row] for row in second])[0, 1])


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
from ntkfl.services.store import BatchStore
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
    wanted = {name: [f"{i:04d}-{j:03d}".encode().ljust(2000, b".") for j in range(5)] for i, name in enumerate(names)}
    there = {i for i, name in enumerate(names) if not shuffler.submit(name, said(), wanted[name])}
    assert acknowledged <= there
    assert len(there) <= len(acknowledged) + 3
    assert Counter(shuffler.release(KEY).rows) == Counter(row for rows in wanted.values() for row in rows)


def test_a_release_log_that_does_not_fit_the_database_stops_the_service(tmp_path: Path) -> None:
    path, log = tmp_path / "state.sqlite", tmp_path / "state.released"
    shuffler = BatchStore(path)
    for number in (1, 2):
        key, before = BatchKey(number, 0), log.read_bytes() if log.exists() else b""
        shuffler.open(batch(key), DIGEST)
        for name in NAMES:
            shuffler.submit(name, said(key), rows_of(name))
        shuffler.release(key)
        shuffler.discard(key)
    shuffler.close()
    whole = log.read_bytes()
    for wrong, why in [
        (before, "disagree"),
        (whole.replace(b"2", b"3", 1), "disagree"),
        (whole[:-1], "damaged"),
        (b"", "damaged"),
    ]:
        log.write_bytes(wrong)
        with pytest.raises(ConfigError, match=why):
            BatchStore(path)
    log.unlink()
    with pytest.raises(ConfigError, match="disagree"):
        BatchStore(path)
    log.write_bytes(whole)
    BatchStore(path).close()
    path.unlink()
    with pytest.raises(ConfigError, match="has no database"):
        BatchStore(path)


# -- Secure sums: seed and vector together or not at all, one sum of masks, then no seed.

NUMBERS = 5
ROW_BYTES = 4 * NUMBERS + 48
SEEDS = {name: bytes([i + 1]) * 32 for i, name in enumerate(NAMES)}


def row_of(client: str) -> bytes:
    return client.encode().ljust(ROW_BYTES, b".")


def summing(path: Path | None = None, key: BatchKey = KEY, clients: tuple[str, ...] = ()) -> BatchStore:
    """A store with an open secure sum, to which these clients have sent."""
    shuffler = BatchStore(path)
    shuffler.open(batch(key, max_rows=1, row_bytes=ROW_BYTES, numbers=NUMBERS), DIGEST)
    for client in clients:
        shuffler.submit(client, said(key), [row_of(client)], SEEDS[client])
    return shuffler


def expected(*clients: str) -> list[int]:
    return [int(word) for word in sum_masks([SEEDS[client] for client in clients], said(), NUMBERS)]


def test_a_batch_takes_rows_or_masked_vectors_never_both() -> None:
    """A seed among rows would be released with them; rows in a sum would have no mask."""
    sums, rows = summing(), BatchStore()
    rows.open(batch(max_rows=1, row_bytes=ROW_BYTES), DIGEST)
    with refusal("other-kind"):
        sums.submit("ada", said(), [row_of("ada")])
    with refusal("other-kind"):
        rows.submit("ada", said(), [row_of("ada")], SEEDS["ada"])
    for seed in (b"", bytes(31), bytes(33)):
        with refusal("malformed"):
            sums.submit("ada", said(), [row_of("ada")], seed)
    assert sums.submit("ada", said(), [row_of("ada")], SEEDS["ada"])  # nothing of it was kept
    assert rows.submit("ada", said(), [row_of("ada")])


def test_no_seed_is_in_the_file_after_the_end(tmp_path: Path) -> None:
    """Released or given up; the masks' sum goes when the batch is deleted."""
    path = tmp_path / "state.sqlite"
    shuffler = summing(path, clients=NAMES)
    assert all(seed in on_disk(path) for seed in SEEDS.values())  # the search finds them
    total = shuffler.release(KEY).masks
    assert not any(seed in on_disk(path) for seed in SEEDS.values())
    assert not any(mask(seed, said(), NUMBERS).tobytes() in on_disk(path) for seed in SEEDS.values())
    assert total in on_disk(path)
    shuffler.discard(KEY)
    assert total not in on_disk(path)
    shuffler.close()
    shuffler = summing(path, BatchKey(2, 0), NAMES)
    assert SEEDS["ada"] in on_disk(path)
    shuffler.discard(BatchKey(2, 0))
    assert SEEDS["ada"] not in on_disk(path)


def test_a_database_restored_from_a_copy_is_not_served(tmp_path: Path) -> None:
    """A second release, of one client more, would give that client's row by difference."""
    path = tmp_path / "state.sqlite"
    summing(path, clients=NAMES[:2]).close()
    copy = path.read_bytes()
    shuffler = BatchStore(path)
    shuffler.submit("cyd", said(), [row_of("cyd")], SEEDS["cyd"])
    assert len(shuffler.release(KEY).rows) == 3
    shuffler.close()
    path.write_bytes(copy)
    with pytest.raises(ConfigError, match="restored from a copy"):
        BatchStore(path)


def test_a_lost_seed_stops_the_release(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    summing(path, clients=NAMES).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE senders SET seed = NULL WHERE client = 'ada'")
    db.close()
    with refusal("storage"):
        BatchStore(path).release(KEY)


KILLED = """
import os, signal, sys
from pathlib import Path
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.services import store

write = store._write_log
def killed(*arguments):
    if sys.argv[2] == "after":
        write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
store._write_log = killed
store.BatchStore(Path(sys.argv[1])).release(BatchKey(1, 0))
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_shuffler_killed_in_the_middle_of_a_release_ends_it_when_it_starts(tmp_path: Path, when: str) -> None:
    """Before the log's line, nothing was released; after it, exactly that is, although the database knew nothing."""
    path = tmp_path / "state.sqlite"
    summing(path, clients=NAMES[:3]).close()
    died = subprocess.run([sys.executable, "-c", KILLED, str(path), when], capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    shuffler = BatchStore(path)
    if when == "after":
        with refusal("late"):
            shuffler.submit("dan", said(), [row_of("dan")], SEEDS["dan"])
    _, rows, masks = shuffler.release(KEY)
    assert sorted(rows) == [row_of(name) for name in NAMES[:3]]
    assert unpack_words(masks, NUMBERS).tolist() == expected(*NAMES[:3])
    assert not any(seed in on_disk(path) for seed in SEEDS.values())
