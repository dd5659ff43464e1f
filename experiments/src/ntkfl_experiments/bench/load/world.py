"""What is loaded: a trial federation's key server and shuffler as processes, watched from outside."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ntkfl.deployment.demo_setup import DemoSetup, init
from ntkfl.errors import ConfigError
from ntkfl.processes import block_sigint, end_with_parent
from ntkfl.services.trusted_peers import TrustedPeers

_TERMS = 'inputs = [784]\noutputs = 10\nclients_per_round = 2\n[method]\nname = "ntk-fl"\n'
_START_S = 60


class World:
    """A federation in `folder`, whose services are started and stopped by name, and their memory while they run."""

    def __init__(self, folder: Path, clients: int, floor: int) -> None:
        if not Path("/proc/self/status").exists():
            raise ConfigError("a service's memory is read from /proc, which this system does not have")
        ports = _free_ports(3)
        names = DemoSetup(
            clients=clients,
            evaluators=0,
            min_clients=floor,
            key_server_port=ports[0],
            shuffler_port=ports[1],
            aggregator_port=ports[2],
        )
        config = folder / "run.toml"
        config.write_text(_TERMS)
        self.folder = folder / "federation"
        self.pins: TrustedPeers = init(self.folder, config, names)
        self.watch = Watch()
        self._log = folder / "services.log"
        self._running: dict[str, subprocess.Popen[str]] = {}

    def start(self, service: str, *options: str) -> None:
        """`ntkfl serve SERVICE`; on return it answers."""
        command = [sys.executable, "-m", "ntkfl", "serve", service, str(self.folder / service), *options]
        with open(self._log, "a") as log, block_sigint():
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=end_with_parent
            )
        self._running[service] = process
        self.watch.look_at(service, process.pid)
        assert process.stdout is not None
        until = time.monotonic() + _START_S
        for line in process.stdout:
            if re.match("listening .* service=(key-server|shuffler-aggregator)$", line):
                return
            if time.monotonic() > until:
                break
        raise ConfigError(f"the {service} did not start; its log: {self._log.read_text()[-500:]}")

    def stop(self, service: str) -> None:
        process = self._running.pop(service)
        self.watch.look_at(service, None)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def peak(self, service: str) -> float:
        """The most memory (MiB resident) it has had since it was started, as the system has seen it."""
        return _resident(self._running[service].pid, "VmHWM")

    def log(self) -> str:
        return self._log.read_text()

    @contextmanager
    def running(self) -> Iterator[World]:
        """Both services, until the end of the block."""
        with self.watch:
            try:
                self.start("key-server")
                self.start("shuffler")
                yield self
            except BaseException:
                for process in self._running.values():  # nothing of theirs is worth waiting for
                    process.kill()
                raise
            finally:
                for service in list(self._running):
                    self.stop(service)


@dataclass
class Watch:
    """Memory (MiB resident) and open files of the services, looked at twice a second from a thread."""

    every: float = 0.5
    seconds: list[float] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pids: dict[str, int | None] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._began = time.perf_counter()

    def __enter__(self) -> Watch:
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    def look_at(self, service: str, pid: int | None) -> None:
        self._pids[service] = pid

    def _look(self) -> None:
        while not self._end.wait(self.every):
            self.seconds.append(round(self.now, 2))
            for service, pid in list(self._pids.items()):
                memory, files = _resident(pid), _files(pid)
                before = len(self.seconds) - 1
                self.memory.setdefault(service, [0.0] * before).append(memory)
                self.files.setdefault(service, [0] * before).append(files)

    def between(self, service: str, first: float, last: float) -> list[float]:
        """Memory seen in a span of time."""
        return [m for s, m in zip(self.seconds, self.memory.get(service, ()), strict=False) if first <= s <= last and m]


def _resident(pid: int | None, which: str = "VmRSS") -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{which}:"):
                return round(int(line.split()[1]) / 1024, 1)
    except OSError:
        pass  # it is not there now
    return 0.0


def _files(pid: int | None) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
