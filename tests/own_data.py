"""A client's own file, read as `ntkfl join` does."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ntkfl.data.client import read_own
from ntkfl.data.folders import Images
from ntkfl.user_code import find_factory


def read_client(path: Path) -> tuple[Tensor, Tensor]:
    return read_own(str(path), Images(()), find_factory)
