"""A SuperLink and SuperNodes as processes on loopback, asked by `flwr run`: the same weights as in one process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.flower.cases import THREE, difference, in_process, samples

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(home: Path, at: str) -> dict[str, str]:
    """Of Flower's processes: `here` is the SuperLink at this address, and our packages and tests can be imported."""
    here = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{at}"\ninsecure = true\n'
    (home / "config.toml").write_text(here)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"FLWR_HOME": str(home), "PYTHONPATH": path, "PATH": bin_first, "FLWR_TELEMETRY_ENABLED": "0"}
    return {**os.environ, **own}


@contextmanager
def running(name: str, *arguments: str, log: Path, env: dict[str, str]) -> Iterator[None]:
    """A process of Flower's beside this interpreter, with those it starts, until the block ends."""
    command = [str(Path(sys.executable).parent / name), "--insecure", *arguments]
    with open(log / f"{name}{len(list(log.iterdir()))}.log", "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=log, start_new_session=True)
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_supernodes_end_where_one_process_does(tmp_path: Path) -> None:
    log, home, out, port = tmp_path / "log", tmp_path / "home", tmp_path / "out", free_port()
    for folder in (log, home, out):
        folder.mkdir()
    at = fleet = f"127.0.0.1:{port}"
    env = environment(home, at)
    with ExitStack() as stack:
        link = ["--host", "127.0.0.1", "--port", str(port)]
        if int(version("flwr").split(".")[1]) < 41:  # nodes have a port of their own there
            fleet = f"127.0.0.1:{free_port()}"
            link += ["--fleet-api-address", fleet]
        stack.enter_context(running("flower-superlink", *link, log=log, env=env))
        wait(lambda: socket.create_connection(("127.0.0.1", port)).close())
        for number in range(2):
            node = ("--superlink", fleet, "--node-config", f"partition-id={number}", "--port", str(free_port()))
            stack.enter_context(running("flower-supernode", *node, log=log, env=env))
        command = [str(Path(sys.executable).parent / "flwr"), "run", str(Path(__file__).parent / "app"), "here"]
        subprocess.run([*command, "--run-config", f'out="{out}"'], env=env, cwd=tmp_path, check=True, timeout=120)
        deadline = time.monotonic() + 500
        while not (out / THREE[-1][0].name).exists():
            assert time.monotonic() < deadline, "\n".join(p.read_text()[-3000:] for p in log.iterdir())
            time.sleep(0.5)
        time.sleep(0.5)
    for method, make, shape, rounds in THREE:
        found = load_file(out / method.name)
        assert difference(found, in_process(method, make, samples(2, shape), rounds)) < 1e-6, method.name


def wait(connect: object, seconds: float = 30.0) -> None:
    """Until something listens."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connect()  # type: ignore[operator, no-any-return]
        except OSError:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.2)
