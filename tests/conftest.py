"""Shared by all tests."""

from __future__ import annotations

import os

# The tests' matrices are small: a second thread costs more than it gives, here and in the processes tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
