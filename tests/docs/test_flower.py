"""docs/flower.md: the diff it shows is applied and run; its commands run in their order."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.flower_app import environment, free_port, simulate

pytest.importorskip("flwr", reason="needs the extra flower")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flower.md").read_text()
EXAMPLES = ROOT / "examples" / "flower"
DIFF = (EXAMPLES / "quickstart.diff").read_text()


def test_the_diff_is_shown_as_it_is_and_has_six_lines_at_most() -> None:
    shown = re.search(r"^```diff\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    changed = [line for line in DIFF.splitlines() if re.match(r"[+-](?![+-])", line)]
    assert shown is not None
    assert [line for line in shown[1].splitlines() if line[:1] in "+-"] == changed
    assert sum(line[0] == "+" for line in changed) <= 6
    assert sum(line[0] == "-" for line in changed) <= 6


@pytest.mark.long
def test_the_quickstart_learns_in_fewer_rounds_once_the_diff_is_applied(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Flower's simulation")
    app = tmp_path / "app"
    shutil.copytree(EXAMPLES / "quickstart", app)
    subprocess.run(["git", "apply", "-p1", str(EXAMPLES / "quickstart.diff")], cwd=app, check=True)
    simulate(app, tmp_path / "home", f"num-rounds=2 out='{tmp_path}/rounds.json'", nodes=10)
    rounds = json.loads((tmp_path / "rounds.json").read_text())
    assert [r["round"] for r in rounds] == [0, 1, 2]
    assert rounds[2]["accuracy"] > 0.3 > rounds[0]["accuracy"]


@pytest.mark.long
def test_a_head_is_refit_in_one_round(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Flower's simulation")
    refit = [sys.executable, str(EXAMPLES / "refit.py")]
    done = subprocess.run(refit, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=250)
    before, after = (float(a) for a in re.findall(r"round[s:].*?([\d.]+)%", done.stdout))
    assert after > before + 10, done.stdout
    assert float(re.search(r"up ([\d.]+) MB", done.stdout)[1]) < 0.2  # type: ignore[index]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_three_machines_from_nothing_in_twelve_commands(tmp_path: Path) -> None:
    """As the page says, in one shell: TLS, registered keys, two runs, and every process still there at the end."""
    if version("flwr").startswith(("1.38.", "1.39.")):
        pytest.skip("SuperNodes have a port of their own before Flower 1.40: the commands are those of newer ones")
    section = PAGE.split("## Three machines\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```console\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    assert len(commands) == 12
    text = "\n".join(commands)
    for port in ("8000", "9094", "9095"):
        text = text.replace(port, str(free_port()))
    # Whatever starts in the background is given its time: a person takes longer between two commands.
    script = (
        "set -e\n" + re.sub(r"&$", "& sleep 12", text, flags=re.MULTILINE) + "\nkill -0 $(jobs -p) && echo all here\n"
    )
    shell = subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env=environment(tmp_path), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = shell.communicate(timeout=550)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
    assert "all here" in said, said
    ends = [end.split("ClientApp-side")[0] for end in said.split("ServerApp-side")[1:]]
    runs = [re.findall(r"\d: \{'accuracy': '([\d.e+-]+)'\}", end) for end in ends]
    assert [len(run) for run in runs] == [4, 2], said  # three rounds, then one
    assert float(runs[0][-1]) > 0.7, said
