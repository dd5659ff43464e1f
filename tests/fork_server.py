"""Processes without the seconds that each would spend on importing torch: one imports, and forks whoever is asked for.

`Child(arguments)` is to `python ARGUMENTS` what `subprocess.Popen` is: a process of its own, with its own arguments,
environment, session, files and signals, that may be killed at any moment; `run` is its `subprocess.run`. `python
fork_server.py SOCKET` is the process that forks.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


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
        self.returncode: int | None = None
        self._lock = threading.Lock()
        asked = {"arguments": list(map(str, arguments)), "environment": dict(environment or os.environ)}
        asked["directory"] = str(directory or os.getcwd())
        self._ended, ended = os.pipe()
        nursery = _nursery()
        with suppress(BrokenPipeError):
            text = json.dumps(asked).encode()
            socket.send_fds(nursery, [len(text).to_bytes(4, "little")], [stdout, stderr, ended])
            nursery.sendall(text)
        os.close(ended)
        self.pid = int.from_bytes(_read(self._ended, 4), "little", signed=True)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal's number, as `Popen` has it. Threads may wait side by side."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            with self._lock:
                if self.returncode is None and select.select([self._ended], [], [], 0.02)[0]:
                    self.returncode = int.from_bytes(_read(self._ended, 4), "little", signed=True)
                    os.close(self._ended)
            if self.returncode is None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run(
    *arguments: str | Path, directory: Path | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` to its end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = Child(arguments, out.fileno(), err.fileno(), directory=directory)
        try:
            code = child.wait(timeout)
        finally:
            child.send_signal(signal.SIGKILL)  # where it has not ended by now
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess([*map(str, arguments)], code, out.read(), err.read())


def _read(handle: int, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = os.read(handle, size - len(found))
        assert piece, "the nursery has ended"
        found += piece
    return found


@functools.cache
def _nursery() -> socket.socket:
    """Of this process, started when it is first asked for something; it ends with its end of the socket."""
    ours, theirs = socket.socketpair()
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # called first
    return ours


# -- The nursery ------------------------------------------------------------------------------------------------------


def serve(callers: socket.socket) -> None:
    """Fork until nobody asks any more; a child returns from here as if it were the program asked for."""
    import torch

    import ntkfl.cli
    import ntkfl.federation.config
    import ntkfl.services.shuffler  # noqa: F401

    torch.set_num_threads(1)
    waited_for: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([callers, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _bury(waited_for)
        if callers in ready:
            size, handles, _, _ = socket.recv_fds(callers, 4, 3)
            if not size:
                return
            asked = json.loads(_read(callers.fileno(), int.from_bytes(size, "little")))
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for handle in (callers.detach(), woken, wake, *waited_for.values(), handles[2]):
                    os.close(handle)
                return _be(asked, handles[:2])
            os.write(handles[2], child.to_bytes(4, "little", signed=True))
            waited_for[child] = handles[2]
            for handle in handles[:2]:
                os.close(handle)


def _bury(waited_for: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            handle = waited_for.pop(child)
            with suppress(BrokenPipeError):
                os.write(handle, os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
            os.close(handle)


def _be(asked: dict[str, object], handles: Sequence[int]) -> None:
    """The program asked for."""
    os.setsid()
    for place, handle in enumerate(handles, start=1):
        os.dup2(handle, place)
        os.close(handle)
    os.chdir(str(asked["directory"]))
    os.environ.clear()
    os.environ.update(asked["environment"])  # type: ignore[call-overload]
    program, *rest = asked["arguments"]  # type: ignore[misc]
    if program == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *rest]
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(socket.socket(fileno=int(sys.argv[1])))
