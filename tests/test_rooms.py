"""The picture of rooms in CONTRIBUTING.md is true: it has every room, imports point down, and there is no cycle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"ntkfl": ROOT / "src" / "ntkfl", "ntkfl_experiments": ROOT / "experiments" / "src" / "ntkfl_experiments"}


def modules() -> dict[str, Path]:
    """Dotted name → file, of both packages."""
    found = {}
    for package, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


MODULES = modules()


@cache
def imports(path: Path, whole: bool) -> frozenset[str]:
    """Modules of ours that a file imports: all it ever does, or (not `whole`) those it needs to be imported itself."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree) if whole else _at_import(tree.body):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found.update(name for name in names if name in MODULES)
    return frozenset(found)


def _at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        yield from _at_import([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def room(module: str) -> str:
    package, *parts = module.split(".")
    if package == "ntkfl_experiments":
        return "experiments"
    return parts[0] if parts else ""


def picture() -> dict[str, int]:
    """Room → its line, counted from the top."""
    block = re.search(r"```text\n(experiments .*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert block is not None
    lines = [re.split(r"\s{2,}", line)[0] for line in block[1].splitlines()]
    return {name: number for number, line in enumerate(lines) for name in line.split(", ")}


PICTURE = picture()
TOP = ("", "__main__")  # the package itself hands out what is below, and `python -m ntkfl` is the command line


def test_every_room_is_in_the_picture_and_every_room_of_the_picture_exists() -> None:
    assert {room(module) for module in MODULES} - set(TOP) == set(PICTURE)


@pytest.mark.parametrize("name", sorted(PICTURE))
def test_imports_of_a_room_point_down(name: str) -> None:
    for module, path in MODULES.items():
        if room(module) == name:
            for imported in imports(path, whole=True):
                below = room(imported)
                assert below in ("", name) or PICTURE[below] > PICTURE[name], f"{module} imports {imported}"


def test_no_two_modules_need_each_other_to_be_imported() -> None:
    graph = {module: set(imports(path, whole=False)) - {module} for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle: {' → '.join(error.args[1])}")


def test_the_jacobian_library_has_no_federated_word() -> None:
    """Somebody who only needs Jacobians reads `ntkfl.tangent` and its page without learning what a client is."""
    words = re.compile(r"federat|client|server|cohort|upload|download|participant", re.IGNORECASE)
    for path in [*(SOURCES["ntkfl"] / "tangent").rglob("*.py"), ROOT / "docs" / "tangent.md"]:
        assert words.findall(path.read_text()) == [], path


def test_no_two_public_classes_share_a_name() -> None:
    """One meaning a word: a name in an error or a traceback leads to one class. Sums are a kind of reply, and in
    `tangent` what replies of `sum-ntk-fl` hold.
    """
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1 and name != "Sums"} == {}
