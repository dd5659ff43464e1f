"""The API page and the package agree: what is documented exists, and what is public is documented."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import ntkfl

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
DETAILS = re.findall(r"^::: ([\w.]+)$", PAGE, re.MULTILINE)
NAMED = sorted(set(re.findall(r"`(ntkfl\.[\w.]+)`", PAGE)))
ROOMS = ("data", "methods", "models", "tangent")


def find(path: str) -> object:
    """By attributes, as a reader would type it; by modules where the package does not hand them out."""
    module, _, name = path.rpartition(".")
    try:
        return import_module(path)
    except ImportError:
        return getattr(import_module(module), name)


@pytest.mark.parametrize("path", [*DETAILS, *NAMED])
def test_what_is_documented_exists(path: str) -> None:
    found = find(path)
    assert path in NAMED or (found.__doc__ or "").strip(), f"{path} has no docstring to show"


def test_every_public_name_is_documented() -> None:
    shown = [find(path) for path in DETAILS]
    for name in dir(ntkfl):
        assert f"ntkfl.{name}" in NAMED, name
        value = getattr(ntkfl, name)
        if not isinstance(value, ModuleType | str) and name != "NTKFLError":  # shown with the module of errors
            assert any(value is other for other in shown), name
    for room in ROOMS:
        module = getattr(ntkfl, room)
        for name in module.__all__:
            value = getattr(module, name)
            assert f"ntkfl.{room}.{name}" in NAMED or any(value is other for other in shown), f"{room}.{name}"


def test_completion_offers_public_names_alone() -> None:
    """In a fresh interpreter, before and after submodules were imported."""
    program = "import ntkfl; a = dir(ntkfl); import ntkfl.cli, ntkfl.federation.simulation; print(a == dir(ntkfl), *a)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", *sorted(ntkfl.__all__)]
    assert all(getattr(ntkfl, name) is not None for name in ntkfl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'federate'"):
        ntkfl.federate  # noqa: B018
