"""`python -m tests.fuzz`: many changed inputs for every decoder and parser. See docs/robustness.md."""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.driver import Outcome, attempt, confine, drive, work


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=200_000, help="in all (default 200,000)")
    parser.add_argument("--seed", type=int, default=None, help="of the changes; default: the time, and printed")
    parser.add_argument("--only", default="", help="targets whose name holds this")
    parser.add_argument("--without", default="(none)", help="no targets whose name holds this")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="folder for inputs that fail")
    parser.add_argument("--replay", type=Path, help="try one input again, with --only its target's name")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return _work(given.worker, given)
    if given.replay:
        return _replay(given.replay, given.only)
    seed = int(time.time()) if given.seed is None else given.seed
    print(f"seed {seed}: python -m tests.fuzz --cases {given.cases} --seed {seed}", flush=True)
    began, shown = time.monotonic(), [time.monotonic()]

    def show(outcome: Outcome, cases: int) -> None:
        if time.monotonic() - shown[0] < 5:
            return
        shown[0] = time.monotonic()
        done = sum(t.cases for t in outcome.tallies.values())
        left = (shown[0] - began) * (cases - done) / max(1, done)
        print(f"{done:>9,} of {cases:,} cases, {len(outcome.failures)} failed, about {left:.0f} s left", flush=True)

    outcome = drive(given.cases, seed, given.only, given.keep, show, given.without)
    width = max(map(len, outcome.tallies), default=0)
    for name, tally in outcome.tallies.items():
        print(f"{name:<{width}} {tally.cases:>8,} cases {tally.accepted:>7,} accepted")
    total = sum(t.cases for t in outcome.tallies.values())
    print(f"{total:,} cases of {len(outcome.tallies)} targets in {time.monotonic() - began:.0f} s, seed {seed}")
    for failure in outcome.failures:
        print(failure)
    return 1 if outcome.failures else 0


def _work(scratch: Path, given: argparse.Namespace) -> int:
    from tests.fuzz.targets import make

    def say(told: dict[str, object]) -> None:
        print(json.dumps(told), file=out, flush=True)

    out, sys.stdout = sys.stdout, sys.stderr  # what the code under test prints is none of the parent's business
    with (scratch / "case").open("r+b") as file, mmap.mmap(file.fileno(), 0) as current:
        targets = [target for target in make(scratch, given.only) if given.without not in target.name]
        work(targets, given.cases, given.seed, current, say)
    return 0


def _replay(path: Path, only: str) -> int:
    from tests.fuzz.targets import make

    with tempfile.TemporaryDirectory(prefix="ntkfl-fuzz-") as scratch:
        targets = [t for t in make(Path(scratch), only) if t.name == only or not only]
        confine()
        failed = 0
        for target in targets:
            problem = attempt(target, path.read_bytes())
            print(f"{target.name}: {'accepted' if problem == '' else 'refused' if problem is None else problem}")
            failed |= bool(problem)
    return failed


if __name__ == "__main__":
    sys.exit(main())
