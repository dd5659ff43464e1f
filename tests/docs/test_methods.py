"""The contract of a method in docs/methods.md is that of the code: every hook, its arguments, every field."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from ntkfl.methods import ClientRound, Method, Outcome, Task
from ntkfl.methods.replies import Reply, Rows, Sums, Update

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
CONTRACT = PAGE.partition("### The contract")[2].partition("\n## ")[0]
FIRST_CELLS = re.findall(r"^\| (`.*?`) \|", CONTRACT, re.MULTILINE)
DOCUMENTED = dict(re.findall(r"`(\w+)(\([^)]*\))?`", " ".join(FIRST_CELLS)))


def own(cls: type) -> dict[str, Any]:
    """What the class itself brings, without names for itself alone."""
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}
    return {name: value for name, value in vars(cls).items() if not name.startswith("_") and name not in inherited}


HOOKS = {name: value for name, value in own(Method).items() if inspect.isfunction(value)}
SET = re.findall(r"self\.([\w, .]+)(?: =|:)", inspect.getsource(Task.__init__))  # attributes, several to a line
ATTRIBUTES = {name for line in SET for name in line.replace("self.", "").split(", ") if not name.startswith("_")}
FIELDS = {field.name for kind in (ClientRound, Outcome) for field in fields(kind)}


def test_every_hook_is_there_with_its_arguments() -> None:
    written = {
        name: [part.strip() for part in DOCUMENTED[name].strip("()").split(",") if part.strip()] for name in HOOKS
    }
    assert written == {name: [*inspect.signature(hook).parameters][1:] for name, hook in HOOKS.items()}


def test_task_client_and_outcome_are_there_whole_and_nothing_that_the_code_lacks() -> None:
    whole = {*own(Task), *ATTRIBUTES, *FIELDS}
    assert whole <= set(DOCUMENTED)
    replies = {name for kind in (Reply, Rows, Update, Sums) for name in dir(kind)}
    assert set(DOCUMENTED) <= {*HOOKS, *whole, *replies, "name", "paper", "replies"}
