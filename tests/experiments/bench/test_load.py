"""The services under a small load, from this process: nothing lost, nothing doubled, and who is too many waits."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ntkfl_experiments.bench.load.clients import Tally, owner, row
from ntkfl_experiments.bench.load.run import Load, run
from ntkfl_experiments.bench.load.write import figures, write

from ntkfl.errors import ConfigError, MessageError

pytest.importorskip("httpx", reason="needs the extra services")


@pytest.mark.long
def test_a_small_load_with_hostile_company(tmp_path: Path) -> None:
    """Twenty uploads of 0.5 MB at once, by 40 clients in turn, with six tricks played; then with room for two."""
    load = Load(clients=40, at_once=20, rows=40, row_bytes=12_000, weights=20_000, seconds=1, hostile=6)
    said: list[str] = []
    with ThreadPoolExecutor(1) as alone:  # a browser that another test drives leaves an event loop in this thread
        document = alone.submit(run, load, tmp_path, lambda line, left: said.append(line)).result()
    rounds = document["rounds"]
    assert [r["phase"] for r in rounds[-2:]] == ["pressure", "pressure"]
    assert len(rounds) >= 4
    for played in rounds:
        assert (played["rows"], played["lost"], played["duplicated"]) == (800, 0, 0)
        assert played["upload"]["requests"] == 20
    assert document["totals"]["sent_twice_and_refused"] == 2 * document["totals"]["rounds"]
    assert document["enrolment"]["key_server"]["requests"] == 80
    under_load = sum(r["phase"] == "load" for r in rounds)
    assert document["totals"]["key_server"]["requests"] == 20 * under_load
    assert document["totals"]["key_server"]["per_second"] > 0
    assert document["pressure"]["held_mib"] == 1
    assert document["pressure"]["turned_away"] > 0  # told so, came back, and all of it arrived
    memory = document["pressure"]["memory"]
    assert 0 < memory["idle_mib"] <= memory["peak_mib"] < document["pressure"]["held_mib"] + 250
    met = document["hostile"]
    assert met["a stranger's rows: 401"] >= 1
    assert met["a body too large: 413"] >= 1
    told = figures(document)
    assert "0 lost, 0 duplicated" in told["rows at the aggregator's end"]
    assert f"{20 * under_load} requests" in told["key server, ρ asked for again by all who upload"]
    assert f"{memory['peak_mib']:.0f} MiB at most" in told["with room for 1 MiB of uploads"]
    files = write(document, tmp_path / "out", ["ntkfl", "serve", "load"])
    assert json.loads(files[0].read_text())["totals"]["lost"] == 0
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_a_changed_row_is_seen() -> None:
    plain = row("client-3", 7, 2, 500)
    assert len(plain) == 500
    assert owner(plain) == ("client-3", 7, 2)
    for at in (0, 12, 499):
        with pytest.raises((MessageError, ValueError)):
            owner(plain[:at] + bytes([plain[at] ^ 1]) + plain[at + 1 :])


def test_percentiles_by_hand() -> None:
    tally = Tally(seconds=[0.1 * i for i in range(1, 11)])
    assert tally.percentile(0.5) == pytest.approx(0.6)
    assert tally.percentile(0.99) == pytest.approx(1.0)
    tally.statuses.update([200, 503, 503, 429, 409])
    assert tally.turned_away == 3


def test_a_load_that_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="upload at once"):
        Load(clients=5, at_once=6)
