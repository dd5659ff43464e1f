"""`ntkfl data` list, fetch and show."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ntkfl.cli.data import data as app
from ntkfl.data import Dirichlet, catalog, load, published


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data, in an empty folder."""
    monkeypatch.delenv("NTKFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "SYSTEM_FOLDERS", (tmp_path / "system",))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def lines(result: Result) -> dict[str, list[str]]:
    """Output lines by their first word."""
    assert result.exit_code == 0, result.output
    return {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}


def test_list_says_what_is_there_and_how_to_get_the_rest(bare: Path) -> None:
    (bare / "system" / "femnist").mkdir(parents=True)
    (bare / "system" / "femnist" / "femnist_digits.npz").touch()
    rows = lines(run("list"))
    assert rows["digits"][1:6] == ["yes", "1,442", "+", "355", "10"]
    assert rows["mnist"][1] == "download"
    assert " ".join(rows["mnist"]).endswith("11.6 MB ntkfl data fetch mnist")
    assert rows["femnist"][1] == "yes"
    assert rows["femnist"][-2:] == ["-", str(bare / "system" / "femnist")]
    assert rows["cifar10"][1:6] == ["download", "50,000", "+", "10,000", "10"]


def test_fetch_of_what_is_there_checks_it() -> None:
    result = run("fetch", "digits")
    assert result.stdout == f"digits: 1,442 training and 355 test rows, checked, {published.HERE}\n"


def test_show_prints_the_counts() -> None:
    result = run("show", "digits", "--alpha", "0.2", "--clients", "30", "--seed", "4")
    rows = lines(result)
    federated = load("digits").partition(Dirichlet(clients=30, alpha=0.2), seed=4)
    assert rows["clients"] == ["clients", "30"]
    assert "samples per client  min 48, median 48, max 49" in result.stdout
    for number in (0, 9):
        shown = [int(word) if word != "·" else 0 for word in rows[str(number)][1:]]
        assert shown == [*federated.counts()[number], federated.sizes[number]]
    assert "10" not in rows


@pytest.mark.parametrize(
    "options",
    [
        ["--partition", "iid", "--clients", "10"],
        ["--partition", "shards", "--clients", "10", "--set", "shards_per_client=3"],
        [],
    ],
)
def test_show_knows_every_partition(options: list[str]) -> None:
    rows = lines(run("show", "digits", *options))
    assert rows["clients"][1] == ("10" if options else "300")
