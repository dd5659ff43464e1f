"""Flower's own commands on an app: a SuperLink that simulates, on a port of its own, and `flwr run`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.flower.superlink import free_port


def environment(home: Path) -> dict[str, str]:
    """Flower's settings under `home`; this Python's commands first; nothing installed at run time or reported."""
    own = {
        "HOME": str(home),
        "FLWR_HOME": str(home / ".flwr"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    return {**os.environ, **own}


@contextmanager
def running(command: list[str], log: Path, env: dict[str, str], cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process and all that it starts, ended with the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=cwd, start_new_session=True)
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(timeout=15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def simulate(app: Path, home: Path, settings: str, nodes: int = 2, seconds: float = 200) -> str:
    """What `flwr run` says of an app in a simulation with `nodes` SuperNodes; `settings` is its run config."""
    env, port = environment(home), free_port()
    (home / ".flwr").mkdir(parents=True)
    (home / ".flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    superlink = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with running(superlink, home / "superlink.log", env, home) as process:
        wait_for(port, process)
        federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
        run = ["flwr", "run", str(app), "--stream", "--federation-config", federation, "--run-config", settings]
        done = subprocess.run(run, env=env, cwd=home, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    """Until somebody listens at the port."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"nobody listens at port {port}")
