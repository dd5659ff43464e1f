"""A training run that is killed again and again, resumed each time, and must end as if nothing had happened."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.chaos.fork_server import Child

DATA = ["--dataset", "digits", "--clients", "12", "--clients-per-round", "3", "--set", "hidden=[16]"]
METHODS = {
    "ntk-fl": [*DATA, "--method", "ntk-fl", "--set", "steps=[10,100]"],
    # Whose clients keep something between rounds.
    "scaffold": [*DATA, "--method", "scaffold", "--set", "local_steps=3"],
    "cp-ntk-fl": [
        *DATA, "--method", "cp-ntk-fl", "--set", "steps=[10,100]", "--set", "projected_dim=16",
        "--set", "subsample_rate=0.3",
    ],
}  # fmt: skip
RESULTS = ("config.toml", "history.jsonl", "model.safetensors", "checkpoint/state.safetensors")


def calm(method: str, rounds: int, folder: Path, log: Path) -> dict[str, bytes]:
    """The undisturbed run: what its folder holds."""
    child = Child(["train", *METHODS[method], "--rounds", str(rounds), "--out", str(folder)], log)
    assert child.wait() == 0, log.read_text()
    return results(folder)


def pace(folder: Path) -> float:
    """What a round of a run that is done took, in seconds: start-up, and a first round that warms up, do not count."""
    lines = (folder / "timings.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["seconds"] for line in lines)


def results(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RESULTS}


def start(method: str, rounds: int, folder: Path, log: Path, before: Callable[[], object] = lambda: None) -> Child:
    """The run begun, or gone on with, as a person would: resumed where the folder holds a run."""
    if (folder / "config.toml").exists():
        return Child(["train", "--resume", "--out", str(folder)], log, before)
    return Child(["train", *METHODS[method], "--rounds", str(rounds), "--out", str(folder)], log, before)


def look(folder: Path) -> int:
    """Read all of a run's folder as others do while it is written: it is whole at any moment. The rounds done."""
    from ntkfl.federation.run_folder import RunFolder
    from ntkfl.report.runs import find
    from ntkfl.report.view import view

    run = RunFolder(folder)
    if not run.holds_run:
        return 0
    run.config()
    done, _ = run.load_checkpoint()
    assert len(run.records()) >= done, "a checkpoint counts a round that the history does not have"
    for found in find([folder])[0]:
        assert view(found)["condition"] != "failed", view(found)["text"]
    return done


def storm(
    method: str,
    rounds: int,
    kills: int,
    pace: float,
    folder: Path,
    log: Path,
    rng: Random,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, bytes], list[int]]:
    """Kill the run `kills` times, each time somewhere in the next few rounds, which take `pace` seconds each: what it
    ends with, and the rounds that were done at each kill.
    """
    died_at: list[int] = []
    while len(died_at) < kills:
        begun_with = look(folder)
        child = start(method, rounds, folder, log)
        if rng.random() < 0.2:  # before a round, while the run is set up or taken up again
            # On a fast machine half a second is more than the run.
            time.sleep(rng.uniform(0.0, min(0.5, 20 * pace)))
        else:
            until = begun_with + rng.randrange(3)
            while child.poll() is None and look(folder) < until:
                pass
            time.sleep(rng.uniform(0.0, 5 * pace))
        if child.poll() is not None:
            assert child.code == 0, log.read_text()
            raise AssertionError(f"the run ended after {len(died_at)} kills: more rounds are needed")
        child.kill()
        died_at.append(look(folder))
        say(f"{method}: killed {len(died_at)} of {kills} times, {died_at[-1]} of {rounds} rounds done")
    assert start(method, rounds, folder, log).wait() == 0, log.read_text()
    return results(folder), died_at
