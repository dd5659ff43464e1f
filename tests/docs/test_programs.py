"""What the programs of docs/ make is true: tables say what results/ says, pages of options what the schemas check."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ntkfl.errors import ConfigError
from ntkfl.methods import METHODS

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """A program, which belongs to no package, as a module."""
    spec = spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = load("tables")


@pytest.mark.parametrize("name", TABLES.FILES)
def test_a_table_is_as_its_results_say(name: str) -> None:
    text = (ROOT / name).read_text()
    assert TABLES.filled(text) == text, "stale: make tables"


def test_every_table_stands_somewhere() -> None:
    used = {name for file in TABLES.FILES for _, name, _ in TABLES.BLOCK.findall((ROOT / file).read_text())}
    assert used == set(TABLES.TABLES)


def hits(row: Any, target: float) -> float:
    return statistics.mean(TABLES.first_hits(row["accuracy"], target))


def percent(row: Any, round: int) -> float:
    return float(TABLES.accuracy(row, round)[0])


# Numbers in sentences: the page, what stands there, and what the results say.
SENTENCES: list[tuple[str, str, Callable[[], list[float]]]] = [
    (
        "README.md",
        r"seven rounds where FedAvg takes (\d+)",
        lambda: [hits(TABLES.rows_of("headline")["FedAvg"], 0.85)],
    ),
    (
        "README.md",
        r"FedAvg's 40-round accuracy after (\d+) rounds",
        lambda: [hits(TABLES.silo_rows("ten")["K-FAC FedAvg"], percent(TABLES.silo_rows("ten")["FedAvg"], 40) / 100)],
    ),
    (
        "docs/methods.md",
        r"without δ (\d\.\d) rounds, with t to the end or plain labels (\d\.\d)",
        lambda: [hits(TABLES.rows_of("sums/ablations")[what], 0.85) for what in ("δ = 0", "plain labels")],
    ),
    (
        "docs/privacy.md",
        r"`sum-ntk-fl` has (\d\d\.\d) % after 20 rounds of 20 clients",
        lambda: [percent(TABLES.rows_of("headline")["NTK-FL from sums"], 20)],
    ),
    (
        "docs/results.md",
        r"and (\d\.\d) times fewer than FedAvg\.",
        lambda: [
            hits(TABLES.rows_of("headline")["FedAvg"], 0.85)
            / hits(TABLES.rows_of("headline")["NTK-FL (paper settings)"], 0.85)
        ],
    ),
    (
        "docs/methods.md",
        r"after (\d+) rounds with ten clients, after (\d+) instead of (\d+) with a hundred",
        lambda: [
            hits(rows[name], percent(rows["FedAvg"], 40) / 100)
            for rows, name in (
                (TABLES.silo_rows("ten"), "K-FAC FedAvg"),
                (TABLES.silo_rows("hundred"), "K-FAC FedAvg"),
                (TABLES.silo_rows("hundred"), "FedAvg"),
            )
        ],
    ),
    (
        "docs/methods.md",
        r"has (\d+\.\d), (\d+\.\d) and (\d+\.\d) % after 10, 20 and 40 rounds",
        lambda: [percent(TABLES.rows_of("silos/resnet")["K-FAC FedAvg"], r) for r in (10, 20, 40)],
    ),
]


@pytest.mark.parametrize(("page", "sentence", "measured"), SENTENCES)
def test_a_sentence_says_what_was_measured(page: str, sentence: str, measured: Callable[[], list[float]]) -> None:
    (found,) = re.finditer(sentence, (ROOT / page).read_text())
    digits = max(len(number.partition(".")[2]) for number in found.groups())
    assert [float(number) for number in found.groups()] == [round(value, digits) for value in measured()]


def test_bounds_of_options_are_those_that_are_checked() -> None:
    """Each written bound, tried out: the value itself, where it is excluded, is refused."""
    sections = re.split(r"^#+ (.+)\n", load("site_options").method_options(), flags=re.MULTILINE)[1:]
    tables = dict(zip(sections[::2], sections[1::2], strict=True))
    tried = 0
    for name, method in METHODS.items():
        for option, cells in re.findall(r"^\| `([\w-]+)` \| (.*) \|$", tables[name], re.MULTILINE):
            values = re.split(r" (?<!\\)\| ", cells)[0]
            for sign, bound in re.findall(r"([<>≤≥]) ([\d.e+-]+)", values):
                step = 1 if "integer" in values else 1e-6
                wrong = float(bound) + {"<": 0, ">": 0, "≤": step, "≥": -step}[sign]
                with pytest.raises(ConfigError, match=option):
                    method(**{option: int(wrong) if "integer" in values else wrong})
                tried += 1
    assert tried > 60  # as many bounds as the methods have, or nothing was read
