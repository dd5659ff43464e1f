"""A slice of `make fuzz`, and the driver itself: what it must notice, it notices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from ntkfl.errors import MessageError
from tests.fuzz.driver import ROOT, attempt, drive, shares
from tests.fuzz.mutation import LARGEST, mutated
from tests.fuzz.target import Target, unforgeable

from . import driver

CASES = 8000


def test_no_decoder_or_parser_fails_otherwise_than_it_should(tmp_path: Path) -> None:
    outcome = drive(CASES, seed=0, only="", keep=tmp_path)
    assert outcome.failures == []
    assert sum(tally.cases for tally in outcome.tallies.values()) >= CASES
    assert len(outcome.tallies) >= 80
    untouched = {name for name, tally in outcome.tallies.items() if tally.cases > 50 and tally.accepted == tally.cases}
    assert untouched <= {
        "flower reason",
        "participant ledger",
        "announcement sequence",
        "run timings.jsonl",
        "watch request",
    }  # in which everything is answered


def test_the_driver_tells_refusals_from_defects() -> None:
    def check(data: bytes) -> None:
        if data == b"refused":
            raise MessageError("no")
        if data == b"lines":
            raise MessageError("two\nlines")
        if data == b"defect":
            raise KeyError("x")

    target = Target("t", (b"fine",), check)
    assert attempt(target, b"fine") == ""
    assert attempt(target, b"refused") is None
    assert "KeyError" in str(attempt(target, b"defect"))
    assert "several lines" in str(attempt(target, b"lines"))
    signed = unforgeable("u", (b"sent",), len)
    assert attempt(signed, b"sent") == ""
    assert "not what was sent" in str(attempt(signed, b"other"))


BROKEN = """
import ctypes, sys
from pathlib import Path
import tests.fuzz.targets as targets
from tests.fuzz.target import Target
def hungry(data):
    if data != b"seed": bytearray(4 << 30)
def deadly(data):
    if data != b"seed": ctypes.string_at(0)
targets.make = lambda scratch, only="": [Target("t", (b"seed",), globals()[%r])]
from tests.fuzz.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(("what", "said"), [("hungry", "MemoryError"), ("deadly", "")])
def test_the_worker_survives_neither_a_huge_allocation_nor_a_crash_and_the_driver_says_so(
    what: str, said: str, tmp_path: Path
) -> None:
    """The worker alone, with a decoder that is broken in a way no `except` could catch, or that asks for 4 GiB."""
    import mmap

    from tests.fuzz.driver import noted

    note = tmp_path / "case"
    note.write_bytes(bytes(256 + 2 * LARGEST))
    command = [sys.executable, "-c", BROKEN % what, "--worker", str(tmp_path), "--cases", "5", "--seed", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if said:
        assert said in done.stdout
    else:
        assert done.returncode < 0  # a signal: the parent then reads which input it was
        with note.open("r+b") as file, mmap.mmap(file.fileno(), 0) as current:
            assert noted(current)[1] != b"seed"


def test_cases_repeat_from_their_seed_and_stay_small() -> None:
    target = Target("t", (b"abc" * 100, b'{"a": 1}'), len, words=(b"word",))
    cases = [mutated(Random(f"0/t/{n}"), target) for n in range(500)]
    assert cases == [mutated(Random(f"0/t/{n}"), target) for n in range(500)]
    assert len(set(cases)) > 450
    assert max(map(len, cases)) <= LARGEST


def test_every_target_gets_cases() -> None:
    targets = [Target(f"t{n}", (b"",), len, share=0.01 if n else 5) for n in range(4)]
    assert min(shares(targets, 100).values()) == 1
    for cases in (1, 7, 100, 1001):
        equal = shares([Target(f"t{n}", (b"",), len) for n in range(3)], cases)
        assert cases <= sum(equal.values()) < cases + 3


TALKING = """
import sys
sys.stderr.write("a warning\\n" * 50_000)
print('{"target": "t", "cases": 5, "accepted": 2}', flush=True)
sys.exit("the end")
"""


def test_a_worker_that_talks_much_is_not_stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's side, with a worker that warns of more than a pipe holds, and ends badly."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "fuzz.py").write_text(TALKING)
    monkeypatch.setattr(driver, "ROOT", tmp_path)
    monkeypatch.setattr(driver, "SILENCE_S", 20)
    outcome = drive(5, seed=0, only="", keep=tmp_path / "kept")
    assert outcome.tallies["t"].cases == 5
    assert len(outcome.failures) == 1
    assert "ended with 1: the end" in outcome.failures[0]
