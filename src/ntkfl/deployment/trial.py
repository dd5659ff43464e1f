"""A whole federation as processes on this machine, started and stopped together: `ntkfl deploy try`.

Every process is a command that could be typed, with its output in a file:

    DIR/{key-server,shuffler,aggregator,clients,authority}  as `ntkfl keys init` makes them
    DIR/data        client-0.npz … test.npz
    DIR/logs        one file per process
    DIR/run         the run's folder
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ntkfl.data import Dirichlet, load
from ntkfl.data.npz import deal
from ntkfl.deployment.contract import Deployment, Federation
from ntkfl.deployment.demo_setup import DemoSetup, demo_run, init, partial
from ntkfl.errors import ConfigError
from ntkfl.processes import block_sigint, end_with_parent

CLIENTS, ROUNDS = 4, 5  # of a new trial, unless given
_LOOK_S = 0.1
_START_S = 60.0  # for a service to listen
_STOP_S = 12.0  # for a service to let requests under way end
_LEAVE_S = 10.0  # for clients to leave by themselves when the run has ended
PORTS = (8441, 8442, 8443)
_SERVICES = ("key-server", "shuffler")
_AGGREGATOR = "aggregator"


@dataclass(frozen=True)
class Role:
    """A process of the trial: what it is called, its command, where its output is, and what it serves to whom."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    def last_line(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


