"""Commands as processes that are quick to start: all imports are done once, and each command is a fork of that.

A child is a process like any other, with files and locks of its own, and dies by SIGKILL like any other.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 1200  # for one command: a child that hangs is a failure, not a wait


class Child:
    """`ntkfl ARGUMENTS` in a forked process; what it prints goes to `log`. `before` runs in it first."""

    def __init__(self, arguments: list[str], log: Path, before: Callable[[], object] = lambda: None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.log, self.code = log, None
        self.pid = os.fork()
        if self.pid == 0:
            _run(arguments, log, before)

    def poll(self) -> int | None:
        """The exit code, or minus the signal's number; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        until = time.monotonic() + DEADLINE_S
        while self.poll() is None:
            if time.monotonic() > until:
                self.kill()
                raise AssertionError(f"hangs; it said: {self.log.read_text()}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        """kill -9."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def preload() -> None:
    """Import what commands need, and compute nothing: a thread would not survive the fork."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    import torch._dynamo  # what torch.func loads on its first use

    import ntkfl.cli.train
    import ntkfl.federation.config
    import ntkfl.federation.shuffled
    import ntkfl.report.view  # noqa: F401


def _run(arguments: list[str], log: Path, before: Callable[[], object]) -> None:
    code = 1
    try:
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.argv = ["ntkfl", *arguments]
        before()
        from ntkfl.cli import main

        main()
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
