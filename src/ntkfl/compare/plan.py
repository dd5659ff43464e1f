"""What a comparison set out to run, written down before it runs: whoever looks meanwhile knows each cell's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from ntkfl.atomic import write_atomically
from ntkfl.compare.search import Chosen
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell
from ntkfl.errors import ConfigError, RunFolderError
from ntkfl.options import Options
from ntkfl.safe_parse import parse_json, read_unlinked

PLAN = "plan.json"


class Planned(Options):
    """One cell: its curve's label, its folder, and the length it is cut at."""

    label: str
    seed: int
    folder: str = Field(max_length=200)  # relative to the comparison's
    rounds: int = Field(gt=0)
    stop_at: float | None = None


class Plan(Options):
    """A comparison's name, the accuracies it reports, and its cells."""

    name: str
    targets: tuple[float, ...]
    cells: tuple[Planned, ...]


def write_plan(folder: Path, comparison: Comparison, cells: Sequence[Cell]) -> None:
    planned = [
        Planned(label=c.label, seed=c.config.seed, folder=path, rounds=c.config.rounds, stop_at=c.config.stop_at)
        for c in cells
        for path in [str(c.folder.path.relative_to(folder))]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(name=comparison.name, targets=comparison.targets, cells=tuple(planned))
    write_atomically(folder / PLAN, plan.model_dump_json(indent=1).encode())


def read_plan(folder: Path) -> Plan:
    """The plan in `folder`. A folder's name in it never leads outside."""
    path = folder / PLAN
    try:
        plan = Plan(**parse_json(read_unlinked(path).decode()))
        inside = all((folder / cell.folder).resolve().is_relative_to(folder.resolve()) for cell in plan.cells)
    except (OSError, ValueError, TypeError, ConfigError) as error:
        reason = " ".join(str(error).split())
        raise RunFolderError(f"{path} is broken ({reason}): run the comparison again, it writes it anew") from None
    if not inside:
        raise RunFolderError(f"{path} names folders outside {folder}: it is no plan of a comparison there")
    return plan


def planned_cells(comparison: Comparison, chosen: dict[str, Chosen], root: Path) -> dict[str, list[Cell]]:
    """Every entry's runs with the options its search chose, one per seed."""
    return {
        entry.label: [
            Cell(entry.label, comparison.run(entry, seed, chosen[entry.label].options), root)
            for seed in comparison.seeds
        ]
        for entry in comparison.methods
    }
