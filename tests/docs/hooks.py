"""The programs of docs/, which belong to no package, as modules."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(name, Path(__file__).parents[2] / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
