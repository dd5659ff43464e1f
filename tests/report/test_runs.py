"""What runs are found, and what is said of them."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ntkfl
from ntkfl.cli import app
from ntkfl.compare.plan import read_plan
from ntkfl.errors import ConfigError, RunFolderError
from ntkfl.federation.run_folder import RunFolder
from ntkfl.report.insight import KEPT, insight
from ntkfl.report.page import write_report
from ntkfl.report.runs import condition, find, history, require
from ntkfl.report.view import audit, files, view


def named(root: Path, name: str):  # type: ignore[no-untyped-def]
    return next(run for run in find([root])[0] if run.name == name)


def test_runs_and_comparisons_are_found_by_name(runs: Path) -> None:
    found, targets = find([runs])
    names = [run.name for run in found]
    assert names[:2] == ["cut", "small: NTK-FL, seed 0"]
    assert names[-1] == "whole"
    assert len(found) == 6
    assert targets == (0.4,)
    assert {run.group for run in found if run.rounds is not None} == {
        "small: NTK-FL",
        next(n for n in names if "onerror" in n)[:-8],
    }
    assert find([runs / "small"])[0][0].name == "NTK-FL, seed 0"
    assert [run.name for run in find([runs / "whole"])[0]] == ["whole"]
    assert len({run.id for run in found}) == 6


def test_numbered_runs_are_in_the_order_of_their_numbers(runs: Path, tmp_path: Path) -> None:
    for name in ("run-10", "run-9", "7", "run-1b", "run-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_bytes((runs / "whole" / "config.toml").read_bytes())
    assert [run.name for run in find([tmp_path])[0]] == ["7", "run-1", "run-1b", "run-9", "run-10"]


def test_a_page_of_one_run_is_beside_it_unless_told_otherwise(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        shutil.copytree(runs / "whole", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").write_text("of another run")
    made = CliRunner().invoke(app, ["report", "a"])
    assert (made.exit_code, made.stdout) == (0, "a/report.html\n")
    assert "reading a" in made.stderr
    assert (tmp_path / "report.html").read_text() == "of another run"
    assert CliRunner().invoke(app, ["report", "a", "b"]).stdout == "report.html\n"


def test_a_run_says_how_it_is_getting_on(runs: Path) -> None:
    assert view(named(runs, "whole"))["text"] == "finished: 4 rounds"
    cut = named(runs, "cut")
    assert view(cut)["text"] == "stopped after 2 of 6 rounds"
    with cut.folder.locked():
        assert view(cut)["condition"] == "running"
        assert view(cut)["text"] == "running: 2 of 6 rounds"
    assert view(cut)["condition"] == "stopped"


def test_looking_does_not_keep_a_run_from_its_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    with folder.locked():
        assert folder.in_use
    for _ in range(50):
        assert not folder.in_use
        with folder.locked():
            pass


def test_a_cell_that_failed_or_has_not_begun(runs: Path, tmp_path: Path) -> None:
    plan = json.loads((runs / "small" / "plan.json").read_text())
    plan["cells"] = plan["cells"][:2]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    first, second = find([tmp_path])[0]
    assert condition(first, {}, []).kind == "waiting"
    second.folder.path.mkdir(parents=True)
    (second.folder.path / "failed.txt").write_text("the loss is not finite")
    assert view(second)["text"] == "failed: the loss is not finite"


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
    assert [r["round"] for r in history(cut)] == [1, 2, 3]
    assert view(cut)["text"] == "finished: 3 rounds"
    early = replace(whole, rounds=4, stop_at=1e-9)  # any accuracy ends it
    assert len(history(early)) == 1
    assert view(early)["text"].startswith("finished: reached")


def test_a_broken_run_is_said_in_its_own_line(runs: Path, tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        for file in ("config.toml", "history.jsonl", "timings.jsonl"):
            (tmp_path / name / file).write_bytes((runs / "whole" / file).read_bytes())
    (tmp_path / "bad" / "history.jsonl").write_text("{broken\n")
    (tmp_path / "good" / "timings.jsonl").unlink()
    bad, good = (view(run) for run in find([tmp_path])[0])
    assert bad["condition"] == "failed"
    assert "no JSON" in bad["text"]
    assert good["condition"] == "finished"
    assert len(good["series"]["test_accuracy"]) == 4
    assert write_report([tmp_path], tmp_path / "report.html").exists()


def test_a_run_of_endless_rounds_is_said_in_its_own_line(runs: Path, tmp_path: Path) -> None:
    text = (runs / "whole" / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(re.sub("(?m)^rounds = .*$", "rounds = inf", text))
    (run,) = find([tmp_path])[0]
    assert view(run)["condition"] == "failed"
    assert "infinity" in view(run)["text"]


def test_links_to_elsewhere_are_not_followed(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").symlink_to(runs / "whole")
    (tmp_path / "own").mkdir()
    for file in ("config.toml", "history.jsonl"):
        (tmp_path / "own" / file).symlink_to(runs / "whole" / file)
    (run,) = find([tmp_path])[0]
    assert run.name == "own"
    assert files(run) == {}


@pytest.mark.parametrize(
    ("make", "message"), [("none", "no such folder"), ("file", "is a file"), ("empty", "holds no run")]
)
def test_what_is_no_run_is_refused_in_one_line(make: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / make
    if make == "file":
        path.write_text("")
    elif make == "empty":
        path.mkdir()
    with pytest.raises(RunFolderError, match=message):
        require([path])


def test_where_a_report_cannot_be_written(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.html"):
        write_report([runs], tmp_path / "report.pdf")
    with pytest.raises(ConfigError, match="no folder"):
        write_report([runs], tmp_path / "none" / "report.html")


def test_spectra_are_the_kernels_of_the_first_and_last_weights(runs: Path) -> None:
    """Against a run rebuilt by hand: data, cohort, first weights and the checkpoint's."""
    run = named(runs, "whole")
    found = insight(run)
    records, state = run.folder.records(), run.folder.load_checkpoint()[1]
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.1), seed=0)
    assert found["clients"]["counts"] == fed.counts().tolist()
    assert found["clients"]["title"] == "digits, Dirichlet α = 0.1, composition, seed 0"
    x = torch.cat([fed.client(i)[0] for i in records[-1]["clients"]])
    model = ntkfl.models.mlp(64, 8, 10)
    with torch.no_grad():
        for p, w in zip(model.parameters(), state["state/weights"].split([512, 8, 80, 10]), strict=True):
            p.copy_(w.view_as(p))
    H = ntkfl.jacobian(model, x[:: math.ceil(len(x) / 256)], form="dense").kernel()
    first, last = found["spectra"]
    assert last["label"] == "after round 4"
    expected = torch.linalg.eigvalsh(H.double() / len(H)).flip(0)
    torch.testing.assert_close(torch.tensor(last["values"][:20]).double(), expected[:20], rtol=2e-3, atol=1e-6)
    assert first["values"] != last["values"]
    assert insight(run) == json.loads((run.folder.path / KEPT).read_text())


