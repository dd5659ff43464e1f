"""Services as real processes: started, waited for, stopped; what they print and log is kept for tests to read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


class Process:
    """`python ARGUMENTS`, listening. `urls` by service; `stop()` gives the exit code; `output()` all it ever said."""

    def __init__(self, *arguments: str | Path, listeners: int = 1) -> None:
        command = [sys.executable, *map(str, arguments)]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        (out, write_out), (err, write_err) = os.pipe(), os.pipe()
        self._process = subprocess.Popen(command, stdout=write_out, stderr=write_err, env=environment)
        os.close(write_out)
        os.close(write_err)
        self.pid = self._process.pid
        self.out: list[str] = []
        self.err: list[str] = []
        self.urls: dict[str, str] = {}
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(handle, lines), daemon=True)
            for handle, lines in ((out, self.out), (err, self.err))
        ]
        for reader in self._readers:
            reader.start()
        with self._changed:
            ready = self._changed.wait_for(lambda: len(self.urls) == listeners or self._process.poll() is not None, 200)
        if not ready or len(self.urls) < listeners:
            self.kill()
            raise AssertionError(f"{command} does not listen:\n{self.output()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20) -> int:
        self._process.send_signal(number)
        code = self._process.wait(timeout)
        for reader in self._readers:
            reader.join(5)
        return code

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def output(self) -> str:
        return "\n".join([*self.out, *self.err])

    def _read(self, handle: int, lines: list[str]) -> None:
        with open(handle, errors="replace") as stream:
            for line in stream:
                with self._changed:
                    lines.append(line.rstrip("\n"))
                    found = re.fullmatch(r"listening (https://\S+) service=(\S+)", lines[-1])
                    if lines is self.out and found:
                        self.urls[found[2]] = found[1]
                    self._changed.notify_all()
        if lines is self.out:
            self._process.wait()
            with self._changed:
                self._changed.notify_all()
