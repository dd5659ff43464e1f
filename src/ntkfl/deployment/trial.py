"""A whole federation as processes on this machine, started and stopped together: `ntkfl deploy try`.

Every process is a command that could be typed, with its output in a file:

    DIR/{key-server,shuffler,aggregator,clients,authority}  as `ntkfl keys init` makes them
    DIR/data        client-0.npz … test.npz
    DIR/logs        one file per process
    DIR/run         the run's folder
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ntkfl.data import Dirichlet, load
from ntkfl.data.npz import deal
from ntkfl.deployment.contract import Deployment, Federation
from ntkfl.deployment.demo_setup import DemoSetup, demo_run, init
from ntkfl.errors import ConfigError
from ntkfl.processes import block_sigint, end_with_parent

_LOOK_S = 0.1
_START_S = 60.0  # for a service to listen
_STOP_S = 12.0  # for a service to let requests under way end
_PORTS = (8441, 8442, 8443)


@dataclass(frozen=True)
class Role:
    """A process of the trial: what it is called, its command, and where its output is."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def last_line(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


class Trial:
    """In `folder`, which is new, or holds a trial that was stopped and now goes on."""

    def __init__(self, folder: Path, clients: int, rounds: int, say: Callable[[str], None] = print) -> None:
        self.folder, self.say = folder, say
        self.out, self._logs = folder / "run", folder / "logs"
        self.roles: list[Role] = []
        self._told: set[str] = set()
        if not (folder / "aggregator").exists():
            setup = DemoSetup(clients=clients, **dict(zip(_PORT_NAMES, _free_ports(), strict=True)))
            init(folder, demo_run(setup, rounds, round_seconds=30), setup)
            deal(load("digits").partition(Dirichlet(clients=clients, alpha=0.5), seed=0), folder / "data")
        elif not (folder / "data").is_dir():
            raise ConfigError(f"{folder} holds a federation, but no trial's data: give a new folder")
        self.peers = Federation.read(folder / "aggregator")
        self.settings = Deployment.read(folder / "aggregator" / "run.toml")
        self._logs.mkdir(exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """The services, and once they listen the clients and the evaluator."""
        for name in ("key-server", "shuffler"):
            self._start(name, "serve", name, self.folder / name)
        for role, url in zip(self.roles, (self.peers.key_server.url, self.peers.shuffler.url), strict=True):
            self._await_listening(role, url)
        for folder in sorted((self.folder / "clients").iterdir()):
            data = "test" if folder.name.startswith("evaluator") else folder.name
            self._start(folder.name, "join", folder, "--data", self.folder / "data" / f"{data}.npz")

    def train(self) -> int:
        """Run the aggregator, with its output here, until it ends: its exit code. A process of the trial that ends
        before is said once; without a service nothing can go on.
        """
        command = _command("aggregate", self.folder / "aggregator", "--out", self.out)
        with block_sigint():
            process = subprocess.Popen(command, env=_environment(), preexec_fn=end_with_parent)
        try:
            while process.poll() is None:
                self.check()
                time.sleep(_LOOK_S)
            return process.returncode
        finally:
            _end(process)
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h")  # its progress display had hidden the cursor

    def check(self) -> None:
        """Say which processes have ended that should not have; `ConfigError` where it is a service."""
        for role in self.roles:
            code = role.process.poll()
            if code is None or role.name in self._told or (code == 0 and role.name not in ("key-server", "shuffler")):
                continue
            self._told.add(role.name)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            if role.name in ("key-server", "shuffler"):
                raise ConfigError(f"the {role.name} {how}: {role.last_line()}; its log is {role.log}")
            self.say(f"{role.name} {how}; its log is {role.log}; start it again with: {self.command(role.name)}")

    def command(self, name: str) -> str:
        """How to start a client, as people type it."""
        data = "test" if name.startswith("evaluator") else name
        return f"ntkfl join {self.folder / 'clients' / name} --data {self.folder / 'data' / data}.npz"

    def stop(self) -> None:
        """Clients first: services then have nothing under way to wait for."""
        for role in reversed(self.roles):
            _end(role.process)
        self.roles.clear()

    def _start(self, name: str, *words: str | Path) -> None:
        log = self._logs / f"{name}.log"
        # A terminal sends Ctrl-C to all: only the one who started them hears it, and ends them in order.
        with open(log, "ab") as sink, block_sigint():
            process = subprocess.Popen(
                _command(*words),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
        self.roles.append(Role(name, process, log))

    def _await_listening(self, role: Role, url: str) -> None:
        host, _, port = url.removeprefix("https://").rpartition(":")
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            self.check()
            with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=1):
                return
            time.sleep(_LOOK_S)
        raise ConfigError(f"the {role.name} does not listen: {role.last_line()}; its log is {role.log}")


_PORT_NAMES = ("key_server_port", "shuffler_port", "aggregator_port")


def _free_ports() -> list[int]:
    """The usual ones where they are free, else any."""
    sockets = []
    try:
        for usual in _PORTS:
            try:
                sockets.append(socket.create_server(("127.0.0.1", usual)))
            except OSError:
                sockets.append(socket.create_server(("127.0.0.1", 0)))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "ntkfl", *map(str, words)]


def _environment() -> dict[str, str]:
    """Many small processes share the cores: a thread each."""
    return {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONUNBUFFERED": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
