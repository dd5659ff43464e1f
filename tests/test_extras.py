"""Advice on missing extras names packages that an index has, with the bounds of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ntkfl import extras

ROOT = Path(__file__).parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", sorted(DECLARED))
def test_the_command_installs_what_the_extra_declares(extra: str) -> None:
    said = [Requirement(part.strip("'")) for part in extras.install_command(extra).removeprefix("pip install ").split()]
    assert sorted(map(str, said)) == sorted(str(Requirement(text)) for text in DECLARED[extra])


def test_no_text_sends_people_to_an_index_for_ntkfl_itself() -> None:
    places = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.*")]
    for path in [*places, ROOT / "README.md"]:
        if path.suffix in (".py", ".md"):
            assert not re.search(r"pip install (--\w+ )?('ntkfl(\[\w+\])?'|ntkfl\b(?!-))", path.read_text()), path