class Trial:
    """In `folder`, which is new, or holds a trial that was stopped and now goes on. Numbers that are given must be
    those of the folder.
    """

    def __init__(
        self,
        folder: Path,
        clients: int | None = None,
        rounds: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.say = folder, say
        self.out, self._logs = folder / "run", folder / "logs"
        self.roles: list[Role] = []
        self._told: set[str] = set()
        self._lock: int | None = None
        if not (folder / _AGGREGATOR).exists():
            _make(folder, clients or CLIENTS, rounds or ROUNDS)
        elif not (folder / "data").is_dir():
            raise ConfigError(f"{folder} holds a federation, but no trial's data: give a new folder")
        self.peers = Federation.read(folder / _AGGREGATOR)
        self.settings = Deployment.read(folder / _AGGREGATOR / "run.toml")
        given = {"clients": (clients, self.settings.clients), "rounds": (rounds, self.settings.rounds)}
        differ = [
            f"--{name} is {there} there, not {own}" for name, (own, there) in given.items() if own not in (None, there)
        ]
        if differ:
            raise ConfigError(
                f"{folder} holds a trial with other options: {', '.join(differ)}; leave them out, or {_anew(folder)}"
            )
        if (self.out / "model.safetensors").exists():
            raise ConfigError(f"the trial in {folder} has ended: see it with: ntkfl report {self.out}; {_anew(folder)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """The services, and once they listen the clients, the evaluator and the aggregator."""
        self._take()
        self._logs.mkdir(exist_ok=True)
        peers = self.peers
        urls = peers.key_server.url, peers.shuffler.url
        for url in (*urls, peers.shuffler.aggregator_url):
            _refuse_taken(url)
        self.say("starts the key server and the shuffler, then the clients and the aggregator")
        for name, url in zip(_SERVICES, urls, strict=True):
            self._start(name, "serve", name, self.folder / name, url=url)
        for role in list(self.roles):
            self._await_listening(role)
        for folder in sorted((self.folder / "clients").iterdir()):
            data = "test" if folder.name.startswith("evaluator") else folder.name
            self._start(folder.name, "join", folder, "--data", self.folder / "data" / f"{data}.npz")
        self._start(_AGGREGATOR, "aggregate", self.folder / _AGGREGATOR, "--out", self.out)

    def train(self, show: Callable[[str], None]) -> int:
        """Show what the aggregator says until it ends: its exit code. A process of the trial that ends before is said
        once; without a service nothing can go on.
        """
        (aggregator,) = (role for role in self.roles if role.name == _AGGREGATOR)
        with open(aggregator.log, errors="replace") as lines:
            lines.seek(self._begun)
            while True:
                code = aggregator.process.poll()
                if said := lines.read():
                    show(said)
                if code is not None:
                    break
                self.check()
                time.sleep(_LOOK_S)
        if code == 0:
            self._let_clients_leave()
        return code

    def check(self) -> None:
        """Say which processes have ended that should not have; `ConfigError` where it is a service."""
        for role in self.roles:
            code = role.process.poll()
            if code is None or role.name in (*self._told, _AGGREGATOR) or (code == 0 and role.name not in _SERVICES):
                continue
            self._told.add(role.name)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            if role.name in _SERVICES:
                raise ConfigError(f"the {role.name} {how}: {role.last_line()}; its log is {role.log}")
            self.say(f"{role.name} {how}; its log is {role.log}; start it again with: {self.command(role.name)}")

    def command(self, name: str) -> str:
        """How to start a client, as people type it."""
        data = "test" if name.startswith("evaluator") else name
        return f"ntkfl join {self.folder / 'clients' / name} --data {self.folder / 'data' / data}.npz"

    def stop(self) -> None:
        """The aggregator and clients first: services then have nothing under way to wait for."""
        services = [role.process for role in self.roles if role.name in _SERVICES]
        _end([role.process for role in self.roles if role.process not in services])
        _end(services)
        self.roles.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self) -> None:
        """The folder is this process's until it ends."""
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise ConfigError(f"another `ntkfl deploy try` runs in {self.folder}: give another folder") from None

    def _start(self, name: str, *words: str | Path, url: str = "") -> None:
        log = self._logs / f"{name}.log"
        # A terminal sends Ctrl-C to all: only the one who started them hears it, and ends them in order.
        with open(log, "ab") as sink, block_sigint():
            self._begun = sink.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "ntkfl", *map(str, words)],
                env={"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONUNBUFFERED": "1"},  # many share the cores
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
        self.roles.append(Role(name, process, log, url))

    def _await_listening(self, role: Role) -> None:
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            self.check()
            with suppress(OSError), socket.create_connection(_address(role.url), timeout=1):
                return
            time.sleep(_LOOK_S)
        raise ConfigError(f"the {role.name} does not listen: {role.last_line()}; its log is {role.log}")

    def _let_clients_leave(self) -> None:
        """They hear that the run has ended, say so, and end by themselves."""
        until = time.monotonic() + _LEAVE_S
        members = [role.process for role in self.roles if role.name not in _SERVICES]
        while time.monotonic() < until and any(process.poll() is None for process in members):
            time.sleep(_LOOK_S)


def _make(folder: Path, clients: int, rounds: int) -> None:
    """The folder of a new trial, whole or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, and holds no trial: give a new folder")
    ports = dict(zip(("key_server_port", "shuffler_port", "aggregator_port"), _free_ports(PORTS), strict=True))
    setup, made = DemoSetup(clients=clients, **ports), partial(folder)
    try:
        init(made, demo_run(setup, rounds, round_seconds=30), setup)
        deal(load("digits").partition(Dirichlet(clients=clients, alpha=0.5), seed=0), made / "data")
        os.replace(made, folder)
    except OSError as error:
        raise ConfigError(f"cannot make the trial's folder {folder}: {error.strerror}; nothing was kept") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _anew(folder: Path) -> str:
    """How to begin another trial."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in range(2, 1000))
    return f"begin anew with: ntkfl deploy try {next(name for name in names if not name.exists())}"


def _free_ports(usual: Sequence[int]) -> list[int]:
    """These where they are free, else any."""
    sockets = []
    try:
        for port in usual:
            try:
                sockets.append(socket.create_server(("127.0.0.1", port)))
            except OSError:
                sockets.append(socket.create_server(("127.0.0.1", 0)))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("https://").rpartition(":")
    return host.strip("[]"), int(port)


def _refuse_taken(url: str) -> None:
    """`ConfigError` where another program listens: an address of a federation is in what its clients trust."""
    try:
        socket.create_server(_address(url)).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {url}: {os.strerror(error.errno or 0)}; stop what does (ss -ltnp), and the same command "
            "goes on"
        ) from None


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + _STOP_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
