"""`ntkfl train --private`: what it sets, what it says, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.cli.settings import private_settings
from ntkfl.data.files import from_file
from ntkfl.errors import ConfigError
from ntkfl.federation.run_folder import RunFolder
from ntkfl.report.runs import find
from ntkfl.report.view import view
from tests.cli.test_train import ntkfl

SMALL = ["--dataset", "digits", "--clients", "8", "--set", "hidden=[8]", "--rounds", "2", "--private"]


def test_a_private_run_says_what_it_promises_and_keeps_to_it(tmp_path: Path) -> None:
    done = ntkfl("train", *SMALL, "--set", "epsilon=30", "--out", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    promised = [
        line for line in done.stdout.splitlines() if line.startswith(("private (simulated):", "if at least 8 of 8"))
    ]
    seen = "against whoever sees the sums or the models"
    assert promised[0] == f"private (simulated): ε = 30, δ = 1e-05 for a record over 2 rounds, {seen}"
    honest = "if at least 8 of 8 clients are honest"
    assert promised[1] == f"{honest} and server and shuffler do not collude"
    assert "simulated: one process has all data" in done.stdout
    assert "privacy spent: ε = 30 (simulated) at δ = 1e-05 for a record" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "a" / "history.jsonl").read_text().splitlines()]
    assert records[-1]["epsilon"] == pytest.approx(30)
    assert (records[-1]["unit"], records[-1]["delta"], records[-1]["train_loss"]) == ("record", 1e-5, None)
    assert [len(record["clients"]) for record in records] == [8, 8]
    config = (tmp_path / "a" / "config.toml").read_text()
    assert "secure_sum = true" in config
    assert "budget_rounds = 2" in config


def test_defaults() -> None:
    found = private_settings({})
    assert (found["rounds"], found["clients_per_round"]) == (20, 300)
    assert found["method"] == {"name": "private-sums"}
    assert found["privacy"] == {
        "secure_sum": True, "epsilon": 3.0, "delta": 1e-5, "budget_rounds": 20, "noise_clients": 270,
    }  # fmt: skip
    told = private_settings({"rounds": 5, "clients_per_round": 20, "privacy": {"epsilon": 1.0, "noise_clients": 10}})
    own = told["privacy"]
    assert (own["epsilon"], own["budget_rounds"], own["noise_clients"]) == (1.0, 5, 10)


@pytest.mark.parametrize(
    "given",
    [
        {"privacy": {"secure_sum": False}},
        {"privacy": {"shuffle": True}},
        {"privacy": {"epsilon": None}},
        {"privacy": {"budget_rounds": 3}, "rounds": 4},
        {"method": {"name": "private-ridge"}, "rounds": 2},
        {"data": {"partition": "writer"}},
        {"hold_out": 3},
        {"byzantine": {"kind": "sign-flip"}},
    ],
)
def test_what_would_void_the_promise_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--private"):
        private_settings(given)


def test_the_test_fifth_of_a_file_is_outside_the_promise(tmp_path: Path) -> None:
    file = tmp_path / "sites.csv"
    file.write_text("a,label,client\n" + "".join(f"{i}.5,{i % 2},site-{i % 6}\n" for i in range(60)))
    small = "--set hidden=[4] --rounds 1 --clients-per-round 6 --set epsilon=30"
    given = ["--dataset", file, "--set", 'classes=["0", "1"]', *small.split()]
    done = ntkfl("train", *given, "--private", "--out", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    held = len(from_file(file).test_rows)
    words = f"the {held} test samples, a random part of the file's rows: the server measures on them as they are"
    assert f"not covered: {words}" in done.stdout
    assert f'uncovered = "{words}"' in (tmp_path / "a" / "config.toml").read_text()
    assert view(find([tmp_path / "a"])[0])["privacy"]["uncovered"] == words
    plain = ntkfl("train", *given[:-2], "--method", "fedavg", "--out", tmp_path / "b")
    assert "covered" not in plain.stdout + (tmp_path / "b" / "config.toml").read_text()  # nothing is promised


@pytest.mark.parametrize("name", ["sum-ridge", "private-ridge"])
def test_ridge_makes_the_same_promise(name: str) -> None:
    given = ["--method", name, "--rounds", "1", "--clients", "20", "--set", "epsilon=3"]
    done = ntkfl("train", *SMALL, *given)
    assert done.returncode == 0, done.stderr
    assert (
        "private (simulated): ε = 3, δ = 1e-05 for a record over 1 round, against whoever sees the sums" in done.stdout
    )
    assert "if at least 18 of 20 clients are honest" in done.stdout
    assert "privacy spent: ε = 3 (simulated) at δ = 1e-05 for a record" in done.stdout


def test_a_run_says_whether_rows_hold_inputs() -> None:
    small = "--dataset digits --clients 4 --set hidden=[4] --rounds 1 --clients-per-round 2"
    rows = ntkfl("train", *small.split(), "--method", "ntk-fl").stdout
    assert rows.count("ntk-fl sends rows that contain the inputs") == 1
    assert "contain the inputs" not in ntkfl("train", *small.split(), "--method", "fedavg").stdout


def weights_of(run: Path, *more: str) -> bytes:
    done = ntkfl("train", *SMALL, "--set", "epsilon=30", *more, "--out", run)
    assert done.returncode == 0, done.stderr
    assert "warning: delta" not in done.stdout
    return (run / "model.safetensors").read_bytes()


def test_noise_is_other_every_time_unless_it_is_to_repeat(tmp_path: Path) -> None:
    """The operating system's noise; with `repeatable` that of the seed."""
    assert weights_of(tmp_path / "a") != weights_of(tmp_path / "b")
    again = ("--set", "repeatable=true")
    assert weights_of(tmp_path / "c", *again) == weights_of(tmp_path / "d", *again)


def test_a_delta_that_may_publish_a_record_is_warned_of() -> None:
    done = ntkfl("train", *SMALL, "--set", "epsilon=30", "--set", "delta=0.01")
    assert "warning: delta = 0.01 allows publishing one record of the " in done.stdout


def test_a_stopped_private_run_says_for_how_many_rounds_epsilon_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds began and two are whole: the noise of the third counts."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    for number in (1, 2, 3):
        folder.append("attempts.jsonl", {"round": number})
        if number < 3:
            folder.append("history.jsonl", {"round": number})

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ntkfl.federation.simulation.execute", stop)
    words = ["train", *SMALL, "--rounds", "10", "--out", str(folder.path)]
    said = " ".join(CliRunner().invoke(app, words).stderr.split())
    command = f"continue with: ntkfl train --resume --out {folder.path}"
    why = "(interrupted rounds count for ε, too)"
    assert said.endswith(f"stopped after 2 whole rounds {why}; {command} --rounds 9")
    # whoever bought ε for more rounds than are played has not run short
    said = " ".join(CliRunner().invoke(app, [*words, "--set", "budget_rounds=11"]).stderr.split())
    assert said.endswith(f"stopped after 2 whole rounds; {command}")
