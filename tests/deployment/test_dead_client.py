"""A client killed in the middle of a run: whoever operates the federation sees it, in every place there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ntkfl.report.runs import find
from ntkfl.report.view import view
from tests.deployment.roles import Roles
from tests.deployment.test_deployment import rounds, until, wait

pytestmark = pytest.mark.timeout(600)
SECONDS = 25.0  # so long that a wait is said, however slow the answers of the others are


@pytest.mark.long
def test_a_dead_client_costs_two_waits_and_comes_back(tmp_path: Path) -> None:
    """All three are in every cohort by contract. Client-1 is killed after the first round: two rounds wait for it, the
    others do not, until it is started again; both it and the aggregator say so.
    """
    with Roles(tmp_path, clients=3, clients_per_round=3, round_seconds=8.0, rounds=12, evaluators=1) as roles:
        roles.key_server()
        shuffler = roles.shuffler()
        members = [*(roles.client(i) for i in range(3)), roles.evaluator()]
        aggregator = roles.aggregator()
        until(lambda: len(rounds(roles)) == 1)
        members[1].kill()
        until(lambda: "clients that do not answer and have not called since: 1" in aggregator.output())
        missed = len(rounds(roles))
        until(lambda: len(rounds(roles)) >= missed + 2)
        again = roles.client(1)
        until(lambda: "clients that are back after " in aggregator.output())
        assert wait(aggregator) == 0, aggregator.output()
        history = rounds(roles)
    timings = [json.loads(line) for line in (roles.out / "timings.jsonl").read_text().splitlines()]
    waits = [timing.get("waited_seconds", 0.0) for timing in timings[missed : missed + 2]]
    assert [record["answered"] for record in history[missed : missed + 2]] == [2, 2]
    assert max(waits) < 1.0, waits  # of 8 s that the two before took
    assert sum(timing.get("waited_seconds", 0.0) > 1.0 for timing in timings) <= 2
    assert history[-1]["answered"] == 3
    assert re.search(r"is back after \d+ s; heard of round \d+ last", again.output())
    assert re.search(r"clients that are back after \d+ s: 1; they were missing since round \d+", aggregator.output())
    assert "client-1" not in aggregator.output()  # all are asked in each round: whose rows are missing it is not told
    assert "1 that did not answer and have not called since are not waited for" in shuffler.output()
    assert "client-1" not in shuffler.output()  # its log names nobody


@pytest.mark.long
def test_a_killed_client_shows_in_output_records_and_report(tmp_path: Path) -> None:
    """Real processes. After the first round client-1 is killed: the others' round goes on at its deadline."""
    with Roles(tmp_path, clients=3, clients_per_round=3, round_seconds=SECONDS, rounds=2, evaluators=0) as roles:
        roles.key_server()
        roles.shuffler()
        members = [roles.client(i) for i in range(3)]
        aggregator = roles.aggregator()
        until(lambda: len(rounds(roles)) == 1)
        members[1].kill()
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
