"""Shared by all tests."""

from __future__ import annotations

import os
import sys

# The tests' matrices are small: a second thread costs more than it gives, here and in the processes tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.devices import processor_name

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# Where the machine is told to keep no compiled modules, each of hundreds of processes would compile the package anew, a
# fifth of a second, and every worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

LONGEST = ("tests/golden/", "tests/flower/test_shuffled.py")


def pytest_report_header() -> str:
    """What a numerical bound may have met: a failure on another processor is then told from one in the code."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {instructions}"


@pytest.fixture(scope="session")
def digits() -> ntkfl.data.Federated:
    """1,442 small pictures of digits, unevenly dealt to twenty clients."""
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.3), seed=0)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first; tests that open a page are marked as such."""
    for item in items:
        if {"browser", "open_page"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("browser")
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests on one worker."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)
