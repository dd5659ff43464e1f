"""Threads that wait do not spin, unless the user says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAYS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def openmp(first: str, **said: str) -> str:
    """What OpenMP reports of its settings once torch is loaded after `first`."""
    environment = {k: v for k, v in os.environ.items() if k not in SAYS} | {"OMP_DISPLAY_ENV": "TRUE"} | said
    command = [sys.executable, "-c", f"{first}; import torch; torch.zeros(2)"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    if "OMP_WAIT_POLICY" not in ran.stderr:
        pytest.skip("this build of torch has no OpenMP that reports its settings")
    return next(line for line in ran.stderr.splitlines() if "OMP_WAIT_POLICY" in line).upper()


def test_openmp_is_told_to_sleep_before_torch_is_loaded() -> None:
    assert "PASSIVE" in openmp("import ntkfl")


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5000"}])
def test_what_the_user_says_stands(said: dict[str, str]) -> None:
    assert openmp("import ntkfl", **said) == openmp("pass", **said)
