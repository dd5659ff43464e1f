"""Every TOML in configs/ is what `ntkfl compare`, `train` or `audit` reads."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ntkfl.compare.spec import Comparison
from ntkfl.federation.config import RunConfig

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: path.relative_to(CONFIGS).as_posix())
def test_a_configuration_is_one(path: Path) -> None:
    values = tomllib.loads(path.read_text())
    kind = Comparison if "methods" in values else RunConfig
    kind(**values)
