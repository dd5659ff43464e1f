"""docs/paper.md names files, things in them, and commands: all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ntkfl_experiments.paper import ITEMS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "paper.md").read_text()


@pytest.mark.parametrize("place", sorted(set(re.findall(r"`([\w/]+\.py:\w+)`", TEXT))))
def test_a_name_is_where_the_map_says(place: str) -> None:
    path, name = place.split(":")
    package = ROOT / "src" / "ntkfl"
    if path.startswith("experiments/"):
        path, package = path.removeprefix("experiments/"), ROOT / "experiments" / "src" / "ntkfl_experiments"
    source = (package / path).read_text()
    assert re.search(rf"^(def|class) {name}\b|^{name}\b.*=", source, re.MULTILINE), f"{path} has no {name}"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/]+\.py)`", TEXT))))
def test_a_test_is_where_the_map_says(path: str) -> None:
    assert (ROOT / path).is_file()


def test_every_item_is_on_the_map_and_every_command_is_an_item() -> None:
    named = set(re.findall(r"`ntkfl reproduce (\w+)`", TEXT))
    assert named == set(ITEMS)
