"""Columns that are far larger than others are named, before a run is lost to them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ntkfl.data import ByClient, Federated, from_file
from ntkfl.data.scales import scale_advice
from tests.cli.test_train import ntkfl


def table(folder: Path, scale: float = 1.0, shift: float = 0.0, first: int | None = None) -> Path:
    """40 rows of two sites with features `id` (where `first` is given), a and b."""
    file = folder / "visits.csv"
    rows = []
    for i in range(40):
        own = [f"{first + i}"] if first is not None else []
        rows.append(",".join([*own, f"{i % 7 * scale + shift}", f"{i % 3 / 3}", "ab"[i % 2], f"site {i % 2}"]))
    file.write_text("\n".join([("id," if first is not None else "") + "a,b,label,client", *rows]))
    return file


def dealt(file: Path) -> Federated:
    return from_file(file).partition(ByClient())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, []),
        ({"shift": 3000.0}, ["a"]),
        ({"scale": 1e3}, ["a"]),
        ({"first": 70_000}, ["id"]),
        ({"first": 70_000, "scale": 1e6}, ["a", "id"]),
    ],
)
def test_columns_of_extreme_scale(given: dict[str, float], named: list[str], tmp_path: Path) -> None:
    fed = dealt(table(tmp_path, **given))  # type: ignore[arg-type]
    assert re.findall(r"'(\w+)' \(", "".join(scale_advice(fed, False))) == named
    assert not scale_advice(fed.standardized(), False)


def test_a_run_names_them_and_what_to_do(tmp_path: Path) -> None:
    given = [
        "--dataset",
        table(tmp_path, first=70_000),
        *["--set", "hidden=[4]", "--rounds", "1", "--method", "fedavg"],
    ]
    told = ntkfl("train", *given)
    assert told.returncode == 2  # trained on such columns as they are, the model is worth nothing
    assert "worse than a constant prediction" in told.stderr
    assert "'id' (70,0" in told.stdout
    assert "give --standardize" in told.stdout
    standardized = ntkfl("train", *given, "--standardize")
    assert (standardized.returncode, "scale" in standardized.stdout) == (0, False)
    masked = ntkfl("train", *given, "--secure-sum")
    assert "--standardize" not in masked.stdout  # it would be refused
    assert "public numbers" in masked.stdout
