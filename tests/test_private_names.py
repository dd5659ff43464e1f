"""Tests see what users see: none imports, or replaces, a name that begins with an underscore."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent
OURS = ("ntkfl", "ntkfl_experiments", "tests")


def private_names(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            found += [alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "__version__"]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            names = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            parts = [name.split(".")[-1] for name in names if isinstance(name, str)]
            found += [part for part in parts if part.startswith("_") and not part.startswith(("__", "_gram_of"))]
    return found


def test_no_private_name_is_imported_or_replaced() -> None:
    found = {str(path.relative_to(ROOT)): private_names(path) for path in ROOT.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}
