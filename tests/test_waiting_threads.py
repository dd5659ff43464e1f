"""Threads that wait do not spin, unless the user says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAID = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "1"}


def ran(program: str, **said: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in SAID} | said
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)


def test_openmp_is_told_to_sleep_before_torch_is_loaded() -> None:
    reported = ran("import ntkfl, torch; torch.zeros(2)", OMP_DISPLAY_ENV="TRUE").stderr.upper()
    if "OMP_WAIT_POLICY" not in reported:
        pytest.skip("this build of torch has no OpenMP that reports its settings")
    assert "PASSIVE" in next(line for line in reported.splitlines() if "OMP_WAIT_POLICY" in line)


@pytest.mark.parametrize("name", SAID)
def test_what_the_user_says_stands(name: str) -> None:
    program = f"import ntkfl, os; print(*(os.environ.get(name) for name in {[*SAID]}))"
    assert ran(program, **{name: SAID[name]}).stdout.split() == [str({name: SAID[name]}.get(other)) for other in SAID]
