"""Only Flower's public interface is used, and without Flower one line says what is missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import ntkfl

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
SOURCE = Path(ntkfl.__file__).parent


def test_the_package_imports_flowers_public_interface_alone_and_in_one_room() -> None:
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.partition(".")[0] == "flwr":
                    found.setdefault(name, set()).add(path.parent.name)
    assert found.keys() <= PUBLIC, found
    assert set().union(*found.values()) == {"flower"}


def test_without_flower_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['flwr'] = None\ntry:\n  import ntkfl.flower\nexcept Exception as e:\n  print(e)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("ntkfl.flower needs the extra 'flower': pip install"), run.stdout + run.stderr
    assert run.stdout.count("\n") == 1
