"""A whole deployment on loopback: SuperLink, SuperNodes, clients and the server's program as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import load_file

from ntkfl.data.npz import deal
from ntkfl.flower import commands, folders
from tests.flower.federations import digits, settings
from tests.fork_server import Child

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def until(condition: Callable[[], object], what: str, timeout: float = 200) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited too long for {what}"
        time.sleep(0.05)


class Process:
    """`python ARGUMENTS` in a session of its own, so that all it starts can be ended with it; its output in a file."""

    def __init__(self, log: Path, *arguments: str | Path, command: commands.Command | None = None) -> None:
        self.log = log
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        environment |= dict(command.environment) if command else {}
        self.process: subprocess.Popen[bytes] | Child
        with open(log, "wb") as sink:
            if command is None:  # ours: it needs torch, and is forked from a process that has it
                self.process = Child(arguments, sink.fileno(), sink.fileno(), environment)
            else:
                self.process = subprocess.Popen(
                    command.arguments, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
                    start_new_session=True,
                )  # fmt: skip

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float = 250) -> int:
        return self.process.wait(timeout)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Whatever is left of it and of what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


class World:
    """Folders and processes of a deployment; everything is ended with it."""

    def __init__(self, folder: Path, method: dict[str, Any], clients: int = 4, **others: Any) -> None:
        self.folder, self.clients = folder, clients
        self.run_settings = settings(method, **({"round_seconds": 200.0, "patience": 200.0} | others))
        self.data, self.fl, self.out = folder / "data", folder / "fl", folder / "run"
        deal(digits(), self.data)
        self.write_run(folder / "run.toml")
        folders.init(self.fl, folder / "run.toml", clients, port=free_port())
        self.processes: dict[str, Process] = {}

    def write_run(self, path: Path, **changed: Any) -> None:
        values = self.run_settings.model_copy(update=changed).model_dump(mode="json", exclude_none=True)
        path.write_text(tomli_w.dumps(values))

    def start(self, name: str, *arguments: str | Path) -> Process:
        self.processes[name] = Process(self.folder / f"{name}.log", *arguments)
        return self.processes[name]

    def server(self) -> Process:
        process = self.start("server", "-m", "ntkfl", "flower", "server", self.fl / "server")
        until(lambda: "SuperLink is up" in process.output() or process.process.poll() is not None, "the SuperLink")
        assert "SuperLink is up" in process.output(), process.output() + self.superlink_log()
        return process

    def members(self, name: str, clients: dict[int, Path], attached: dict[int, int] | None = None) -> Process:
        """Clients with their data, each a process of its own that starts a SuperNode (or waits for one at a port); the
        import is theirs together.
        """
        lines = [
            ["flower", "client", str(self.client(i)), "--data", str(data), "--seed", str(self.run_settings.seed)]
            + (["--attach", f"127.0.0.1:{attached[i]}"] if attached and i in attached else [])
            for i, data in clients.items()
        ]
        return self.start(name, HERE / "members.py", json.dumps(lines))

    def supernode(self, number: int, port: int) -> Process:
        """A client's SuperNode alone, by the command that `--print` prints."""
        process = Process(
            self.folder / f"supernode-{number}.log", command=commands.supernode(self.client(number), port)
        )
        self.processes[f"supernode-{number}"] = process
        return process

    def client(self, number: int) -> Path:
        return self.fl / "clients" / f"client-{number}"

    def run(self, name: str = "run") -> Process:
        options = ("--out", self.folder / name, "--test", self.data / "test.npz")
        return self.start(name, "-m", "ntkfl", "flower", "run", self.fl / "server", *options)

    def npz(self, number: int) -> Path:
        return self.data / f"client-{number}.npz"

    def records(self, name: str = "run") -> list[dict[str, Any]]:
        path = self.folder / name / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def weights(self, name: str = "run") -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "model.safetensors")

    def superlink_log(self) -> str:
        log = self.fl / "server" / "superlink.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def supernode_log(self, number: int) -> str:
        log = self.client(number) / "supernode.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def answering_pid(self, process: str, number: int) -> int:
        """Of the process with the client's data, one of those that `members` started."""
        started = json.loads(self.processes[process].output().splitlines()[0])
        return int(started[str(self.client(number))])

    def supernode_pid(self, number: int) -> int:
        """Of the SuperNode that holds this client's key."""
        key = str(self.client(number) / "node-key")
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if key in path.read_bytes().decode(errors="replace").split("\0"):
                    found.append(int(path.parent.name))
        assert len(found) == 1, found
        return found[0]

    def story(self) -> str:
        """The last of what every process said: why a run failed is often another's to say."""
        logs = sorted(path for path in self.folder.rglob("*.log") if path.stat().st_size)
        return "\n".join(f"== {p.relative_to(self.folder)}\n{p.read_text(errors='replace')[-3000:]}" for p in logs)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.end()