def test_a_run_made_in_python_keeps_its_classes_and_spectra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data and network are its user's, and no report can rebuild them."""
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=20, alpha=0.1), seed=0)
    torch.manual_seed(3)
    model = ntkfl.models.mlp(64, 8, 10)
    method = ntkfl.methods.FedAvg(local_steps=2, lr=0.1)
    trained = ntkfl.train(model, fed, method, rounds=2, clients_per_round=3, out=tmp_path / "own", callbacks=[])
    found = insight(named(tmp_path, "own"), keep=False)
    assert found["clients"]["counts"] == fed.counts().tolist()
    first, last = found["spectra"]
    assert (first["label"], last["label"]) == ("round 1", "after round 2")
    x = torch.cat([fed.client(i)[0] for i in trained.history[0]["clients"]])
    H = ntkfl.jacobian(model, x[:: math.ceil(len(x) / 256)], form="dense").kernel()
    expected = torch.linalg.eigvalsh(H.double() / len(H)).flip(0)
    torch.testing.assert_close(torch.tensor(first["values"][:20]).double(), expected[:20], rtol=2e-3, atol=1e-6)
    assert first["values"] != last["values"]

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("ntkfl.federation.insight.jacobian", out_of_memory)
    again = ntkfl.train(model, fed, method, rounds=2, clients_per_round=3, out=tmp_path / "again", callbacks=[])
    assert again.history == trained.history  # the run itself is none the worse
    found = insight(named(tmp_path, "again"), keep=False)
    assert found["clients"]["counts"] == fed.counts().tolist()
    assert found["spectra_missing"] == "could not be computed (MemoryError)"


def test_what_cannot_be_rebuilt_is_skipped_by_name(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = (runs / "whole" / "config.toml").read_text()
    cases = {
        "mine": (re.sub(r'name = "mlp"(.|\n)*?\n\[', 'name = "os:system"\n[', config), "and a report runs none"),
        "gone": (config.replace('"digits"', '"femnist"'), "femnist is not on this machine"),
        "elsewhere": (config.replace("simulation = true", "simulation = false"), "clients' own"),
    }
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("NTKFL_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    for name, (text, why) in cases.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(text)
        found = insight(named(tmp_path, name))
        assert why in found["clients_missing"]
        assert why in found["spectra_missing"]
        assert not (tmp_path / name / KEPT).exists()


def test_an_audit_is_shown_where_there_is_one(runs: Path) -> None:
    assert audit(named(runs, "cut")) is None
    found = audit(named(runs, "whole"))
    assert found["findings"][0]["mean"] == 0.913


@pytest.mark.parametrize(
    "change",
    [
        {"folder": 5},
        {"folder": "a\0b"},
        {"folder": "a" * 5000},
        {"rounds": "x"},
        {"rounds": -5},
        {"seed": {}},
        {"stop_at": "x"},
    ],
)
def test_a_plan_with_a_value_of_another_kind_is_broken(change: dict[str, object], runs: Path, tmp_path: Path) -> None:
    plan = json.loads((runs / "small" / "plan.json").read_text())
    plan["cells"][0] |= change
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(RunFolderError, match=r"plan\.json is broken") as caught:
        read_plan(tmp_path)
    assert "\n" not in str(caught.value)
