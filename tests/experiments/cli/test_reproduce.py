"""`ntkfl reproduce` as people call it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.fork_server import run


def ntkfl(*arguments: str, where: Path) -> subprocess.CompletedProcess[str]:
    return run("-m", "ntkfl", "reproduce", *arguments, directory=where)


def test_without_a_name_it_lists_all(tmp_path: Path) -> None:
    done = ntkfl(where=tmp_path)
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert (done.returncode, len(names)) == (0, 17)
    assert names[0] == "fig3"
    assert "lemma4" in names


def test_an_item_leaves_its_files_and_is_not_worked_out_twice(tmp_path: Path) -> None:
    first = ntkfl("lemma3", where=tmp_path)
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "runs" / "paper" / "lemma3" / "quick"
    assert not (tmp_path / "results").exists()  # which git tracks
    result = json.loads((folder / "result.json").read_text())
    assert (result["name"], result["scale"], result["command"]) == (
        "lemma3",
        "quick",
        "ntkfl reproduce lemma3 --scale quick",
    )
    assert {f["holds"] for f in result["findings"]} <= {True, False, None}
    answers = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("answers/*.json")}
    assert answers
    again = ntkfl("lemma3", where=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("answers/*.json")} == answers
    assert json.loads((folder / "result.json").read_text())["data"] == result["data"]
    judged = ntkfl("lemma3", "--judge", where=tmp_path)
    assert judged.returncode == 0, judged.stderr
    assert "Lemma 3" in judged.stdout
    for done in (first, judged):
        assert "verdicts of the full scale are in results/paper/lemma3/findings.md" in done.stdout
    nothing = ntkfl("fig9", "--judge", where=tmp_path)
    assert (nothing.returncode, "no result of fig9" in nothing.stderr) == (2, True)
