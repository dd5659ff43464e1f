"""What runs are found, and what is said of them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ntkfl.compare.run import read_plan
from ntkfl.errors import RunFolderError
from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import execute
from ntkfl.report.page import write_report
from ntkfl.report.runs import FoundRun, find, require
from ntkfl.report.view import rejections, view
from ntkfl.safe_parse import read_unlinked
from ntkfl.version import __version__
from tests.report.conftest import copied


def named(root: Path, name: str) -> FoundRun:
    return next(run for run in find([root]) if run.name == name)


def test_runs_and_comparisons_are_found_by_name(runs: Path) -> None:
    found = find([runs])
    names = [run.name for run in found]
    assert names[:2] == ["cut", "small: NTK-FL, seed 0"]
    assert names[-1] == "whole"
    assert len(found) == 6
    assert {run.targets for run in found} == {(), (0.4,)}
    assert {run.group for run in found if run.rounds is not None} == {
        "small: NTK-FL",
        next(n for n in names if "onerror" in n)[:-8],
    }
    assert find([runs / "small"])[0].name == "NTK-FL, seed 0"
    assert [run.name for run in find([runs / "whole"])] == ["whole"]
    assert len({run.id for run in found}) == 6


def test_a_run_says_how_it_is_getting_on(runs: Path) -> None:
    assert view(named(runs, "whole"))["text"] == "finished: 4 rounds"
    cut = named(runs, "cut")
    assert view(cut)["text"] == "stopped after 2 of 6 rounds"
    with cut.folder.locked():
        assert view(cut)["condition"] == "running"
        assert view(cut)["text"] == "running: 2 of 6 rounds"
    assert view(cut)["condition"] == "stopped"


def test_a_plan_cannot_lead_outside_its_folder(runs: Path, tmp_path: Path) -> None:
    plan = json.loads((runs / "small" / "plan.json").read_text())
    plan["cells"][0]["folder"] = "../../etc"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(RunFolderError, match="outside"):
        read_plan(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(RunFolderError, match="broken"):
        find([tmp_path])


def test_series_are_the_histories(runs: Path) -> None:
    run = named(runs, "small: NTK-FL, seed 1")
    records = run.folder.records()
    shown = view(run)
    assert shown["rounds"] == [1, 2, 3]
    for name in ("test_accuracy", "steps", "kernel_products", "solver_error", "uplink_bytes"):
        assert shown["series"][name] == pytest.approx([r[name] for r in records], rel=1e-5)
    assert sum(shown["uplink"].values()) == sum(r["uplink_bytes"] for r in records)
    assert sum(shown["downlink"].values()) == sum(r["downlink_bytes"] for r in records)
    assert shown["settings"]["method.steps"] == "50, 400"
    assert "validation_accuracy" not in shown["series"]


def test_a_comparison_cuts_its_curves(runs: Path) -> None:
    whole = named(runs, "whole")
    cut = replace(whole, rounds=3)
    assert view(cut)["rounds"] == [1, 2, 3]
    assert view(cut)["text"] == "finished: 3 rounds"
    early = replace(whole, rounds=4, stop_at=1e-9)  # any accuracy ends it
    assert view(early)["rounds"] == [1]
    assert view(early)["text"].startswith("finished: reached")


def test_a_broken_run_is_said_in_its_own_line(runs: Path, tmp_path: Path) -> None:
    for name in ("good", "bad"):
        copied(runs / "whole", tmp_path / name)
    (tmp_path / "bad" / "history.jsonl").write_text("{broken\n")
    (tmp_path / "good" / "timings.jsonl").unlink()
    bad, good = (view(run) for run in find([tmp_path]))
    assert bad["condition"] == "failed"
    assert "no JSON" in bad["text"]
    assert good["condition"] == "finished"
    assert len(good["series"]["test_accuracy"]) == 4
    assert write_report([tmp_path], tmp_path / "report.html").exists()


def test_links_in_a_run_are_not_followed(runs: Path, tmp_path: Path) -> None:
    """A folder from somebody else, whose files lead to ours: none of our words reaches the page."""
    secret = tmp_path / "secret.txt"
    secret.write_text('key = "hunter2"\n')
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "findings.json").write_text('{"verdicts": {"aggregator": "hunter2"}}')
    for name in ("config.toml", "history.jsonl", "timings.jsonl", "failed.txt", "audit"):
        run = copied(runs / "whole", tmp_path / "theirs" / name.partition(".")[0])
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(tmp_path / "ours" if name == "audit" else secret)
        found = view(named(run, run.name))
        assert (found["condition"] == "failed") == (name != "audit"), found["text"]
        assert "hunter2" not in json.dumps(found)
    error = tmp_path / "theirs" / "history.error.txt"
    error.symlink_to(secret)
    assert "hunter2" not in json.dumps(view(named(tmp_path / "theirs" / "history", "history")))
    page = write_report([tmp_path / "theirs"], tmp_path / "page.html")
    assert "hunter2" not in page.read_text()
    with pytest.raises(OSError, match="not followed"):
        read_unlinked(error)
    os.mkfifo(tmp_path / "theirs" / "history" / ".lock")
    assert not RunFolder(tmp_path / "theirs" / "history").in_use  # nobody is waited for
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):  # and does not wait for a writer
        read_unlinked(tmp_path / "pipe")


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for path, message in (("none", "no such folder"), ("file", "is a file"), ("empty", "holds no run")):
        with pytest.raises(RunFolderError, match=message):
            require([tmp_path / path])


def test_every_reason_is_counted_by_round() -> None:
    records: list[dict[str, Any]] = [
        {"round": 1},
        {"round": 2, "rejected": {"not finite": 3, "copied": 1}, "rejected_clients": 2, "byzantine": [4, 7]},
        {"round": 3, "byzantine": [], "failed": {"a": "no answer", "b": "no answer", "c": "bad data"}},
        {"round": 4, "rejected": {"not finite": 2}, "rejected_clients": 1, "solver_fallback": "steps reached"},
    ]
    assert {(line["kind"], line["why"]): (line["of"], line["counts"]) for line in rejections(records)} == {
        ("rejected", "not finite"): ("rows", [0, 3, 0, 2]),
        ("rejected", "copied"): ("rows", [0, 1, 0, 0]),
        ("clients with something rejected", ""): ("clients", [0, 2, 0, 1]),
        ("Byzantine clients", ""): ("clients", [0, 2, 0, 0]),
        ("clients that failed", "no answer"): ("clients", [0, 0, 2, 0]),
        ("clients that failed", "bad data"): ("clients", [0, 0, 1, 0]),
        ("the solver's way out", "steps reached"): ("rounds", [0, 0, 0, 1]),
    }


def test_what_canaries_proved_of_a_run_is_shown(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs / "whole", tmp_path / "private")
    (folder / "audit").mkdir()
    assert view(find([folder])[0])["audit"] == {"findings": None, "canaries": None}
    found = {"promised": 3.0004, "shown": 0.91, "holds": True}
    (folder / "audit" / "canaries.json").write_text(json.dumps(found))
    shown = view(find([folder])[0])
    assert shown["audit"]["canaries"] == found
    assert shown["caption"] == "digits, 20 clients (Dirichlet α = 0.1), 3 per round, mlp with 8 hidden units"
    assert (shown["method"], shown["version"]) == ("fedavg", __version__)
    assert shown["changed"] == ["local_steps 2"]


def test_a_private_run_states_its_guarantee_and_what_is_spent(tmp_path: Path) -> None:
    """What its settings state, what its last record spent, and nothing made up."""
    private = {"secure_sum": True, "epsilon": 2.0, "budget_rounds": 4, "noise_clients": 3}
    common: dict[str, Any] = {"rounds": 2, "clients_per_round": 4, "data": {"dataset": "digits", "clients": 6}}
    config = RunConfig(**common, model={"hidden": [8]}, method={"name": "private-sums"}, privacy=private)
    execute(config, out=tmp_path / "private")
    said = view(find([tmp_path / "private"])[0])["privacy"]
    (one,) = said["guarantees"]
    spent = RunFolder(tmp_path / "private").records()[-1]["epsilon"]
    assert 1 < one["epsilon"] < 2  # of the two rounds
    assert (one["delta"], one["unit"], one["against"]) == ("1e-05", "record", "the aggregator, 2 rounds")
    assert any("at least 3 clients of each round are honest" in line for line in one["assumptions"])
    assert said["spent"] == pytest.approx(spent, rel=1e-5)
    assert (said["floor"], said["simulated"]) == (2, True)
    assert said["masks"] == "secure sums: only totals are seen unless server and shuffler collude"
    assert "of a single client nothing" in said["sees"]["aggregator"]
    assert set(said["sees"]) == {"aggregator", "shuffler", "key server", "others"}
