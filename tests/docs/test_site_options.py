"""The site's pages of options say what the schemas check: every option, its default, its bounds."""

from __future__ import annotations

import re

import pytest

from ntkfl.errors import ConfigError
from ntkfl.methods import METHODS
from tests.docs.hooks import load

Rows = dict[str, list[str]]


def rows(page: str) -> dict[str, Rows]:
    """The tables of a page by heading: an option's cells by its name."""
    sections = re.split(r"^#+ (.+)\n", page, flags=re.MULTILINE)[1:]
    found = {}
    for heading, text in zip(sections[::2], sections[1::2], strict=True):
        lines = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", text, re.MULTILINE)
        found[heading] = {name: re.split(r" (?<!\\)\| ", rest) for name, rest in lines}
    return found


HOOK = load("site_options")


@pytest.fixture(scope="module")
def tables() -> dict[str, Rows]:
    return rows(HOOK.method_options())


def test_bounds_are_those_that_are_checked(tables: dict[str, Rows]) -> None:
    """Each written bound, tried out: the value itself, where it is excluded, is refused."""
    tried = 0
    for name, method in METHODS.items():
        for option, (values, *_) in tables[name].items():
            for sign, bound in re.findall(r"([<>≤≥]) ([\d.e+-]+)", values):
                step = 1 if "integer" in values else 1e-6
                wrong = float(bound) + {"<": 0, ">": 0, "≤": step, "≥": -step}[sign]
                with pytest.raises(ConfigError, match=option):
                    method(**{option: int(wrong) if "integer" in values else wrong})
                tried += 1
    assert tried > 60  # as many bounds as the methods have, or nothing was read
