"""The contract of a method in docs/methods.md is that of the code: every hook, its arguments, every field."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from ntkfl.methods import ClientRound, Method, Outcome, Task
from ntkfl.methods.replies import Reply, Rows, Sums, Update

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
CONTRACT = PAGE.partition("### The contract")[2].partition("\n## ")[0]
FIRST_CELLS = re.findall(r"^\| (`.*?`) \|", CONTRACT, re.MULTILINE)
DOCUMENTED = dict(re.findall(r"`(\w+)(\([^)]*\))?`", " ".join(FIRST_CELLS)))


def own(cls: type) -> dict[str, object]:
    """What the class itself brings, without names for itself alone."""
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}
    return {name: value for name, value in vars(cls).items() if not name.startswith("_") and name not in inherited}


def arguments(function: object) -> list[str]:
    assert callable(function)
    return [name for name in inspect.signature(function).parameters if name != "self"]


HOOKS = {name: value for name, value in own(Method).items() if inspect.isfunction(value)}


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_there_with_its_arguments(name: str) -> None:
    written = [part.strip() for part in DOCUMENTED[name].strip("()").split(",") if part.strip()]
    assert written == arguments(HOOKS[name])


def test_no_hook_is_there_that_the_code_lacks() -> None:
    replies = {name for kind in (Reply, Rows, Update, Sums) for name in dir(kind)}
    known = {*HOOKS, "name", "paper", "replies", *replies, *own(Task), *vars_of_task(), *names(ClientRound)}
    known |= names(Outcome)
    assert set(DOCUMENTED) <= known


def vars_of_task() -> set[str]:
    source = inspect.getsource(Task.__init__)
    return {
        name for line in re.findall(r"self\.[\w, .]+ =|self\.\w+:", source) for name in re.findall(r"self\.(\w+)", line)
    }


def names(cls: type) -> set[str]:
    return {field.name for field in fields(cls)}  # type: ignore[arg-type]


def test_task_client_and_outcome_are_there_whole() -> None:
    attributes = {name for name in vars_of_task() if not name.startswith("_")}
    assert {*own(Task), *attributes} <= set(DOCUMENTED)
    assert names(ClientRound) <= set(DOCUMENTED)
    assert names(Outcome) <= set(DOCUMENTED)
