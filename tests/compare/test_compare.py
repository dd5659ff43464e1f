"""Comparisons: equal terms, nothing computed twice, nothing chosen on the test set."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ntkfl
from ntkfl.compare.captions import caption, options
from ntkfl.compare.results import Reached, bytes_text, columns, differences, notes, spread, summarise
from ntkfl.compare.run import read_plan
from ntkfl.compare.spec import ALONE, Comparison
from ntkfl.compare.trials import Cell
from ntkfl.data.dataset import generator
from ntkfl.devices import processor_name
from ntkfl.federation.config import RunConfig, load_data
from ntkfl.federation.run_folder import RunFolder
from ntkfl.version import commit
from tests.compare.comparisons import TOML, read
from tests.fork_server import run


def test_end_to_end_and_cached(tmp_path: Path) -> None:
    """One of the settings diverges, which is a result."""
    read(tmp_path, TOML.replace("lr = [0.1, 0.3]", "lr = [0.1, 1e30]"))
    first = run("-m", "ntkfl", "compare", tmp_path / "small.toml", "--out", tmp_path / "out")
    assert first.returncode == 0, first.stderr
    assert "not in 4" in first.stdout  # nobody reaches 99.9 % in four rounds: an honest cell
    document = json.loads((tmp_path / "out/results.json").read_text())
    ntk, avg = document["rows"]
    assert document["processor"] == f"{processor_name()}, {os.cpu_count()} cores"
    assert document.get("commit") == commit()
    assert [len(c) for c in ntk["accuracy"]] == [2, 2]
    assert [len(c) for c in avg["accuracy"]] == [4, 4]
    assert avg["accuracy"] != avg["last_accuracy"]  # both curves from one run
    chosen = document["searches"]["FedAvg"]
    best = max(chosen["scores"], key=lambda point: (point["rounds"], point["score"] or 0))
    assert (best["rounds"], best["setting"]) == (2, chosen["chosen"])
    assert [point["setting"]["lr"] for point in chosen["scores"] if point["score"] is None] == [1e30, 1e30]
    assert len(chosen["scores"]) == 4
    assert set(chosen["chosen"]) == {"lr", "local_steps"}
    assert chosen["chosen"]["lr"] == 0.1
    said = " ".join(first.stdout.split())
    assert "FedAvg: searched lr in {0.1, 1e+30}; local_steps in {2, 4}" in said
    assert "on 6 held-out clients; chose lr" in said
    about, _, *table = (tmp_path / "out/table.md").read_text().splitlines()
    assert about.startswith("digits, 30 clients (Dirichlet α = 0.1), 4 per round, mlp with 12 hidden units")
    assert about.endswith("seeds 0, 1 (± is the sample standard deviation over them).")
    unequal = (
        "weights are averaged unequally, and curves differ by that, too: average is 0.9 for NTK-FL, 0.5 for FedAvg"
    )
    assert unequal in said
    for note in (
        f"- {unequal}",
        "- FedAvg − NTK-FL: ",
        "- FedAvg, accuracy on held-out clients over the last third of rounds: lr 0.",
    ):
        assert any(line.startswith(note) for line in table)
    tex = (tmp_path / "out/table.tex").read_text()
    assert r"rounds to 30\% & MiB up + down to 30\% &" in tex
    assert r" $\pm$ " in tex
    assert tex.count(r" \\") == 3
    assert len({line.count("|") for line in table[:4]}) == 1
    assert (tmp_path / "out/curves.png").stat().st_size > 10_000
    first_run = RunFolder(tmp_path / "out" / read_plan(tmp_path / "out").cells[0].folder).records()
    for way in ("uplink", "downlink"):  # cumulative, in the file as in the runs' own histories
        sent = sum(r[f"{way}_bytes"] for r in first_run[:2]) / 2**20
        assert ntk[f"{way}_mib"][0][1] == pytest.approx(sent, rel=1e-4)

    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("history.jsonl")}
    again = run("-m", "ntkfl", "compare", tmp_path / "small.toml", "--out", tmp_path / "out")
    assert again.returncode == 0, again.stderr
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("history.jsonl")} == stamps
    assert json.loads((tmp_path / "out/results.json").read_text())["rows"] == document["rows"]


def test_from_python_a_row_for_every_method_and_seed(tmp_path: Path) -> None:
    """And clients that train alone: the mean of ten of the thirty, who send nothing, and learn less than together."""
    given: dict[str, Any] = {
        "name": "small", "rounds": 3, "clients_per_round": 8, "seeds": [0, 1], "targets": [0.3], "alone": True,
        "data": {"dataset": "digits", "clients": 30}, "model": {"hidden": [12]},
        "methods": [{"label": "sums", "method": "sum-ntk-fl"}, {"label": "FedAvg", "method": "fedavg"}],
    }  # fmt: skip
    rows = ntkfl.compare(given, tmp_path / "out")
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("sums", 0), ("sums", 1), ("FedAvg", 0), ("FedAvg", 1), (ALONE, 0), (ALONE, 1),
    ]  # fmt: skip
    alone = rows[4]
    assert (alone["rounds"], alone["uplink_mib"]) == (3, 0)
    assert alone["accuracy"] < rows[0]["accuracy"]
    comparison = Comparison(**given)
    single = [h for h in (tmp_path / "out/cells").rglob("history.jsonl") if "clients" in h.read_text()]
    assert len(single) == 2 * (2 + 10)
    (data,) = {load_data(comparison.run(comparison.methods[0], 0, {}))}
    drawn = generator(0, "alone").permutation(30)[:10]
    entry = comparison.entries[-1]
    cells = [Cell("", comparison.run(entry, 0, {}), tmp_path / "out/cells", int(client)) for client in drawn]
    assert [cell.history()[-1]["samples"] for cell in cells] == [data.sizes[client] for client in drawn]
    last = [cell.history()[-1]["test_accuracy"] for cell in cells]
    assert alone["accuracy"] == pytest.approx(sum(last) / 10)


def test_rounds_and_bytes_to_a_target(tmp_path: Path) -> None:
    comparison = read(tmp_path)
    cells = []
    for seed, curve in ((0, [0.1, 0.35, 0.2, 0.4]), (1, [0.1, 0.1, 0.2, 0.31])):
        cell = Cell("x", comparison.run(comparison.methods[1], seed, {"lr": 0.1, "local_steps": 2}), tmp_path)
        cell.folder.path.mkdir()
        (cell.folder.path / "config.toml").write_text("method = { average = 0.5 }")
        for r, a in enumerate(curve, start=1):
            sent = {"uplink_bytes": 2**20, "downlink_bytes": 3 * 2**20}
            cell.folder.append("history.jsonl", {"round": r, "test_accuracy": a, "last_accuracy": a / 2, **sent})
            cell.folder.append("timings.jsonl", {"round": r, "seconds": 0.5, "device": "cpu"})
        cells.append([cell])
    row = summarise(comparison, "FedAvg", {"lr": 0.1, "local_steps": 2}, cells)
    assert row.reached[0] == Reached(0.3, [2, 4], [2.0, 4.0], [6.0, 12.0])
    assert bytes_text(row.reached[0]) == "3 + 9 = 12"
    assert bytes_text(row.reached[1]) == ""
    assert row.reached[1].rounds == [None, None]
    assert row.average == 0.5
    assert row.seconds == [[0.5, 1.0, 1.5, 2.0]] * 2
    assert spread([3.0, None, 5.0]) == "4 ± 1 (2 of 3)"
    table = {heading: cell for heading, (cell,) in columns(comparison, [row]).items()}
    assert table["rounds to 30%"] == "3.0 ± 1.4"
    assert table["rounds to 99.9%"] == "not in 4"
    assert table["% r4"] == "35.5 ± 6.4"  # mean and spread of 40 and 31
    assert table["setting"] == "average 0.5, local_steps 2, lr 0.1"


def test_differences_are_paired_by_seed_with_students_interval(tmp_path: Path) -> None:
    """Gains of 2, 4 and 6 points: 4 ± 4.303 · 2 / √3."""
    comparison = read(tmp_path, TOML.replace("seeds = [0, 1]", "seeds = [0, 1, 2]"))
    first, second = ([[a] for a in accuracies] for accuracies in ([0.5, 0.6, 0.7], [0.52, 0.64, 0.76]))
    row = summarise(comparison, "NTK-FL", {}, [[], [], []])
    row = replace(row, length=1, failed=[""] * 3)
    a, b = (replace(row, label=label, accuracy=own) for label, own in (("a", first), ("b", second)))
    assert differences([a, b]) == ["b − a: +4.0 points of final accuracy (95 % t-interval -1.0 to +9.0, 3 seeds)"]
    assert differences([a, replace(b, failed=["", "x", "x"])]) == []
    assert differences([a, replace(b, length=2)]) == []  # stopped at a target, where all that stop end


def test_unequal_averaging_is_told_where_rounds_are_averaged(tmp_path: Path) -> None:
    """A method of one round has none."""
    comparison = read(tmp_path)
    row = summarise(comparison, "NTK-FL", {}, [[], []])
    rows = [replace(row, label=label, average=own) for label, own in (("a", 0.9), ("ridge", None), ("b", 0.9))]
    assert notes(comparison, rows, {}) == []
    (line,) = notes(comparison, [*rows, replace(row, label="c", average=0.0)], {})
    assert line.endswith("average is 0.9 for a, 0.9 for b, 0 for c")


def test_no_commit_is_told_without_git_or_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as installed:  # inside a checkout that is another's
        installed.setattr("ntkfl.version.__file__", str(Path(__file__).parent / "ntkfl" / "version.py"))
        assert commit() is None
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_captions_say_what_was_run_and_every_option_that_is_not_the_default() -> None:
    method = {"name": "fedavg", "lr": 0.5, "local_steps": 20}
    config = RunConfig(data={"dataset": "digits", "clients": 30, "alpha": 0.5}, method=method)
    where = "digits, 30 clients (Dirichlet α = 0.5), 20 per round, mlp with 100 hidden units"
    assert caption(config.model_dump(mode="json")) == f"{where}, fedavg: lr 0.5"
    private = RunConfig(method={"name": "private-sums"}, privacy={"epsilon": 3.0, "secure_sum": True})
    assert options(private.model_dump(mode="json")) == ["secure_sum True", "epsilon 3"]
    own = {"method": {"name": "mine:Class", "a": [1, 2, 3, 4]}, "data": {"dataset": "mine:data"}, "robust": "on"}
    assert caption(own) == "mine:data, mine:Class: a 1 … 4, robust on"


def test_a_cells_key_is_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of the user's code is content, too: old results are not shown for an edited method."""
    monkeypatch.chdir(tmp_path)
    source = "from ntkfl.methods import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n"
    (tmp_path / "edited_method.py").write_text(source)
    data = {"dataset": "digits", "clients": 4}

    def key(label: str = "mine", name: str = "edited_method:Mine", lr: float = 0.1, **more: Any) -> str:
        return Cell(label, RunConfig(data=data, method={"name": name, "lr": lr}, **more), tmp_path).key

    before = key()
    assert before == key("other label", rounds=99, stop_at=0.5)
    assert len({before, key(seed=1), key(lr=0.2), key(name="fedavg")}) == 4
    (tmp_path / "edited_method.py").write_text(source + "    # another step\n")
    assert key() != before
