"""Finished work is kept; what is written says where it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from ntkfl_experiments.paper.item import Beside, Context, Findings, Item, ItemResult, Verdict
from ntkfl_experiments.paper.record import commit, folder_of, write


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


def outcome() -> ItemResult:
    data = {"a": [{"devices": ["x"]}, {"devices": ["y", "x"]}], "level": (0.2, 0.1)}
    return ItemResult({"n": 1}, [0], data, Figure(), ["we chose n"])


def judge(data: Mapping[str, Any]) -> Findings:
    assert data["level"] == [0.2, 0.1]  # as JSON has it
    claims = [Verdict("it falls", "0.1", "0.2", False, "a note"), Verdict("it rises", "yes", "?", None, "not tried")]
    return claims, [Beside("its width", "3")]


ITEM = Item("fig0", "a figure", lambda context: outcome(), judge)


def test_a_quick_look_never_replaces_a_result(tmp_path: Path) -> None:
    for scale, seconds in (("full", 2.0), ("quick", 1.0)):
        write(folder_of(tmp_path, "fig0", scale), ITEM, outcome(), scale, "ntkfl reproduce fig0", seconds)  # type: ignore[arg-type]
    result = json.loads((tmp_path / "fig0" / "result.json").read_text())
    assert (result["scale"], result["seconds"]) == ("full", 2.0)
    assert json.loads((tmp_path / "fig0" / "quick" / "result.json").read_text())["scale"] == "quick"
    assert result["devices_of_runs"] == ["x", "y"]
    assert result["commit"] == commit()
    assert [f["holds"] for f in result["findings"]] == [False, None]
    text = (tmp_path / "fig0" / "findings.md").read_text()
    assert "| it falls | 0.1 | 0.2; a note | does not hold |" in text
    assert "| it rises | yes | ?; not tried | cannot be judged |" in text
    assert "- its width: 3" in text
    assert "- we chose n" in text
    assert (tmp_path / "fig0" / "figure.png").read_bytes().startswith(b"\x89PNG")
