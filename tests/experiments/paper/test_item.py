"""Finished work is kept; what is written says where it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from ntkfl_experiments.paper import ITEMS
from ntkfl_experiments.paper.curves import judge_five
from ntkfl_experiments.paper.item import (
    Beside,
    Context,
    Findings,
    Item,
    ItemResult,
    Verdict,
    folder_of,
    markdown,
    stored,
    write,
)
from ntkfl_experiments.paper.learning import five_methods
from ntkfl_experiments.paper.settings import CENTRAL, FEDAVG, LABELLED, NOVA, OURS, PAPER, SHARE

from ntkfl.federation.config import DataConfig
from ntkfl.version import commit

STORED = Path(__file__).parents[3] / "results" / "paper"


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
        write(folder_of(tmp_path, "fig0", scale), ITEM, outcome(), scale, seconds)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("name", ITEMS)
def test_findings_are_as_the_stored_data_say(name: str) -> None:
    document = json.loads((STORED / name / "result.json").read_text())
    found = ITEMS[name].judge(document["data"])
    claims, beside = stored(found)
    stale = f"stale: ntkfl reproduce {name} --scale full --judge"
    assert document["findings"] == claims, stale
    assert document["beside"] == beside, stale
    assert (STORED / name / "findings.md").read_text() == markdown(ITEMS[name], document, found), stale


def test_a_claim_that_cannot_be_judged_says_why() -> None:
    for name in ITEMS:
        for claim in ITEMS[name].judge(json.loads((STORED / name / "result.json").read_text())["data"])[0]:
            assert claim.holds is not None or claim.note


def stamps(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("history.jsonl")}


@pytest.mark.long
def test_five_methods_on_one_federation(tmp_path: Path) -> None:
    """On the built-in digits: every curve is there, settings are the grid's, nothing runs twice."""
    data = DataConfig(dataset="digits", clients=24, alpha=0.5)
    context = Context("quick", tmp_path / "fig4", workers=2)
    outcome = five_methods(context, "digits", "digits", data)
    curves = {curve["label"]: curve for curve in outcome.data["curves"]}
    assert list(curves) == [CENTRAL, PAPER, OURS, SHARE, NOVA, FEDAVG]
    assert all([len(seed) for seed in curve["accuracy"]] == [12] for curve in curves.values())
    assert curves[FEDAVG]["setting"]["local_steps"] in (10, 50)
    assert curves[FEDAVG]["searched"] == {"lr": [0.03, 0.1], "local_steps": [10, 50]}
    assert curves[PAPER]["setting"]["steps"] == LABELLED[PAPER]["steps"]
    assert len(judge_five(outcome.data)[0]) == 5
    before = stamps(tmp_path)
    again = five_methods(context, "digits", "digits", data)
    assert (again.data, stamps(tmp_path)) == (outcome.data, before)
