"""Processes without the seconds that each would spend on importing torch: Python's fork server imports it once.

`Child(arguments)` is to `python ARGUMENTS` what `subprocess.Popen` is: a process of its own, with its own arguments,
environment, session, files and signals, that may be killed at any moment; `run` is its `subprocess.run`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["ntkfl.cli", "ntkfl.federation.config", "ntkfl.services.shuffler"])


class Child:
    """`python ARGUMENTS`, with what it says in the files `stdout` and `stderr` (descriptors)."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        stdout: int,
        stderr: int,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        files = [os.readlink(f"/proc/self/fd/{handle}") for handle in (stdout, stderr)]
        how = dict(environment or os.environ), str(directory or os.getcwd())
        self._process = _FORKING.Process(target=_be, args=([*map(str, arguments)], files, *how))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal's number, as `Popen` has it; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


def run(
    *arguments: str | Path, directory: Path | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` to its end."""
    with tempfile.NamedTemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w+") as err:
        child = Child(arguments, out.fileno(), err.fileno(), directory=directory)
        try:
            code = child.wait(timeout)
        finally:
            child.send_signal(signal.SIGKILL)  # where it has not ended by now
        return subprocess.CompletedProcess([*map(str, arguments)], code, out.read(), err.read())


def _be(arguments: list[str], files: list[str], environment: dict[str, str], directory: str) -> None:
    """In a process that the server forked: the program asked for."""
    import torch

    torch.set_num_threads(1)
    sys.dont_write_bytecode = False  # as tests/conftest.py has it
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for place, file in enumerate(files, start=1):
        handle = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, place)
        os.close(handle)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # a text file it is
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    program, *rest = arguments
    if program == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *rest]
        runpy.run_path(program, run_name="__main__")
