"""What a comparison set out to run, written down before it runs: whoever looks meanwhile knows each cell's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from ntkfl.compare.search import Chosen
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell
from ntkfl.errors import RunFolderError
from ntkfl.federation.run_folder import write_atomically
from ntkfl.safe_parse import parse_json, read_unlinked

PLAN = "plan.json"


@dataclass(frozen=True)
class Planned:
    """One cell: its curve's label, its folder, and the length it is cut at."""

    label: str
    seed: int
    folder: Annotated[str, Field(max_length=200)]  # relative to the comparison's
    rounds: Annotated[int, Field(gt=0)]
    stop_at: float | None


@dataclass(frozen=True)
class Plan:
    """A comparison's name, the accuracies it reports, and its cells."""

    name: str
    targets: tuple[float, ...]
    cells: tuple[Planned, ...]


_PLAN = TypeAdapter(Plan)


def write_plan(folder: Path, comparison: Comparison, cells: Sequence[Cell]) -> None:
    planned = tuple(
        Planned(c.label, c.config.seed, str(c.folder.path.relative_to(folder)), c.config.rounds, c.config.stop_at)
        for c in cells
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PLAN, _PLAN.dump_json(Plan(comparison.name, comparison.targets, planned), indent=1))


def read_plan(folder: Path) -> Plan | None:
    """The plan in `folder`; None where it holds no comparison. A folder's name in it never leads outside."""
    path = folder / PLAN
    try:
        plan = _PLAN.validate_python(parse_json(read_unlinked(path).decode()))
        inside = all((folder / cell.folder).resolve().is_relative_to(folder.resolve()) for cell in plan.cells)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # of pydantic too
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
