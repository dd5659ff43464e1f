"""Runs cases in a process of its own, under a limit of memory and of time; its parent survives whatever happens there.

The worker keeps the case it is at in a file both can see. When it dies, or does not say a word for long, the parent
knows the input that did it.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

from tests.fuzz.mutation import LARGEST, mutated
from tests.fuzz.target import Target

ROOM = 512 << 20  # bytes that a case may ask for beyond what the process has
CPU_S = 10  # of one case: an honest one takes milliseconds
SILENCE_S = 600  # without a word from the worker: it hangs where Python cannot interrupt it
ROOT = Path(__file__).parents[2]


@dataclass
class Tally:
    """Of one target: cases tried, and how many of them were accepted."""

    cases: int = 0
    accepted: int = 0


@dataclass
class Outcome:
    tallies: dict[str, Tally] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # a line each: what happened, and the file that holds the input


class _TooLong(BaseException):
    """No `except Exception` of the code under test may swallow it."""


def shares(targets: list[Target], cases: int) -> dict[str, int]:
    """How many cases each target gets: at least one, and together no fewer than asked for."""
    total = sum(target.share for target in targets)
    return {target.name: math.ceil(cases * target.share / total) for target in targets}


# -- The worker's side -----------------------------------------------------------------------------------------------


def work(
    targets: list[Target], cases: int, seed: int, current: mmap.mmap, say: Callable[[dict[str, object]], None]
) -> None:
    """Try all cases, one target after another; `say` is told what was done and what failed."""
    confine()
    for target in targets:
        for data in target.seeds:
            _note(current, target.name, data)
            target.check(data)  # a seed that is refused is a mistake of the target's
    known: set[str] = set()
    spoken = time.monotonic()
    for name, count in shares(targets, cases).items():
        target = next(t for t in targets if t.name == name)
        confine()  # anew: what earlier targets left in memory is none of this one's
        accepted = before = 0
        for number in range(count):
            data = mutated(Random(f"{seed}/{name}/{number}"), target)
            _note(current, name, data)
            problem = attempt(target, data)
            if problem == "":
                accepted += 1
            elif problem is not None and problem not in known:
                known.add(problem)
                say({"target": name, "problem": problem, "input": data.hex()})
            if time.monotonic() - spoken > 1:
                say({"target": name, "cases": number + 1 - before, "accepted": accepted})
                before, accepted, spoken = number + 1, 0, time.monotonic()
        say({"target": name, "cases": count - before, "accepted": accepted})


def attempt(target: Target, data: bytes) -> str | None:
    """Empty where the input was accepted, None where it was refused as it should be, else what went wrong."""
    from ntkfl.errors import NTKFLError

    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        target.check(data)
        return ""
    except NTKFLError as error:
        line = str(error)
        return None if "\n" not in line else f"{target.name}: an error of several lines: {line!r}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        where = traceback.extract_tb(error.__traceback__)
        own = next((f for f in reversed(where) if "/ntkfl/" in f.filename), where[-1])
        what = f"took more than {CPU_S} s" if isinstance(error, _TooLong) else f"{type(error).__name__}: {error}"[:200]
        return f"{target.name}: {what.splitlines()[0]} (at {Path(own.filename).name}:{own.lineno})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def confine() -> None:
    """From here on: no allocation beyond some room, no case beyond some seconds, no numerical warning unnoticed."""

    def stop(_: int, __: FrameType | None) -> None:
        raise _TooLong

    signal.signal(signal.SIGPROF, stop)
    warnings.simplefilter("error", RuntimeWarning)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _note(current: mmap.mmap, name: str, data: bytes) -> None:
    head = json.dumps([name, len(data)]).encode().ljust(256)
    current[: 256 + len(data)] = head + data


def noted(current: mmap.mmap) -> tuple[str, bytes]:
    name, size = json.loads(current[:256])
    return name, current[256 : 256 + size]


# -- The parent's side -----------------------------------------------------------------------------------------------


def drive(
    cases: int,
    seed: int,
    only: str,
    keep: Path,
    show: Callable[[Outcome, int], None] = lambda *_: None,
    without: str = "(none)",
) -> Outcome:
    """Fuzz in a worker process; failing inputs are kept in the folder `keep`. `show` is called about once a second."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="ntkfl-fuzz-", dir=_memory_folder()) as scratch:
        note = Path(scratch) / "case"
        note.write_bytes(bytes(256 + 2 * LARGEST))
        command = [sys.executable, "-m", "tests.fuzz", "--worker", scratch, "--cases", str(cases), "--seed", str(seed)]
        command += ["--only", only, "--without", without]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        said = Path(scratch) / "said"  # a file: a pipe that nobody reads would stall the worker once it is full
        with said.open("wb") as sink:
            worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=sink, env=environment)
        with note.open("r+b") as file, mmap.mmap(file.fileno(), 0) as current:
            try:
                _listen(worker, outcome, keep, cases, show)
            finally:
                worker.kill()
                code = worker.wait()
            if code != 0:
                try:
                    name, data = noted(current)
                except ValueError:
                    name, data = "start", b""
                why = f"hung for {SILENCE_S} s or" if code == -signal.SIGKILL else ""
                last = (said.read_text(errors="replace").strip() or "without a word").splitlines()[-1]
                _fail(outcome, keep, name, f"{name}: the process {why} ended with {code}: {last}", data)
    return outcome


def _listen(
    worker: subprocess.Popen[bytes], outcome: Outcome, keep: Path, cases: int, show: Callable[[Outcome, int], None]
) -> None:
    assert worker.stdout is not None
    while select.select([worker.stdout], [], [], SILENCE_S)[0]:
        line = worker.stdout.readline()
        if not line:
            worker.wait()
            return
        told = json.loads(line)
        if "problem" in told:
            _fail(outcome, keep, told["target"], told["problem"], bytes.fromhex(told["input"]))
            continue
        tally = outcome.tallies.setdefault(told["target"], Tally())
        tally.cases += told["cases"]
        tally.accepted += told["accepted"]
        show(outcome, cases)


def _fail(outcome: Outcome, keep: Path, name: str, problem: str, data: bytes) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"{name.replace(' ', '-').replace('/', '-')}-{hashlib.sha256(data).hexdigest()[:10]}"
    path.write_bytes(data)
    outcome.failures.append(f"{problem}\n  again with: python -m tests.fuzz --replay '{path}' --only '{name}'")


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
