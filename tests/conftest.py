"""Shared by all tests: float64 where exactness is asserted, few threads, no user's data or cache by accident."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
