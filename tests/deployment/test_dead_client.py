"""A client killed in the middle of a run: whoever operates the federation sees it, in every place there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.report.runs import find
from ntkfl.report.view import view
from tests.deployment.roles import Roles
from tests.deployment.test_deployment import rounds, until, wait

pytestmark = pytest.mark.timeout(600)
SECONDS = 25.0  # so long that a wait is said, however slow the answers of the others are


@pytest.mark.long
def test_a_killed_client_shows_in_output_records_status_and_report(tmp_path: Path) -> None:
    """Real processes. After the first round client-1 is killed: the others' round goes on at its deadline."""
    with Roles(tmp_path, clients=3, clients_per_round=3, round_seconds=SECONDS, rounds=2, evaluators=0) as roles:
        roles.key_server()
        roles.shuffler()
        members = [roles.client(i) for i in range(3)]
        aggregator = roles.aggregator()
        until(lambda: len(rounds(roles)) == 1)
        members[1].kill()
        status = CliRunner().invoke(app, ["deploy", "status", str(roles.folder)])
        assert status.exit_code == 1
        assert "client-1, " in status.output.rpartition("problem")[2]
        assert "does not run" in status.output
        assert wait(aggregator) == 0, aggregator.output()
        whole, short = rounds(roles)
        said = aggregator.output()
    assert (whole["asked"], whole["answered"]) == (3, 3)
    assert (short["asked"], short["answered"]) == (3, 2)
    assert len(short["clients"]) == 3  # who was asked; which of them answered is not the aggregator's to know
    timings = [json.loads(line) for line in (roles.out / "timings.jsonl").read_text().splitlines()]
    assert "waited_seconds" not in timings[0]
    assert 0 < timings[1]["waited_seconds"] <= timings[1]["seconds"]
    assert re.search(r"round 2: 2 of 3 clients have answered; waits for 1 more, \d+ s at most", said)
    assert re.search(r"2 of 3 clients answered; waited \d+ s for 1", said)
    (run,) = find([roles.out])[0]
    counted = {line["kind"]: line["total"] for line in view(run)["rejected"]}
    assert counted["clients that did not answer"] == 1
    assert "seconds waited for them" in counted or timings[1]["waited_seconds"] < 0.5
