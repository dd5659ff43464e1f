"""Nothing outside `methods/` looks at which class a method is: methods answer what others ask of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ntkfl.methods
from ntkfl.methods import Method

ROOT = Path(__file__).parents[1]
METHODS = ROOT / "src" / "ntkfl" / "methods"


def classes() -> set[str]:
    """Names of all classes below `Method`; `Method` itself may be asked for, as a user can give anything."""
    found, new = set(), [Method]
    while new:
        new = [below for above in new for below in above.__subclasses__() if below.__module__.startswith("ntkfl.")]
        found |= {below.__name__ for below in new}
    return found - {"LocalTraining"}  # what local training is, is asked by who reconstructs what it was trained on


def looks_at_a_class(tree: ast.AST, names: set[str]) -> Iterator[int]:
    """Lines with `isinstance`, `issubclass`, a class pattern of `match` or `type(…) is`, of one of these classes."""
    for node in ast.walk(tree):
        about: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            about = [*node.args[1:]] if node.func.id in ("isinstance", "issubclass") else []
        elif isinstance(node, ast.MatchClass):
            about = [node.cls]
        elif isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot | ast.Eq) for op in node.ops):
            about = [*node.comparators]
        named = {n.attr if isinstance(n, ast.Attribute) else n.id
                 for part in about for n in ast.walk(part) if isinstance(n, ast.Name | ast.Attribute)}  # fmt: skip
        if named & names:
            yield node.lineno


def test_no_class_of_a_method_is_looked_at_outside_methods() -> None:
    names = classes()
    assert {type_.__name__ for type_ in ntkfl.methods.METHODS.values()} < names
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "experiments" / "src").rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        if METHODS not in path.parents
        for line in looks_at_a_class(ast.parse(path.read_text()), names)
    ]
    assert found == []


def test_the_search_finds_what_it_looks_for() -> None:
    for line in (
        "isinstance(method, NTKFL)", "isinstance(method, (int, methods.FedAvg))", "isinstance(method, NTKFL | FedAvg)",
        "issubclass(kind, FedAvg)", "match m:\n case FedAvg(): pass", "type(method) is NTKFL",
    ):  # fmt: skip
        assert list(looks_at_a_class(ast.parse(line), {"NTKFL", "FedAvg"})), line
    assert not list(looks_at_a_class(ast.parse("isinstance(method, Method)\nNTKFL(lr=1)"), {"NTKFL", "FedAvg"}))
