"""The site's pages of options say what the schemas check: every option, its default, its bounds."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from ntkfl.compare.spec import Comparison, Entry, Search
from ntkfl.errors import ConfigError
from ntkfl.methods import METHODS
from ntkfl.options import Options
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


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_a_method_is_there_with_its_default(name: str, tables: dict[str, Rows]) -> None:
    shown = tables["Shared by all methods"] | tables[name]
    schema = METHODS[name].model_fields
    assert set(shown) == set(schema)
    for option, (_, default, meaning) in shown.items():
        value = schema[option].get_default(call_default_factory=True)
        if value is None:
            assert default == "none", option
        else:  # as TOML writes it
            read = default.strip("`") if isinstance(value, str) else json.loads(default.strip("`"))
            assert (tuple(read) if isinstance(read, list) else read) == value, option
        assert meaning == schema[option].description


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


@pytest.mark.parametrize("schema", [Comparison, Search, Entry])
def test_every_key_of_a_comparison_is_in_the_docs_and_explained(schema: type[Options]) -> None:
    """In the file that docs/compare.md shows, which test_blocks.py holds to the schema."""
    section = (Path(__file__).parents[2] / "docs/compare.md").read_text().partition("\n## Comparisons\n")[2]
    shown = tomllib.loads(section.partition("```toml\n")[2].partition("```")[0])
    keys = {"name", *shown, *shown["search"], *(key for entry in shown["methods"] for key in entry)}
    for name, field in schema.model_fields.items():
        assert name in keys
        assert field.description, f"{schema.__name__}.{name} has no description"
