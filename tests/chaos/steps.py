"""Killed at every step: a process that ends itself with SIGKILL the n-th time it opens, moves or deletes a file."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.chaos.storm import calm, look, results, start

ROUNDS = 2
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")


def die_at(step: int, folder: Path) -> None:
    """From now on, the process dies on its `step`-th touch of something in `folder`, just before it happens."""
    inside, count = os.fspath(folder), 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event not in _EVENTS or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if os.fsdecode(arguments[0]).startswith(inside):
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def at_every_step(method: str, folder: Path, say: Callable[[str], None] = lambda _: None) -> tuple[int, str]:
    """Kill a short run at its first step, another at its second, and so on to the last; resume each.

    How many steps there were, and what differed from the undisturbed run; empty where nothing did.
    """
    log = folder / "log"
    expected = calm(method, ROUNDS, folder / "calm", log)
    step = 0
    while True:
        step += 1
        out = folder / f"step-{step}"
        code = start(method, ROUNDS, out, log, lambda out=out, step=step: die_at(step, out)).wait()  # type: ignore[misc]
        if code == 0:
            return step - 1, ""
        if code != -signal.SIGKILL:
            return step, f"step {step} ended with {code}: {log.read_text()}"
        look(out)
        if start(method, ROUNDS, out, log).wait() != 0:
            return step, f"after a kill at step {step} it does not go on: {log.read_text()}"
        if results(out) != expected:
            return step, f"after a kill at step {step} the results differ"
        left = [str(path) for path in out.rglob("*.part")]
        if left:
            return step, f"after a kill at step {step} something half written is left: {left}"
        say(f"{method}: killed at step {step} and resumed")
