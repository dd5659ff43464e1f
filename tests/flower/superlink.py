"""Flower's own processes on loopback: a SuperLink, SuperNodes, and `flwr run` of an app that a test module holds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
APP = """[project]
name = "app"
version = "1.0.0"
description = "An app of the tests."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "ntkfl"
[tool.flwr.app.components]
serverapp = "the_app:server"
clientapp = "the_app:client"
[tool.flwr.app.config]
out = ""
folder = ""
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Fleet:
    """Processes in a folder, by name: "link" and the partitions of SuperNodes. The app is `server` and `client` of a
    test's `module`; its run config has `out` and `folder`.
    """

    def __init__(self, folder: Path, module: str) -> None:
        self.folder, self.port = folder, free_port()
        self.at = self.fleet = f"127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "app").mkdir()
        code = f"from tests.flower import {module} as app\n\nserver = app.server\nclient = app.client\n"
        here = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{self.at}"\ninsecure = true\n'
        for name, text in {"app/pyproject.toml": APP, "app/the_app.py": code, "config.toml": here}.items():
            (folder / name).write_text(text)
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        own = {"FLWR_HOME": str(folder), "PYTHONPATH": path, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        self.how: dict[str, Any] = {"env": os.environ | own | {"FLWR_TELEMETRY_ENABLED": "0"}, "cwd": folder}

    def __enter__(self) -> Fleet:
        link = ["--host", "127.0.0.1", "--port", str(self.port)]
        if int(version("flwr").split(".")[1]) < 41:  # nodes have a port of their own there
            self.fleet = f"127.0.0.1:{free_port()}"
            link += ["--fleet-api-address", self.fleet]
        self._link = link
        self.start_link()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.processes:
            self.kill(name)

    def start_link(self) -> None:
        self._start("link", "flower-superlink", *self._link)
        self.until(self.listens)

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def start_node(self, number: int, config: str = "") -> None:
        config, own = f"partition-id={number} {config}".strip(), str(free_port())
        self._start(str(number), "flower-supernode", "--superlink", self.fleet, "--node-config", config, "--port", own)

    def _start(self, name: str, command: str, *arguments: str) -> None:
        """In a process group of its own."""
        line = [str(BIN / command), "--insecure", *arguments]
        with (self.folder / f"{name}.log").open("a") as out:
            self.processes[name] = subprocess.Popen(line, stdout=out, stderr=out, start_new_session=True, **self.how)

    def kill(self, name: str) -> None:
        """Its group; what Flower started in groups of their own ends when it sees that."""
        process = self.processes[name]
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def run(self, **config: object) -> None:
        given = ["--run-config", " ".join(f'{name}="{value}"' for name, value in config.items())]
        subprocess.run([str(BIN / "flwr"), "run", "app", "here", *given], check=True, timeout=120, **self.how)

    def until(self, true: Callable[[], bool], seconds: float = 500) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, "\n".join(p.read_text()[-4000:] for p in self.folder.glob("*.log"))
            time.sleep(0.2)
