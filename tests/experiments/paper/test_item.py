"""Finished work is kept; what is written says where it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from ntkfl_experiments.paper.item import Context, Item, ItemResult, Verdict
from ntkfl_experiments.paper.record import commit, devices, folder_of, write

from ntkfl.errors import ConfigError


def test_an_answer_is_computed_once_and_an_interrupted_list_goes_on(tmp_path: Path) -> None:
    asked: list[int] = []

    def square(key: Mapping[str, Any]) -> int:
        if key["n"] == 3 and 3 not in asked:
            asked.append(3)
            raise KeyboardInterrupt
        asked.append(key["n"])
        return int(key["n"]) ** 2

    context = Context("quick", tmp_path / "item")
    keys = [{"n": n} for n in (1, 2, 3)]
    with pytest.raises(KeyboardInterrupt):
        context.cells("squares", keys, square)
    assert context.cells("squares", keys, square) == [1, 4, 9]
    assert asked == [1, 2, 3, 3]


def test_different_questions_about_one_key_have_different_answers(tmp_path: Path) -> None:
    context = Context("quick", tmp_path / "item")
    assert context.cells("a", [{"n": 1}], lambda key: "a") == ["a"]
    assert context.cells("b", [{"n": 1}], lambda key: "b") == ["b"]


def test_an_answer_is_the_same_computed_or_read(tmp_path: Path) -> None:
    context = Context("quick", tmp_path / "item")
    first = context.cells("a", [{"n": 1}], lambda key: {"t": (1, 2), "x": 0.1 + 0.2})
    assert first == context.cells("a", [{"n": 1}], lambda key: None) == [{"t": [1, 2], "x": 0.1 + 0.2}]


def outcome() -> ItemResult:
    return ItemResult({"n": 1}, [0], {"a": [{"devices": ["x"]}, {"devices": ["y", "x"]}]}, [
        Verdict("it falls", "0.1", "0.2", False, "a note"), Verdict("it holds", "yes", "yes", True),
    ], Figure(), ["we chose n"])  # fmt: skip


def test_a_quick_look_never_replaces_a_result(tmp_path: Path) -> None:
    item = Item("fig0", "a figure", lambda context: outcome())
    for scale, seconds in (("full", 2.0), ("quick", 1.0)):
        write(folder_of(tmp_path, "fig0", scale), item, outcome(), scale, "ntkfl reproduce fig0", seconds)  # type: ignore[arg-type]
    result = json.loads((tmp_path / "fig0" / "result.json").read_text())
    assert (result["scale"], result["seconds"]) == ("full", 2.0)
    assert json.loads((tmp_path / "fig0" / "quick" / "result.json").read_text())["scale"] == "quick"
    assert result["devices_of_runs"] == ["x", "y"]
    assert result["commit"] == commit()
    assert [f["agrees"] for f in result["findings"]] == [False, True]
    text = (tmp_path / "fig0" / "findings.md").read_text()
    assert "| it falls | 0.1 | 0.2; a note | differs |" in text
    assert "- we chose n" in text
    assert (tmp_path / "fig0" / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    item = Item("fig0", "a figure", lambda context: outcome())
    with pytest.raises(ConfigError, match="cannot write"):
        write(tmp_path / "file" / "fig0", item, outcome(), "full", "", 0)


def test_devices_are_found_at_any_depth() -> None:
    assert devices({"a": {"b": [{"devices": ["gpu"]}]}, "c": 1}) == ["gpu"]
