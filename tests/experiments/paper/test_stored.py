"""What results/paper says is what the code says of the data stored there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ntkfl_experiments.paper import ITEMS
from ntkfl_experiments.paper.record import markdown, stored

STORED = Path(__file__).parents[3] / "results" / "paper"


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
