"""A deployment on Flower, on one machine: a SuperLink, two workshops with their own data, and training between them.

Runs the commands of docs/flower.md as processes (TLS, node keys) and shows them as it goes; needs the extra `flower`.
On real machines the clients' folders are handed over and their commands run there; nothing else changes.
"""

import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RUN = """
inputs = [6]
outputs = 2
rounds = 2
clients = 2
clients_per_round = 2

[model]
name = "workshops:network"

[method]
name = "ntk-fl"
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def ntkfl(command: str, folder: Path, log: str = "") -> subprocess.Popen[bytes]:
    """`ntkfl COMMAND` in `folder`, with workshops.py to be found; what it says goes to a file, where one is named."""
    print(f"$ ntkfl {command}", flush=True)
    environment = os.environ | {"PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, "-m", "ntkfl", *shlex.split(command)]
    sink = open(folder / log, "wb") if log else None  # noqa: SIM115  # the process keeps it
    return subprocess.Popen(words, cwd=folder, env=environment, stdout=sink, stderr=subprocess.STDOUT if sink else None)


def wait_for(line: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    while line not in log.read_text():
        if process.poll() is not None:
            sys.exit(f"it ended: {log.read_text()}")
        time.sleep(0.1)


def main() -> None:
    root = Path(tempfile.mkdtemp(prefix="ntkfl-flower-"))
    (root / "run.toml").write_text(RUN)
    started = []
    try:
        init = ntkfl(f"flower init fl --config run.toml --clients 2 --port {free_port()}", root)
        if init.wait() != 0:
            sys.exit(init.returncode)
        started.append(ntkfl("flower server fl/server", root, "server.log"))
        wait_for("SuperLink is up", root / "server.log", started[0])
        for number, name in enumerate(("east", "west")):
            folder = f"fl/clients/client-{number}"
            # The folder names the network, workshops:network: whoever takes part says that this code may run.
            started.append(ntkfl(f"flower client {folder} --data workshops:{name} --allow-code", root, f"{name}.log"))
        training = ntkfl("flower run fl/server --out run --test workshops:test --allow-code", root)
        if training.wait() != 0:
            sys.exit(training.returncode)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
    print(f"everything is in {root}")


if __name__ == "__main__":
    main()
