"""A command as its user starts it: a process in a session of its own, on a terminal or into a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from contextlib import suppress
from pathlib import Path

UNWANTED = ("Traceback", "KeyboardInterrupt", "Aborted", "leaked", "Exception")  # in what a stopped command says


class Command:
    """`ntkfl ARGUMENTS` in a session of its own, on a terminal of 80 columns or into a pipe."""

    def __init__(self, *arguments: str | Path, terminal: bool = False) -> None:
        words = [sys.executable, "-m", "ntkfl", *map(str, arguments)]
        self.leader, follower = pty.openpty() if terminal else os.pipe()
        if terminal:
            fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.terminal, self.seen, self.mark = terminal, b"", f"NTKFL_STARTED_AS={uuid.uuid4().hex}"
        own = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        own |= {"TERM": "xterm", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | dict([self.mark.split("=")])
        self.process = subprocess.Popen(
            words, stdin=follower if terminal else subprocess.DEVNULL, stdout=follower, stderr=follower,
            env=own, start_new_session=True, preexec_fn=self._begin,
        )  # fmt: skip
        os.close(follower)

    def _begin(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a suite in the background has ignored
        if self.terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def until(self, pattern: str, seconds: float = 120) -> None:
        """Wait until the pattern is in what it said."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < end, f"waited for {pattern!r}: {self.text[-2000:]}"
            assert self._read(0.2), f"it ended without {pattern!r}: {self.text[-2000:]}"

    def interrupt(self) -> int:
        """As a terminal does it, or `kill -INT`; the exit code. What is left to do would take far longer than this."""
        if self.terminal:
            os.write(self.leader, b"\x03")
        else:
            self.process.send_signal(signal.SIGINT)
        end = time.monotonic() + 15
        while self._read(0.2) and time.monotonic() < end:
            pass
        return self.process.wait(1)

    @property
    def text(self) -> str:
        return re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", self.seen.decode(errors="replace")).replace("\r", "\n")

    def left_behind(self) -> list[str]:
        """Processes of its session, and those that have left it, that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError, IndexError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    ours = int(fields[3]) == self.process.pid or self.mark.encode() in (entry / "environ").read_bytes()
                    if ours and fields[0] != "Z":
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return found

    def _read(self, seconds: float) -> bool:
        """Whether there may be more."""
        ready, _, _ = select.select([self.leader], [], [], seconds)
        if ready:
            try:
                part = os.read(self.leader, 65536)
            except OSError:  # the other end of a terminal is closed
                return False
            self.seen += part
            return bool(part)
        return True


def wait_until_gone(command: Command, seconds: float = 5) -> list[str]:
    """Who is left after that."""
    end = time.monotonic() + seconds
    while (left := command.left_behind()) and time.monotonic() < end:
        time.sleep(0.1)
    return left
