"""The ledger survives what kills a process or fills a disk, notices what was changed, and never frees budget."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntkfl.errors import Refused
from ntkfl.privacy.ledger import FILE, YEAR, Ledger, LedgerEntry, spent_in_year

# Releases replies of one run for as long as it lives, and says which are on the disk.
CLIENT = """
import sys
from ntkfl.privacy.ledger import Ledger, LedgerEntry
ledger = Ledger(sys.argv[1])
for number in range(int(sys.argv[3])):
    with ledger.locked():
        ledger.append(LedgerEntry(time=number, what="reply", run=sys.argv[2], method="m", round=number + 1))
    print(number + 1, flush=True)
"""


def entry(round: int, time: int = 1_000, run: str = "a", epsilon: float | None = 1.0) -> LedgerEntry:
    return LedgerEntry(time=time, what="reply", run=run, method="private-sums", round=round, epsilon=epsilon)


def written(folder: Path, entries: list[LedgerEntry]) -> bytes:
    ledger = Ledger(folder)
    with ledger.locked():
        for one in entries:
            ledger.append(one)
    return (folder / FILE).read_bytes()


def rounds(folder: Path) -> list[int]:
    ledger = Ledger(folder)
    with ledger.locked():
        return [one.round for one in ledger.entries]


def test_a_write_that_ended_at_any_byte_is_not_there_or_whole(tmp_path: Path) -> None:
    """The reply of an entry that is not whole was not sent. The ledger goes on after it."""
    whole = written(tmp_path, [entry(1), entry(2), entry(3)])
    last = whole[:-1].rfind(b"\n") + 1
    for end in range(last, len(whole) + 1):
        (tmp_path / FILE).write_bytes(whole[:end])
        there = [1, 2, 3] if end == len(whole) else [1, 2]
        assert rounds(tmp_path) == there
        written(tmp_path, [entry(4)])
        assert rounds(tmp_path) == [*there, 4]


@given(where=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_changed_bit_of_a_whole_line_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, where: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    text = bytearray(written(folder, [entry(1), entry(2, run="b")]))
    where %= len(text) - 1  # without the last line's end the line is one that was not finished
    text[where] ^= 1 << bit
    (folder / FILE).write_bytes(text)
    with pytest.raises(Refused, match=r"line \d is damaged, and nothing is sent"):
        rounds(folder)


@pytest.mark.parametrize("order", [[0, 2], [1, 0, 2], [0, 0, 1, 2], [1, 2]])
def test_lines_left_out_moved_or_doubled_are_noticed(tmp_path: Path, order: list[int]) -> None:
    lines = written(tmp_path, [entry(1), entry(2), entry(3)]).splitlines(keepends=True)
    (tmp_path / FILE).write_bytes(b"".join(lines[i] for i in order))
    with pytest.raises(Refused, match="damaged"):
        rounds(tmp_path)


def test_a_process_killed_at_work_loses_no_entry_it_had_written(tmp_path: Path) -> None:
    for attempt in range(3):
        command = [sys.executable, "-c", CLIENT, str(tmp_path), f"run {attempt}", "1000000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            for _ in range(20):
                told = int(client.stdout.readline())
            client.kill()
        ledger = Ledger(tmp_path)
        with ledger.locked():
            found = [one.round for one in ledger.entries if one.run == f"run {attempt}"]
        assert len(found) >= told
        assert found == list(range(1, len(found) + 1))


def test_two_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    clients = [subprocess.Popen([sys.executable, "-c", CLIENT, str(tmp_path), run, "50"]) for run in ("a", "b")]
    assert [client.wait(60) for client in clients] == [0, 0]
    ledger = Ledger(tmp_path)
    with ledger.locked():
        assert len(ledger.entries) == 100


def test_an_entry_is_never_before_the_last_one(tmp_path: Path) -> None:
    """Else what is written while a clock is wrong would be forgotten when it is right again."""
    written(tmp_path, [entry(1, 2_000), entry(2, 1_000), entry(3, 3_000)])
    ledger = Ledger(tmp_path)
    with ledger.locked():
        assert [one.time for one in ledger.entries] == [2_000, 2_000, 3_000]


def test_a_full_disk_is_said_and_leaves_the_ledger_as_it_was(tmp_path: Path) -> None:
    before = written(tmp_path, [entry(1)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(Refused, match="nothing was sent"):
            written(tmp_path, [entry(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / FILE).read_bytes() == before
    assert rounds(tmp_path) == [1]


def test_a_run_counts_whole_until_a_year_after_its_last_reply() -> None:
    entries = [entry(1, 0, "a", 1.0), entry(2, 100, "a", 1.5), entry(1, 200, "b", 2.0), entry(1, 200, "c", None)]
    assert spent_in_year(entries, 100 + YEAR - 1) == 3.5
    assert spent_in_year(entries, 100 + YEAR) == 2.0
    assert spent_in_year(entries, 200 + YEAR) == 0.0
    assert spent_in_year(entries, 300, but="b") == 1.5


@given(
    past=st.lists(st.tuples(st.integers(0, 3 * YEAR), st.sampled_from("abc"), st.floats(0, 10)), max_size=8),
    clock=st.integers(0, 4 * YEAR),
    back=st.integers(0, 4 * YEAR),
)
def test_a_clock_that_goes_back_frees_no_budget(past: list[tuple[int, str, float]], clock: int, back: int) -> None:
    entries = [entry(1, *one) for one in past]
    assert spent_in_year(entries, clock - back) >= spent_in_year(entries, clock)


def test_replies_are_kept_for_the_round_they_are_of(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.keep("../a", "1-0", b"first", first=True)
    ledger.keep("../a", "1-1", b"second", first=False)
    assert [ledger.kept("../a", name) for name in ("1-0", "1-1", "2-0")] == [b"first", b"second", None]
    ledger.keep("../a", "2-0", b"third", first=True)
    assert [ledger.kept("../a", name) for name in ("1-0", "1-1", "2-0")] == [None, None, b"third"]
    assert not (tmp_path.parent / "a").exists()
