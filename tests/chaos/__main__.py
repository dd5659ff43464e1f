"""`python -m tests.chaos`: runs killed with SIGKILL at random moments, resumed, and compared with undisturbed ones.

See docs/robustness.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.chaos.comparison import compare_through_kills
from tests.chaos.fork_server import preload
from tests.chaos.steps import at_every_step
from tests.chaos.storm import METHODS, calm, pace, storm


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="of every run, one after another (default 50)")
    parser.add_argument("--comparison-kills", type=int, default=5, help="of a comparison (default 5)")
    parser.add_argument("--every-step", action="store_true", help="kills at each touch of a file, and no others")
    parser.add_argument("--only", default="", help=f"of {', '.join(METHODS)}, compare")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: the time, and printed")
    given = parser.parse_args()
    seed = int(time.time()) if given.seed is None else given.seed
    print(f"seed {seed}: python -m tests.chaos --kills {given.kills} --seed {seed}", flush=True)
    preload()
    failed = 0
    for method in METHODS:
        if given.only in ("", method):
            failed |= (
                _every_step(method) if given.every_step else _train(method, given.kills, Random(f"{seed}/{method}"))
            )
    if given.only in ("", "compare") and not given.every_step:
        with tempfile.TemporaryDirectory(prefix="ntkfl-chaos-") as folder:
            rng = Random(f"{seed}/compare")
            wrong = compare_through_kills(Path(folder), given.comparison_kills, rng, _say)
        print(f"compare: killed {given.comparison_kills} times; {wrong or 'every run and table as undisturbed'}")
        failed |= bool(wrong)
    return failed


def _train(method: str, kills: int, rng: Random) -> int:
    # A round takes some 10 ms, and a busy machine may look a tenth of a second late.
    rounds, began = 12 * kills + 40, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ntkfl-chaos-") as name:
        folder = Path(name)
        expected = calm(method, rounds, folder / "calm", folder / "log")
        each = pace(folder / "calm")
        found, died_at = storm(method, rounds, kills, each, folder / "storm", folder / "log", rng, _say)
    different = [file for file in expected if found[file] != expected[file]]
    verdict = f"DIFFERENT: {', '.join(different)}" if different else f"equal to the last byte: {', '.join(expected)}"
    print(
        f"{method}: {rounds} rounds, killed {len(died_at)} times (after rounds {died_at[0]} to {died_at[-1]}), "
        f"{time.monotonic() - began:.0f} s; {verdict}",
        flush=True,
    )
    return bool(different)


def _every_step(method: str) -> int:
    with tempfile.TemporaryDirectory(prefix="ntkfl-chaos-") as name:
        steps, wrong = at_every_step(method, Path(name), _say)
    print(f"{method}: killed at each of {steps} steps; {wrong or 'always equal to the undisturbed run'}", flush=True)
    return bool(wrong)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
