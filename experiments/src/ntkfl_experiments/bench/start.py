"""How long a command takes to begin: what its imports cost, and what comes before the first round."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from subprocess import DEVNULL, PIPE, Popen

from ntkfl_experiments.bench.timing import BenchRow, Setting

_TRAIN = ("train", "--dataset", "digits", "--rounds", "1", "--json", "--out", "run")
_COMMANDS: dict[str, tuple[str, ...]] = {
    "ntkfl train, first round": ("-m", "ntkfl", *_TRAIN),
    "ntkfl --help": ("-m", "ntkfl", "--help"),
    "import torch": ("-c", "import torch; print(flush=True)"),
}


def start(setting: Setting) -> list[BenchRow]:
    """From the call to the first line: best of seven processes, one after the other."""
    rows = []
    for what, arguments in _COMMANDS.items():
        runs = [_first_line(arguments) for _ in range(1 if setting.quick else 7)]
        seconds, cpu = min(wall for wall, _ in runs), min(cpu for _, cpu in runs)
        note = f"{cpu:.2f} s of processor time to the end of the process"
        rows.append(BenchRow(what, seconds, note=note, details={"cpu": cpu}))
    return rows


def _first_line(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Seconds until the process wrote its first line, and processor seconds that it took in all."""
    with tempfile.TemporaryDirectory() as folder:
        # Compiled modules are kept, as they are for a user, whatever the machine that measures does.
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONUNBUFFERED": "1"}
        began = time.perf_counter()
        command = [sys.executable, *arguments]
        with Popen(command, stdout=PIPE, stderr=DEVNULL, cwd=folder, env=environment) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - began
            process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not line:
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}")
    return seconds, usage.ru_utime + usage.ru_stime
